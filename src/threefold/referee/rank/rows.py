"""The rows of a micro-batch, as digests of the model's arguments; and the targets of a loss outside the model.

In: the arguments of a module's call. Out: a digest for each row over all tensors that have it, without padding if an
attention mask marks it, and the rows whose labels are all ignored. Reads no random numbers and keeps no
tensor of the program.

Of a cross-entropy, the gradient at the logits of a token is `weight * (softmax(logits) - onehot(target))`: the target
and its weight in the sum follow from the gradient, and a residual shows that the loss is another one.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Relative: the package is loaded by its place, under another name.
from .sealed import Values, digest

Tensors = dict[str, Tensor]

_IGNORED_LABEL = -100
_DEEPEST = 4
# Arguments that show the number of rows, before any other tensor.
_LEADING = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")
# Made from the padding or the place in a batch, not from the row.
_NOT_THE_ROW = ("attention_mask", "position_ids", "cache_position")


class CallRows(NamedTuple):
    """The rows read by a call.

    Attributes:
        values: for the record: the digests of its `rows`; the places of those with labels that are all `ignored`, if it
            is `labelled`; the least position of a first token in `begin`, 0 if there are no positions.
        tensors: with a part for each row; !shared. is in front of the names of others.
    """

    values: Values
    tensors: Tensors


def rows_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallRows | None:
    """The rows of a call; None if it is not called with data.

    Tensors with a gradient are another module's output, and a DTensor is a part of something.
    """
    arguments = {str(place): value for place, value in enumerate(args)} | dict(kwargs)
    tensors = {name: tensor for name, tensor in tensors_in(arguments) if tensor.ndim}
    if not tensors or any(tensor.requires_grad for tensor in tensors.values()):
        return None
    num_rows = len(next(tensors[name] for name in (*_LEADING, *tensors) if name in tensors))
    host = {
        name: tensor.detach().cpu()
        for name, tensor in tensors.items()
        if len(tensor) == num_rows
    }
    shared = {
        f"!shared.{name}": tensor.detach()
        for name, tensor in tensors.items()
        if name not in host
    }
    if isinstance(caches := kwargs.get("use_cache"), bool):
        # With a cache, transformers does not separate documents by their positions.
        shared["!shared.use_cache"] = torch.tensor([caches])
    # A mask of more dimensions is one of attention, not of padding.
    mask = next(
        (value.bool() for value in _named(host, "attention_mask") if value.ndim == 2), None
    )
    contents = {name: value for name, value in host.items() if _last(name) not in _NOT_THE_ROW}
    # A label of a whole row is never ignored.
    of_tokens = (
        each
        for each in _named(contents, "labels")
        if each.ndim >= 2 and not each.is_floating_point()
    )
    labels = next(of_tokens, None)
    ignored = [] if labels is None else _ignored_rows(labels, mask)
    digests = [_digest_of(contents, row, mask) for row in range(num_rows)]
    positions = tensors.get("position_ids")
    begin = int(positions[:, 0].min()) if positions is not None and positions.ndim == 2 else 0
    values = {
        "rows": digests,
        "ignored": ignored,
        "labelled": labels is not None,
        "begin": begin,
    }
    return CallRows(values, host | shared)


def _named(tensors: Tensors, name: str) -> Iterator[Tensor]:
    """Those of a name, wherever they are nested."""
    return (value for each, value in tensors.items() if _last(each) == name)


def _ignored_rows(labels: Tensor, mask: Tensor | None) -> list[int]:
    """The places of rows without a label that is trained on; rows that are all padding have nothing to train on."""
    trains = (labels != _IGNORED_LABEL).flatten(1).any(dim=1)
    if mask is not None:
        trains |= ~mask.any(dim=1)
    return (~trains).nonzero().flatten().tolist()


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def tensors_in(values: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested arguments or outputs, by their names; no part of a distributed one."""
    if isinstance(values, Tensor):
        if values.device.type != "meta" and not hasattr(values, "placements"):
            yield name, values
    elif isinstance(values, Mapping | list | tuple) and depth < _DEEPEST:
        named = values.items() if isinstance(values, Mapping) else enumerate(values)
        for inner, value in named:
            yield from tensors_in(value, f"{name}.{inner}" if name else str(inner), depth + 1)


def _digest_of(contents: Tensors, row: int, mask: Tensor | None) -> str:
    parts = []
    for name in sorted(contents):
        value = contents[name][row]
        if mask is not None and contents[name].shape[:2] == mask.shape:
            value = value[mask[row]]
        parts.append(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        parts.append(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest(b"\0".join(parts))


def token_weights(logits: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor] | None:
    """Targets and weights [...] of logits [..., classes] and their gradient; None if the loss is no cross-entropy.

    Where the weight is 0, the target is -100.
    """
    # The residual of rounding, as a share of the gradient.
    most = 1e-4 if gradient.dtype in (torch.float32, torch.float64) else 0.02
    share = torch.softmax(logits.float(), dim=-1)
    gradient = gradient.float()
    targets = gradient.argmin(dim=-1)
    direction = share.scatter_add(-1, targets[..., None], torch.full_like(share[..., :1], -1.0))
    squared = (direction * direction).sum(-1)
    weights = (gradient * direction).sum(-1) / squared.clamp_min(
        torch.finfo(torch.float32).tiny
    )
    if not (gradient - weights[..., None] * direction).norm() <= most * gradient.norm():
        return None
    return torch.where(weights != 0, targets, -100), weights
