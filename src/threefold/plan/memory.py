"""The memory of a rank at each moment of a step, line by line; its peak is the largest moment, not a sum of all.

A step is: the forward, at whose end all layers' activations are kept; the loss, chunk by chunk; the backward of each
layer, in which its activations are freed and its gradients made; the reduction outside the layers; the update.
An optimizer's memory per weight is in the table of `config/optimizer.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from threefold.plan.activations import FLOAT, Activations, activations_of, norm_bytes
from threefold.plan.decoder import Decoder
from threefold.plan.setup import Setup
from threefold.plan.units import Unit, kept_whole, units_of

# Of a CUDA device, assumed and not measured here: context, libraries and buffers of collectives; and of what is alive,
# what the allocator rounds up or cannot join.
OWN_BYTES, OWN_SHARE = 1.5 * 2**30, 0.03


@dataclass(frozen=True)
class Moment:
    """A moment of a step: memory held then, in bytes by line."""

    name: str
    lines: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.lines.values())


def timeline(decoder: Decoder, setup: Setup) -> list[Moment]:
    """The moments of a step that is not the first, in their order."""
    return list(_Step(decoder, setup).moments())


def peak(decoder: Decoder, setup: Setup) -> Moment:
    """The largest moment."""
    return max(timeline(decoder, setup), key=lambda moment: moment.total)


def host_bytes(decoder: Decoder, setup: Setup) -> float:
    """What a rank keeps in its host's memory: offloaded weights, gradients and moments; offloaded inputs of layers."""
    held = 0.0
    if setup.cpu_offload:
        units = units_of(decoder, setup.topology.tp, setup.shards).whole
        held += FLOAT * units.shard + (FLOAT + setup.moments) * units.trained_shard
    if setup.recompute == "offload":
        held += len(decoder.layers) * setup.stream * decoder.hidden * setup.element
    return held


def _weights(units: Unit, setup: Setup) -> float:
    """Bytes of weights: float32, and a copy to compute with, which is all that there is of frozen ones."""
    if setup.working_copy:
        return (FLOAT + setup.element) * units.trained_shard + setup.element * (
            units.shard - units.trained_shard
        )
    return FLOAT * units.shard


class _Step:
    """The moments of one micro-batch, the last of a step, and of the update after it."""

    def __init__(self, decoder: Decoder, setup: Setup) -> None:
        self._decoder, self._setup = decoder, setup
        self._units = units_of(decoder, setup.topology.tp, setup.shards)
        self._sharded = setup.sharing == "fsdp"
        kinds = {
            layer: activations_of(decoder, layer, setup)
            for layer in dict.fromkeys(decoder.layers)
        }
        self._layers: list[Activations] = [kinds[layer] for layer in decoder.layers]
        self._whole = kept_whole(decoder, setup)
        # Of the units gathered, and of all below each: asked at every moment.
        self._gathers = [each.gathered(setup) for each in self._units.units]
        self._below = list(accumulate(self._gathers, initial=0))
        # Of a unit that is reduced with exact sums: the integers that it is rounded to.
        self._rounded = 8 if setup.exact else 0
        self._gradients = (
            0.0
            if setup.cpu_offload
            else setup.gradient_element * self._units.whole.trained_shard
        )
        # The last that a micro-batch reduces; of a tied embedding or a small one, with the rest.
        self._last = self._units.embedding if self._units.embedding.size else self._units.rest
        self._rest = (
            self._units.rest.gathered(setup) + self._units.embedding.gathered(setup)
            if self._sharded
            else 0.0
        )
        self._end = self._units.head.gathered(setup) if self._sharded else 0.0
        trained = self._last.trained > 0
        self._head = (
            trained
            * setup.element
            * -(-decoder.vocabulary // setup.topology.tp)
            * decoder.hidden
        )
        self._constant = {
            "weights": 0.0 if setup.cpu_offload else _weights(self._units.whole, setup),
            "moments": 0.0
            if setup.cpu_offload
            else setup.moments * self._units.whole.trained_shard,
        }
        if setup.averages:
            self._constant["averages"] = FLOAT * self._units.whole.trained_shard

        windows = (each.window for each in decoder.layers)
        masked = setup.documents or any(
            window is not None and window < setup.seq_len for window in windows
        )
        if setup.device is None and masked:
            self._constant["masks"] = float(setup.tokens * setup.seq_len)

    def moments(self) -> Iterator[Moment]:
        """In their order."""
        kept = sum(each.kept for each in self._layers)
        before = self._before()
        # FSDP2 keeps the last buffer that was reduced until the next reduction.
        left = (
            FLOAT * self._last.trained_padded
            if self._sharded and self._setup.num_batches > 1
            else 0.0
        )
        yield self._loss(kept, before, left)
        yield from self._backward(kept, before, left)
        yield self._moment("update", gradients=self._gradients)

    def _before(self) -> float:
        """Gradients that exist before the first of the micro-batch: of those before it, and in DDP's buckets."""
        setup = self._setup
        if setup.working_copy and setup.num_batches == 2:
            return setup.element * self._units.whole.trained_shard  # not yet added to another
        return self._gradients * ((setup.num_batches > 1) + (setup.sharing == "ddp"))

    def _moment(self, name: str, **lines: float) -> Moment:
        named = {_NAMES[key]: size for key, size in lines.items() if size}
        if self._setup.exact and name != "update":  # until the gradients are made of them
            named["exact sums"] = 2 * lines.get("gradients", 0.0)
        held = {**self._constant, **named}
        if self._setup.device is not None:
            held["the device's own"] = OWN_BYTES + OWN_SHARE * sum(held.values())
        return Moment(name, held)

    def _gathered(self, computing: int | None, *, below: int) -> float:
        """Bytes that are whole: outside the units, of the unit that computes, and of those `below` it.

        Of these all, if they stay from forward to backward, else the next one, which is on its way.
        """
        if not self._sharded:
            return 0.0
        units = self._gathers
        gathered = self._rest + (
            units[computing] if computing is not None and computing < len(units) else 0
        )
        if self._whole:
            return gathered + self._below[below]
        return gathered + (units[below - 1] if below and self._setup.shards > 1 else 0)

    def _loss(self, kept: float, before: float, left: float) -> Moment:
        decoder, setup = self._decoder, self._setup
        element, tokens, hidden = setup.element, setup.tokens, decoder.hidden
        part = -(-decoder.vocabulary // setup.topology.tp)
        size = setup.chunk(decoder)
        last = setup.stream * hidden * norm_bytes(decoder.family, element)
        # float32 before the softmax exists as a separate tensor on a CPU only. Kernels write the gradient alone.
        softmax = element + FLOAT * (2 if setup.device is None and element < FLOAT else 1)
        if setup.fused_loss:
            softmax = 2 * element
        head = part * hidden * (self._head > 0)
        chunks = -(-tokens // size)
        summed = FLOAT * head if chunks > 1 else 0.0
        cast = (FLOAT + element * (element < FLOAT)) * head
        product = (
            element * head * (setup.device is None) if chunks > 1 and element < FLOAT else cast
        )
        # The gradient of the chunk before is let go of when there is another.
        first = (
            size * part * (softmax + (element if chunks > 1 and element < FLOAT else 0))
            + summed
        )
        second = size * part * element + summed + product + size * hidden * element
        units = self._units.units
        # What the last all-gather received stays until the end of the forward.
        flat = (
            units[-1].gathered(setup) if units and self._sharded and setup.shards > 1 else 0.0
        )
        return self._moment(
            "loss",
            activations=kept + last,
            head=2 * tokens * hidden * element,
            chunk=max(first, second, cast),
            gathered=self._gathered(None, below=len(units) if self._whole else 0)
            + self._end
            + flat,
            gradients=before,
            reduction=left,
        )

    def _backward(self, kept: float, before: float, left: float) -> Iterator[Moment]:
        setup, units = self._setup, self._units.units
        element, gradients, reducing = setup.element, before, left
        of_gradients = setup.gradient_element * (not setup.cpu_offload)
        places = [number for number, unit in enumerate(units) for _ in range(unit.layers)]
        places += [len(units)] * (len(self._layers) - len(places))
        hidden = setup.tokens * self._decoder.hidden * element
        head: float = self._head
        if self._end:
            end, head = self._units.head, 0.0
            gradients += 0.0 if before else of_gradients * end.trained_shard
            reducing = FLOAT * end.trained_padded if end.trained else left
            yield self._moment(
                "reduction of the head",
                activations=kept,
                work=hidden,
                gathered=self._gathered(None, below=len(units)) + self._end,
                gradients=gradients,
                reduction=reducing + element * end.trained + self._rounded * end.trained_padded,
            )
        for layer in range(len(self._layers) - 1, -1, -1):
            own = self._layers[layer]
            number = places[layer]
            yield self._moment(
                f"backward of layer {layer}",
                activations=kept,
                work=own.again + own.working,
                head=head,
                gathered=self._gathered(number, below=number),
                gradients=gradients,
                reduction=reducing,
            )
            kept -= own.kept
            if number < len(units) and (not layer or places[layer - 1] != number):
                unit = units[number]
                gradients += 0.0 if before else of_gradients * unit.trained_shard
                if self._sharded:
                    reducing = FLOAT * unit.trained_padded
                    yield self._moment(
                        f"reduction of layer {layer}",
                        activations=kept,
                        work=hidden,
                        head=head,
                        gathered=self._gathered(None, below=number),
                        gradients=gradients,
                        reduction=reducing
                        + element * unit.trained
                        + self._rounded * unit.trained_padded,
                    )
        yield from self._rest_of_backward(hidden, gradients, reducing, head)

    def _rest_of_backward(
        self, hidden: float, gradients: float, reducing: float, head: float
    ) -> Iterator[Moment]:
        """The embedding, and the reduction outside the layers."""
        rest, element = self._last, self._setup.element
        embedding = (
            element
            * self._decoder.around[0].size
            / (self._setup.topology.tp if self._decoder.tied else 1)
        )
        embedding *= self._head > 0
        lines = {
            "work": hidden,
            "head": head + embedding,
            "reduction": reducing,
            "gradients": gradients,
        }
        yield self._moment(
            "backward of the embedding", gathered=self._gathered(None, below=0), **lines
        )
        if self._sharded:
            reduction = (FLOAT + self._rounded) * rest.trained_padded + element * rest.trained
            yield self._moment(
                "reduction of the rest", reduction=reduction, gradients=self._gradients
            )


_NAMES = {
    "activations": "activations",
    "work": "a layer's work",
    "head": "the head's gradient",
    "chunk": "a chunk of logits",
    "gathered": "gathered weights",
    "gradients": "gradients",
    "reduction": "reduction",
}
