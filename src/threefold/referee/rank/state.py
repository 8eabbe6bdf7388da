"""The state of a training as sums that do not depend on how ranks divide it: what is saved, what begins.

The sum of a tensor adds up the bits of each value times a number that its place in the whole tensor gives, modulo
2**64. So sums of the parts of a tensor add up to that of the whole, on any mesh; another value or place is another sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .weights import local_part, unwrapped

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))
# At a time, so that the numbers of places take little memory.
_MOST_VALUES = 1 << 20


def sum_of(part: torch.Tensor, begin: Sequence[int], shape: Sequence[int]) -> int:
    """The sum of the part of a tensor of `shape` that begins at the place `begin`."""
    if not part.numel():
        return 0
    bits = part.contiguous().view(_BITS[part.element_size()])
    if not part.ndim:
        bits, begin, shape = bits[None], [0], [1]
    width = max(1, _MOST_VALUES // max(1, bits[0].numel()))
    total = 0
    for first in range(0, len(bits), width):
        some = bits[first : first + width].long()
        places = torch.zeros((), dtype=torch.int64, device=some.device)
        for axis, length in enumerate(some.shape):
            start = begin[axis] + (first if axis == 0 else 0)
            places = places[..., None] * shape[axis] + torch.arange(start, start + length, device=some.device)
        # Numbers that are linear in the place would let changes of several values cancel.
        places = (places + 1) * _ODD[0]
        places = (places ^ (places >> 29)) * _ODD[1]
        total += int((some * (places ^ (places >> 32))).sum())
    return total % (1 << 64)


def state_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The parts that this rank holds of the weights, and of what the optimizer keeps of each; or `unknown`, why not."""
    names = {id(parameter): name for name, parameter in unwrapped(module).named_parameters()}
    kept_of = {} if optimizer is None else optimizer.state
    try:
        weights = {name: _described(parameter) for name, parameter in unwrapped(module).named_parameters()}
        moments = {
            names[id(parameter)]: {key: _described(value) for key, value in kept.items()}
            for parameter, kept in kept_of.items()
            if id(parameter) in names
        }
    except ValueError as error:
        return {"unknown": str(error)}
    return {"weights": weights, "moments": moments}


def _described(value: Any) -> Any:
    """The place and the sum of a tensor; a number as it is."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, int | float | None) else str(type(value).__name__)
    shape, local, begin = list(value.shape), value.detach(), [0] * value.ndim
    if hasattr(local, "placements"):
        local, begin = local_part(local)
    kind = str(value.dtype).removeprefix("torch.")
    return {"type": kind, "shape": shape, "begin": begin, "size": list(local.shape), "sum": sum_of(local, begin, shape)}
