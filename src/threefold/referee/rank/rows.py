"""The rows of a micro-batch, as digests of what the model was called with.

In: the arguments of a module's call. Out: a digest for each row over all tensors that have it, without padding where an
attention mask says what padding is, and the rows whose labels are all ignored. Reads no random numbers and keeps no
tensor of the program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .sealed import digest  # relative: the package is loaded by its place, under another name

_IGNORED_LABEL = -100
_DEEPEST = 4
# What tells the number of rows, before any other tensor.
_LEADING = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")
# Made from the padding or the place in a batch, not from the row.
_NOT_THE_ROW = ("attention_mask", "position_ids", "cache_position")


class CallRows(NamedTuple):
    """What a call reads."""

    digests: list[str]
    ignored: list[int]
    """places of rows with labels, all of which are ignored."""
    labelled: bool
    tensors: dict[str, torch.Tensor]
    """with a part for each row."""
    shared: dict[str, torch.Tensor]
    """without one."""


def rows_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallRows | None:
    """The rows of a call; None if it is not called with data.

    Tensors with a gradient are another module's output, and a DTensor is a part of something.
    """
    arguments = {str(place): value for place, value in enumerate(args)} | dict(kwargs)
    tensors = {name: tensor for name, tensor in tensors_in(arguments) if tensor.ndim}
    if not tensors or any(tensor.requires_grad for tensor in tensors.values()):
        return None
    leading = [name for name in _LEADING if name in tensors]
    num_rows = len(tensors[leading[0] if leading else next(iter(tensors))])
    host = {name: tensor.detach().cpu() for name, tensor in tensors.items() if len(tensor) == num_rows}
    shared = {name: tensor.detach() for name, tensor in tensors.items() if name not in host}
    mask = _padding_mask(host)
    contents = {name: value for name, value in host.items() if _last(name) not in _NOT_THE_ROW}
    labels = _token_labels(contents)
    ignored = [] if labels is None else _ignored_rows(labels, mask)
    digests = [_digest_of(contents, row, mask) for row in range(num_rows)]
    return CallRows(digests, ignored, labels is not None, host, shared)


def _padding_mask(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """[rows, length] bool; a mask of more dimensions is one of attention, not of padding."""
    for name, value in tensors.items():
        if _last(name) == "attention_mask" and value.ndim == 2:
            return value.bool()
    return None


def _token_labels(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """[rows, length] integers; a label of a whole row is never ignored."""
    for name, value in tensors.items():
        if _last(name) == "labels" and value.ndim >= 2 and not value.is_floating_point():
            return value
    return None


def _ignored_rows(labels: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """The places of rows without a label that is trained on; rows that are all padding have nothing to train on."""
    trains = (labels != _IGNORED_LABEL).flatten(1).any(dim=1)
    if mask is not None:
        trains |= ~mask.any(dim=1)
    return [row for row, train in enumerate(trains.tolist()) if not train]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def tensors_in(values: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested arguments or outputs, by their names; no part of a distributed one."""
    if isinstance(values, torch.Tensor):
        if values.device.type != "meta" and not hasattr(values, "placements"):
            yield name, values
    elif isinstance(values, Mapping | list | tuple) and depth < _DEEPEST:
        named = values.items() if isinstance(values, Mapping) else enumerate(values)
        for inner, value in named:
            yield from tensors_in(value, f"{name}.{inner}" if name else str(inner), depth + 1)


def _digest_of(contents: dict[str, torch.Tensor], row: int, mask: torch.Tensor | None) -> str:
    parts = []
    for name in sorted(contents):
        value = contents[name][row]
        if mask is not None and contents[name].shape[:2] == mask.shape:
            value = value[mask[row]]
        parts.append(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        parts.append(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest(b"\0".join(parts))
