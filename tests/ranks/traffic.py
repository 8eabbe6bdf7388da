"""What a rank sends in a step, collective by collective, by hand: what traces and counts are compared with.

Calls, and bytes of the tensors that an axis makes or shares.

Of an all-gather or a reduce-scatter the whole tensor is counted, of others that of a rank: as `run.plan_trace` counts.
Not counted are the scales of weights in 8 bits, one all-reduce of 4 bytes a weight before each forward.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TypeAlias

from threefold.plan.activations import FLOAT
from threefold.plan.adapters import IN_PART
from threefold.plan.decoder import Decoder, Weight
from threefold.plan.setup import Setup
from threefold.plan.units import Unit, kept_whole, units_of

# (axis, collective) -> (calls, bytes)
Traffic: TypeAlias = dict[tuple[str, str], tuple[int, int]]
_RECOMPUTED = ("selective", "full", "offload")


class _Sent:
    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])

    def add(self, axis: str, collective: str, size: float, calls: int = 1) -> None:
        """Adds calls of `size` bytes each."""
        if calls:
            self.found[axis, collective][0] += calls
            self.found[axis, collective][1] += round(size * calls)


def traffic(decoder: Decoder, setup: Setup) -> Traffic:
    """Of all collectives of a step, on the first rank."""
    sent = _Sent()
    _of_data(decoder, setup, sent)
    if setup.topology.tp > 1:
        _of_tensor(decoder, setup, sent)
    if setup.topology.cp > 1:
        _of_context(decoder, setup, sent)
    return {key: (calls, size) for key, (calls, size) in sent.found.items()}


def _of_data(decoder: Decoder, setup: Setup, sent: _Sent) -> None:
    topology, batches = setup.topology, setup.num_batches
    units = units_of(decoder, topology.tp, setup.shards)
    if setup.sharing == "ddp":
        sent.add("dp", "all-reduce", FLOAT * units.whole.trained)
        return
    if setup.sharing != "fsdp":
        return
    twice = not kept_whole(decoder, setup)
    for unit in units.units:
        _of_unit(unit, setup, sent, gathers=(1 + twice) * batches)
    for unit in (units.head, units.embedding, units.rest):
        if unit.size:
            _of_unit(unit, setup, sent, gathers=batches)
    if setup.shards > 1:
        sent.add("fsdp", "all-reduce", 2 * FLOAT)  # the norm of the gradients


def _of_unit(unit: Unit, setup: Setup, sent: _Sent, *, gathers: int) -> None:
    if setup.shards > 1:
        sent.add("fsdp", "all-gather", unit.gathered(setup), gathers)
    if setup.shards > 1 and unit.trained:
        sent.add(
            "fsdp",
            "reduce-scatter",
            setup.reduced_element * unit.trained_padded,
            setup.num_batches,
        )
    if setup.topology.dp_replicate > 1 and unit.trained:
        sent.add("dp_replicate", "all-reduce", setup.reduced_element * unit.trained_shard)


def _of_tensor(decoder: Decoder, setup: Setup, sent: _Sent) -> None:
    """Of split layers: two sums of the hidden states forward and two of their gradients backward (arXiv:1909.08053)."""
    batches = setup.num_batches
    layers = len(decoder.layers)
    tokens = setup.tokens
    whole = tokens * decoder.hidden * setup.element
    again = setup.recompute in _RECOMPUTED
    if setup.sequence_parallel:
        # Two gathers and two scattered sums forward, their opposites backward; computed again up to the last product.
        sent.add("tp", "all-gather", whole, batches * layers * (4 + 2 * again))
        sent.add("tp", "reduce-scatter", whole, batches * layers * (4 + again))
        # The embedding, and the head's gradient.
        sent.add("tp", "reduce-scatter", whole, batches * 2)
        sent.add("tp", "all-gather", whole, batches * 2)
    else:
        # The embeddings' values need no gradient where they are frozen, unless layers are computed again from them.
        unneeded = bool(decoder.layers[0].rank) and not again
        sent.add("tp", "all-reduce", whole, batches * (layers * (4 + again) + 2 - unneeded))
    for layer in decoder.layers:
        if layer.chosen:  # the gradient of what weighs the chosen experts
            number = FLOAT if decoder.family.float32_routing else setup.element
            sent.add("tp", "all-reduce", tokens * layer.chosen * number, batches)
    chunks = -(-tokens // setup.chunk(decoder))
    left = tokens - (chunks - 1) * setup.chunk(decoder)
    for size, calls in ((setup.chunk(decoder), chunks - 1), (left, 1)):
        # The largest logit of each token.
        sent.add("tp", "all-reduce", FLOAT * size, batches * calls)
        # Its sum and its target.
        sent.add("tp", "all-reduce", 2 * FLOAT * size, batches * calls)
    sent.add("tp", "all-reduce", 2 * FLOAT)  # the norm of the gradients
    if partial := _partial(decoder, setup):
        sent.add("tp", "all-reduce", FLOAT * partial)


def _partial(decoder: Decoder, setup: Setup) -> int:
    """Numbers of this rank's shard of the parameters whose gradient a tp rank knows in part."""
    if decoder.layers[0].rank:
        own = [
            each for layer in decoder.layers for each in layer.weights if _known_in_part(each)
        ]
        shapes = [each.local(setup.topology.tp) for each in own]
        return sum(-(-shape[0] // setup.shards) * math.prod(shape[1:]) for shape in shapes)
    names = {"q norm", "k norm"}
    if setup.sequence_parallel:
        names |= {"norm", "norm bias", "o bias", "down bias", *(f"norm {n}" for n in range(4))}
    weights = [
        *decoder.around,
        *(weight for layer in decoder.layers for weight in layer.weights),
    ]
    return sum(-(-each.shape[0] // setup.shards) for each in weights if each.name in names)


def _known_in_part(weight: Weight) -> bool:
    """Whether it is of an adapter and its gradient a sum over tp ranks."""
    return weight.name == IN_PART


def _of_context(decoder: Decoder, setup: Setup, sent: _Sent) -> None:
    """Of attention: keys and values of entire rows to each rank, or entire rows of some heads (arXiv:2309.14509)."""
    times = setup.num_batches * len(decoder.layers)
    heads, kv_heads = decoder.heads
    width = decoder.layers[0].head_dim * setup.element / setup.topology.tp
    forwards = 1 + (setup.recompute in _RECOMPUTED)
    if setup.ulysses:
        for each in (heads, kv_heads, kv_heads, heads):
            sent.add("cp", "all-to-all", setup.tokens * each * width, times * (forwards + 1))
        return
    rows = setup.tokens * setup.topology.cp * 2 * kv_heads * width
    sent.add("cp", "all-gather", rows, times * forwards)
    sent.add("cp", "reduce-scatter", rows, times)
