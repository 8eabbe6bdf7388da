"""The state of a training, whole, from what each rank has recorded of its parts (`rank/state.py`)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from threefold.referee.judge.parts import Unjudgeable
from threefold.referee.rank.sealed import Values

# The type, shape and sum of a tensor, or a number, by the weight that it belongs to and its name there.
WholeState = dict[tuple[str, str], Any]
WEIGHT = ""


def distinct(name: str, parts: Sequence[Values], content: str) -> list[Values]:
    """The parts of a tensor, which make the whole, without those that another rank holds too.

    Args:
        content: the key of what stands for the values of a part.

    Raises:
        Unjudgeable: ranks hold other values in the same place, or not all places.
    """
    kept: dict[Any, Values] = {}
    for part in parts:
        place = tuple(part["begin"]), tuple(part["size"])
        if kept.setdefault(place, part)[content] != part[content]:
            raise Unjudgeable(f"ranks hold different values of {name} in the same place")
    if not parts or sum(math.prod(size) for _, size in kept) != math.prod(parts[0]["shape"]):
        raise Unjudgeable(f"the parts of {name} that ranks hold do not make the whole")
    return list(kept.values())


def whole_state(states: Sequence[Values]) -> WholeState:
    """The state that the parts of all ranks make.

    Raises:
        Unjudgeable: they do not make one.
    """
    held: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for state in states:
        if "unknown" in state:
            raise Unjudgeable(state["unknown"])
        for name, value in state["weights"].items():
            held[name, WEIGHT].append(value)
        for name, kept in state["moments"].items():
            for key, value in kept.items():
                held[name, key].append(value)
    whole: WholeState = {}
    for name, values in held.items():
        whole[name] = first = values[0]
        if isinstance(first, dict):
            parts = distinct(" ".join(filter(None, name)), values, "sum")
            whole[name] = first["type"], tuple(first["shape"]), sum(part["sum"] for part in parts) % (1 << 64)
    return whole
