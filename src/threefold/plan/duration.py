"""How long a step takes: products, attention, passes over memory, and communication.

Each is an amount, of operations or bytes, over a rate: what kernels reach on the device (`efficiency`). Communication
counts fully where it overlaps with no computation, else in part: both need the same processors and memory.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from threefold.plan.activations import FLOAT
from threefold.plan.decoder import Decoder
from threefold.plan.efficiency import Efficiency, efficiency_of
from threefold.plan.fabric import Fabric
from threefold.plan.operations import causal_keys
from threefold.plan.setup import Setup
from threefold.plan.units import kept_whole, units_of

# Smaller products reach dim / (dim + 256) of the rate of large ones, by their least dim.
HALF_AT = 256
# How much slower float32 products are with torch's default settings (H100: 67 of 989 TFLOP/s).
FLOAT32 = 15
# The least dim of products that are made in 8 bits, and the bytes that casting a number for them reads and writes:
# once for its scale, once to be cast.
FLOAT8_FROM, _CAST = 2048, 5
# From one kernel's start to the next, as the host can, s; and kernels of a layer, forward.
_START, _KERNELS, _KERNELS_COMPILED = 5e-6, 60, 20
# Bytes that an update reads and writes of each parameter beside its moments: weight and gradient, and the weight again.
_UPDATE = 12
# And before it: the gradients' norm, and their clipping.
_NORM, _CLIP = 4, 8
# Bytes/s of a host's memory for the update of each of its devices' shards, and of the way there.
_HOST_MEMORY, _HOST_LINK = 25e9, 50e9


@dataclass(frozen=True)
class Duration:
    """Seconds of a step.

    Attributes:
        products, attention, passes: of computing.
        sent: of all collectives, by axis; `waited`: of those that nothing is computed beside.
        update: of the optimizer; host: of transfers and updates on the host.
    """

    products: float
    attention: float
    passes: float
    launches: float
    sent: dict[str, float]
    waited: float
    update: float
    host: float

    @cached_property
    def computing(self) -> float:
        return max(self.products + self.attention + self.passes, self.launches)

    @cached_property
    def total(self) -> float:
        return self.computing + self.waited + self.update + self.host


@lru_cache(maxsize=4096)
def _layer_products(
    decoder: Decoder, tp: int, experts: float, float8: float
) -> tuple[float, float]:
    """Of a token through all layers' matrices, forward: operations at the rate of large bfloat16 products, and numbers
    that are cast to 8 bits.

    Args:
        experts: the rate of chosen experts' products, of that of others.
        float8: how many times faster products in 8 bits are; 1: there are none.
    """
    operations = cast = 0.0
    for layer, count in Counter(decoder.layers).items():
        for weight in layer.weights:
            if len(weight.shape) < 2 or "norm" in weight.name or "bias" in weight.name:
                continue
            shape = weight.local(tp)
            least = min(shape[-2:])
            matrices = count * weight.met * math.prod(shape[:-2])
            in_8_bits = float8 != 1 and least >= FLOAT8_FROM
            rate = (
                least
                / (least + HALF_AT)
                * (float8 if in_8_bits else 1.0)
                * (experts if weight.met < 1 else 1.0)
            )
            operations += 2 * matrices * math.prod(shape[-2:]) / rate
            cast += in_8_bits * matrices * sum(shape[-2:])
    return operations, cast


def duration(
    decoder: Decoder, setup: Setup, fabric: Fabric, reached: Efficiency | None = None
) -> Duration:
    """The duration of a step of a rank; `setup.device` is set.

    Args:
        reached: what its kernels reach; None: as published for its device.
    """
    device = setup.device
    assert device is not None
    reached = reached or efficiency_of(device)
    tp, batches, tokens = setup.topology.tp, setup.num_batches, setup.tokens
    layers, cast = _layer_products(decoder, tp, reached.experts, reached.float8[setup.float8])
    head = (
        2
        * decoder.vocabulary
        * decoder.hidden
        / tp
        * (decoder.hidden + HALF_AT)
        / decoder.hidden
    )
    again = {"none": 0, "selective": 0}.get(setup.recompute, 1)
    rate = reached.products * device.bfloat16 / (1 if setup.element == 2 else FLOAT32)
    times = 2 if decoder.layers[0].rank else 3  # frozen weights have no gradient
    products = tokens * ((times + again) * layers + times * head) / rate
    attention = (
        tokens
        * _attention(decoder, setup)
        * (3.5 + again)
        / (reached.attention * rate / reached.products)
    )
    memory = reached.passes * device.bandwidth
    # Inputs are cast forward (and again), gradients backward.
    passes = tokens * (_passes(decoder, setup) + _CAST * cast * (1 + again / 2)) / memory
    computing = products + attention + passes
    kernels = _KERNELS_COMPILED if setup.compiled else _KERNELS
    launches = (
        batches * len(decoder.layers) * kernels * _START * (3 + (setup.recompute != "none"))
    )
    sent, waited = _waits(decoder, setup, fabric, computing)
    waited += reached.shown * max(0.0, sum(sent.values()) - waited)
    shard = units_of(decoder, tp, setup.shards).whole.trained_shard
    updated = shard * (_around_update(setup) + 2 * setup.moments)
    return Duration(
        products * batches,
        attention * batches,
        passes * batches,
        launches,
        sent,
        waited,
        0.0 if setup.cpu_offload else updated / memory,
        _host(decoder, setup, shard, computing),
    )


def _around_update(setup: Setup) -> int:
    """Bytes of each parameter that are read and written between the last product and the next step, without moments."""
    if not setup.working_copy:
        return _NORM + _CLIP + _UPDATE
    # The second micro-batch's gradient is added to one in its own type, those after it to a sum in float32.
    added = sum(
        2 * setup.element + FLOAT if number == 2 else setup.element + 2 * FLOAT
        for number in range(2, setup.num_batches + 1)
    )
    # Norm and update read the gradient; the update reads and writes the weight, and writes the copy.
    return added + 2 * setup.gradient_element + 2 * FLOAT + setup.element


def _attention(decoder: Decoder, setup: Setup) -> float:
    """Operations of a token forward, of keys that it sees; backward is 2.5 times that, as scores are computed again."""
    # Half of what is counted for published figures, where a token of a row has all keys of it.
    return decoder.flops.of_attention(causal_keys(setup.seq_len)) / 6 / setup.topology.tp


def _passes(decoder: Decoder, setup: Setup) -> float:
    """Bytes of a token that are read and written outside products, forward and backward, of all layers."""
    tp, hidden, element = setup.topology.tp, decoder.hidden, setup.element
    stream = hidden / tp if setup.sequence_parallel else hidden
    forward = 0.0
    for layer in decoder.layers:
        queries = layer.heads * layer.head_dim / tp
        keys = layer.kv_heads * layer.head_dim / tp
        wide = (layer.width * max(1, layer.chosen) + layer.shared_width) / tp
        if setup.compiled:
            forward += element * (2 * 4 * stream + 2 * (queries + keys) + 3 * wide)
        else:
            # A norm in float32 is six passes; positions are five; an activation and a product are five.
            normed = 2 * stream + bool(decoder.family.qk_norm) * (queries + keys)
            forward += normed * (28 + 3 * element) + 2 * 3 * element * stream
            forward += element * (11 * (queries + keys) + 5 * wide)
        if layer.chosen:
            forward += element * 8 * layer.chosen * hidden
    times = 3 + (setup.recompute != "none")
    logits = decoder.vocabulary / tp * element * 3
    if not setup.fused_loss:
        logits += decoder.vocabulary / tp * 4 * 5
    return times * forward + logits


def _host(decoder: Decoder, setup: Setup, shard: int, computing: float) -> float:
    """Weights and gradients on their way, an update on the host's processors, and layers' inputs beside computing."""
    seconds = 0.0
    if setup.recompute == "offload":
        inputs = setup.tokens * decoder.hidden * setup.element * len(decoder.layers)
        seconds += setup.num_batches * max(0.0, 2 * inputs / _HOST_LINK - computing)
    if setup.cpu_offload:
        seconds += (
            setup.num_batches * (2 + 1) * 4 * shard / _HOST_LINK
            + shard * (_UPDATE + 16) / _HOST_MEMORY
        )
    return seconds


def _waits(
    decoder: Decoder, setup: Setup, fabric: Fabric, computing: float
) -> tuple[dict[str, float], float]:
    """(seconds of communication by axis, exposed seconds of it) of a step."""
    topology, batches, element = setup.topology, setup.num_batches, setup.element
    tp = topology.tp
    cp = topology.cp
    tokens = setup.tokens
    count = len(decoder.layers)
    again = setup.recompute != "none"
    sent: dict[str, float] = {}
    waited = 0.0
    if tp > 1:
        size = tokens * decoder.hidden * element
        one = fabric.seconds("all-reduce", size, ranks=tp, stride=1)
        # Scattered sums and gathers are half a sum each; recomputed layers are gathered twice, and scattered once.
        sent["tp"] = (
            batches * one * (count * (4 + again * (1.5 if setup.sequence_parallel else 1)) + 2)
        )
        # Sums of backward run beside the gradient of one weight.
        waited += sent["tp"] - (0 if setup.sequence_parallel else batches * one * count)
    if cp > 1:
        width = decoder.layers[0].head_dim * element / tp
        heads, kv_heads = decoder.heads
        kind, rows = (
            ("all-to-all", heads + kv_heads) if setup.ulysses else ("all-gather", kv_heads * cp)
        )
        one = fabric.seconds(kind, 2 * rows * tokens * width, ranks=cp, stride=tp)
        sent["cp"] = batches * count * (2 + again) * one
        waited += sent["cp"]
    data, beside = _of_data(decoder, setup, fabric, computing)
    return {**sent, **data}, waited + beside


def _of_data(
    decoder: Decoder, setup: Setup, fabric: Fabric, computing: float
) -> tuple[dict[str, float], float]:
    """As `_waits`, of weights that are gathered ahead and gradients that are reduced behind."""
    topology, batches = setup.topology, setup.num_batches
    units = units_of(decoder, topology.tp, setup.shards)
    stride, shards, reduced = topology.tp, setup.shards, setup.reduced_element
    sent: dict[str, float] = {}
    waited = 0.0
    # Gathers before the first layer and reductions after it, which overlap with no computation.
    outer = [each for each in (units.rest, units.embedding) if each.size]
    inner = [*units.units, *([units.head] if units.head.size else [])]
    if shards > 1:
        seconds = partial(fabric.seconds, ranks=shards, stride=stride)
        gathers, first = (
            [seconds("all-gather", unit.gathered(setup)) for unit in each]
            for each in (inner, outer)
        )
        scatters, last = (
            sum(seconds("reduce-scatter", reduced * unit.trained_padded) for unit in each)
            for each in (inner, outer)
        )
        again = 0 if kept_whole(decoder, setup) else sum(gathers[: len(units.units)])
        forward, backward = sum(gathers), again + scatters
        sent["fsdp"] = batches * (forward + sum(first) + backward + last)
        share = 1 / (3 + (setup.recompute in ("full", "offload")))
        waited = sum(first) + sum(gathers[:1]) + last + max(0.0, forward - computing * share)
        waited += max(0.0, backward - computing * (1 - share))
        waited *= batches
    if topology.dp_replicate > 1:
        seconds = partial(
            fabric.seconds, "all-reduce", ranks=topology.dp_replicate, stride=stride * shards
        )
        sent["dp_replicate"] = once = seconds(reduced * units.whole.trained_shard)
        left = computing * 2 / 3 - (sent.get("fsdp", 0.0) / batches / 2)
        last = sum(seconds(reduced * each.trained_shard) for each in outer)
        waited += last + max(0.0, once - last - max(0.0, left))
    return sent, waited
