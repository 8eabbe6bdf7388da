"""The state of a training, whole, from what each rank has recorded of its parts (`rank/state.py`)."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from threefold.referee.judge.parts import Unjudgeable
from threefold.referee.rank.sealed import Values

# The type, shape and sum of a tensor, or a number, by its name.
Described = dict[str, Any]


class WholeState(NamedTuple):
    """The weights of a training, and what its optimizer keeps of each, as `weight name`."""

    weights: Described
    moments: Described


def distinct(name: str, parts: Sequence[Values], content: str) -> list[Values]:
    """The parts of a tensor, which make the whole, without those that another rank holds too.

    Args:
        content: the key of what represents the values of a part.

    Raises:
        Unjudgeable: ranks hold other values in the same place, or not all places.
    """
    kept: dict[Any, Values] = {}
    for part in parts:
        place = tuple(part["begin"]), tuple(part["size"])
        if kept.setdefault(place, part)[content] != part[content]:
            raise Unjudgeable(f"ranks hold different values of {name} in the same place")
    if not parts or sum(math.prod(size) for _, size in kept) != math.prod(parts[0]["shape"]):
        raise Unjudgeable(f"the parts of {name} that ranks hold do not make up the whole")
    return list(kept.values())


def whole_state(states: Sequence[Values]) -> WholeState:
    """The state that the parts of all ranks make.

    Raises:
        Unjudgeable: they do not make one.
    """
    return WholeState(dict(_whole(states, "weights")), dict(_whole(states, "moments")))


def _whole(states: Sequence[Values], kind: str) -> Iterator[tuple[str, Any]]:
    held = defaultdict[str, list[Any]](list)
    for state in states:
        if "unknown" in state:
            raise Unjudgeable(state["unknown"])
        for name, value in state[kind].items():
            held[name].append(value)
    for name, values in held.items():
        first = values[0]
        if not isinstance(first, dict):
            yield name, first
            continue
        parts = distinct(name, values, "sum")
        total = sum(part["sum"] for part in parts) % (1 << 64)
        yield name, (first["type"], tuple(first["shape"]), total)


def differing(saved: Described, begins: Described) -> list[str]:
    """The names of state that has changed since it was saved."""
    return [name for name, value in saved.items() if begins.get(name) != value]
