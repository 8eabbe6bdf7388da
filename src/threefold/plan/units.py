"""A rank's part of a model's parameters, and the units that are gathered together (`model.data_parallel.shard`)."""

import math
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache, reduce

from threefold.plan import choices
from threefold.plan.decoder import Decoder, Weight
from threefold.plan.setup import Setup, kind_of


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers together.

    Attributes:
        layers: how many layers it holds.
        narrow: numbers of weights that can be gathered in 8 bits (`model.float8`).
        size: numbers of this rank's tp part.
        padded: the same with each parameter's first dim filled up to a multiple of the shards.
        shard: numbers of one shard, the largest.
        trained, trained_padded, trained_shard: the same of what has a gradient.
    """

    layers: int
    narrow: int
    size: int
    padded: int
    shard: int
    trained: int
    trained_padded: int
    trained_shard: int

    def gathered(self, setup: Setup) -> int:
        """Bytes of its weights, gathered."""
        return (
            setup.element * self.padded
            - (setup.element - 1) * self.narrow * setup.gathers_8_bits
        )


@dataclass(frozen=True)
class Units:
    """All of a model.

    Attributes:
        units: its layers, in their order.
        head: with the last norm, reduced before the layers; of no size where it is in the rest.
        embedding: gathered before the layers and reduced after them, as the rest; of no size where it is in the rest.
    """

    units: tuple[Unit, ...]
    head: Unit
    embedding: Unit
    rest: Unit

    @cached_property
    def whole(self) -> Unit:
        """All of it, as if it were gathered together."""
        return reduce(_sum, [*self.units, self.head, self.embedding], self.rest)


@lru_cache(maxsize=4096)
def units_of(decoder: Decoder, tp: int, shards: int) -> Units:
    """The units of a tp rank's part over so many shards."""
    parts = {
        layer: _unit(layer.weights, tp, shards, layers=1)
        for layer in dict.fromkeys(decoder.layers)
    }
    units: list[Unit] = []
    waiting = empty = Unit(0, 0, 0, 0, 0, 0, 0, 0)
    for layer in decoder.layers:
        waiting = _sum(waiting, parts[layer])
        if 4 * waiting.size >= choices.UNIT_BYTES:
            units.append(waiting)
            waiting = empty
    embedding, *last = decoder.around
    ends = [_unit(tuple(each), tp, shards, layers=0) for each in ([embedding], last)]
    apart = not decoder.tied and last[0].name.startswith("norm")
    own = [each if apart and 4 * each.size >= choices.UNIT_BYTES else empty for each in ends]
    rest = reduce(
        _sum, [end for end, each in zip(ends, own, strict=True) if each is empty], waiting
    )
    return Units(tuple(units), own[1], own[0], rest)


def kept_whole(decoder: Decoder, setup: Setup) -> bool:
    """Whether gathered weights stay from forward to backward."""
    size = units_of(decoder, setup.topology.tp, setup.shards).whole.size * setup.element
    return choices.kept_whole(size, kind_of(setup.device), offloaded=setup.cpu_offload).value


def _unit(weights: tuple[Weight, ...], tp: int, shards: int, *, layers: int) -> Unit:
    # For linear layers, which experts are not; a router is not converted.
    narrow = sum(
        math.prod(shape)
        for each in weights
        if len(shape := each.local(tp)) == 2
        and each.name.split()[-1] not in ("router", "bias")
        and choices.pays("tensorwise", *shape)
        and not shape[0] % shards
    )
    counts = [layers, narrow * layers]
    for some in (weights, [weight for weight in weights if weight.trained]):
        shapes = [weight.local(tp) for weight in some]
        shard = sum(-(-shape[0] // shards) * math.prod(shape[1:]) for shape in shapes)
        counts += [sum(map(math.prod, shapes)), shard * shards, shard]
    return Unit(*counts)


def _sum(one: Unit, other: Unit) -> Unit:
    return Unit(*(a + b for a, b in zip(astuple(one), astuple(other), strict=True)))
