"""The state of a training, whole, from what each rank has recorded of its parts (`rank/state.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# The type, shape and sum of a tensor, or a number, by the weight that it belongs to and its name there.
WholeState = dict[tuple[str, str], Any]
WEIGHT = ""


class UnknownState(Exception):
    """Why two starts cannot be compared."""


def whole_state(states: Sequence[dict[str, Any]]) -> WholeState:
    """The state that the parts of all ranks make."""
    if unknown := next((state["unknown"] for state in states if "unknown" in state), None):
        raise UnknownState(unknown)
    boxes: dict[tuple[str, str], dict[Any, Any]] = {}
    kinds: dict[tuple[str, str], Any] = {}
    for state in states:
        named = [((name, WEIGHT), value) for name, value in state["weights"].items()]
        named += [((name, key), value) for name, kept in state["moments"].items() for key, value in kept.items()]
        for name, value in named:
            if not isinstance(value, dict):
                kinds[name] = value
                continue
            kinds[name] = value["type"], tuple(value["shape"])
            box = tuple(value["begin"]), tuple(value["size"])
            if boxes.setdefault(name, {}).setdefault(box, value["sum"]) != value["sum"]:
                raise UnknownState(f"ranks hold different values of {' '.join(filter(None, name))} in the same place")
    whole: WholeState = {}
    for name, kind in kinds.items():
        parts = boxes.get(name)
        if parts is not None and sum(math.prod(size) for _, size in parts) != math.prod(kind[1]):
            raise UnknownState(f"the parts of {' '.join(filter(None, name))} that ranks hold do not make the whole")
        whole[name] = kind if parts is None else (*kind, sum(parts.values()) % (1 << 64))
    return whole
