"""The state of a training as sums that do not depend on how ranks divide it: of saved states and of the initial one.

The sum of a tensor adds up the bits of each value times a number that its place in the whole tensor gives, modulo
2**64. So sums of the parts of a tensor add up to that of the whole, on any mesh; another value or place is another sum.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from .sealed import Values
from .weights import named_parameters, part_of, parts_in_a_row

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))
# At a time, so that the numbers of places take little memory.
_MOST_VALUES = 1 << 20


def sum_of(part: torch.Tensor, begin: Sequence[int], shape: Sequence[int]) -> int:
    """The sum of the part of a tensor of `shape` that begins at the place `begin`."""
    if part.ndim and len(part) > 1 and part.numel() > _MOST_VALUES:
        half = len(part) // 2
        parts = (part[:half], begin), (part[half:], [begin[0] + half, *begin[1:]])
        return sum(sum_of(each, place, shape) for each, place in parts) % (1 << 64)
    bits = part.contiguous().view(_BITS[part.element_size()]).long()
    places = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start, length, size in zip(begin, bits.shape, shape, strict=True):
        places = places[..., None] * size + torch.arange(
            start, start + length, device=bits.device
        )
    # Numbers that are linear in the place would let changes of several values cancel.
    places = (places + 1) * _ODD[0]
    places = (places ^ (places >> 29)) * _ODD[1]
    return int((bits * (places ^ (places >> 32))).sum()) % (1 << 64)


def state_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Values:
    """The parts that this rank holds of the weights, and of what the optimizer keeps of each; or `unknown`, why not."""
    kept_of = {} if optimizer is None else optimizer.state
    try:
        in_a_row = parts_in_a_row(module)
        state: Values = {"weights": {}, "moments": {}}
        for name, parameter in named_parameters(module).items():
            if hasattr(parameter, "ds_tensor") or (
                optimizer is not None and hasattr(parameter, "_hp_mapping")
            ):
                raise ValueError("DeepSpeed's ZeRO keeps weights and moments in its own format")
            place = in_a_row.get(id(parameter))
            state["weights"][name] = _described(parameter, place)
            if parameter in kept_of:
                state["moments"] |= {
                    f"{name} {key}": _described(value, place)
                    for key, value in kept_of[parameter].items()
                }
    except ValueError as error:
        return {"unknown": str(error)}
    return state


def _described(value: Any, in_a_row: tuple[list[int], int] | None) -> Any:
    """The place and the sum of a tensor; a number as it is."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, int | float | None) else type(value).__name__
    part = part_of(value, in_a_row)
    whole = part.shape if len(part.begin) == len(part.shape) else [math.prod(part.shape)]
    kind = str(value.dtype).removeprefix("torch.")
    return {"type": kind, **part.place, "sum": sum_of(part.values, part.begin, whole)}
