"""Positions of tokens: of those of a row that a cp rank holds, and in their own row or document.

A row becomes [sequence / cp] on each cp rank: its head chunk and its tail chunk of 2 x cp equal ones, so that causal
work is balanced. So a tensor can be a part of a row, or hold several rows and documents, for architectures that would
take the positions and lengths of the tensor. Embeddings that number the tokens of the tensor at hand (bart) are given
true positions. Rotary embeddings that depend on a text's length (longrope) take the largest position of the tensor, so
one long document would change the factors of all: both sets of factors are computed, and each token takes the one that
its document alone would give it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LONG = "longrope"
# Their result is laid out for one numbering that all rows share.
_SHARED = ("RoFormerSinusoidalPositionalEmbedding",)


def local_positions(sequence: int, *, cp_size: int, cp_rank: int) -> Tensor:
    """True positions in the row of the tokens that a cp rank holds, in the order in which it holds them.

    Args:
        sequence: length of the entire row, a multiple of 2 x cp_size (any length if cp_size is 1).

    Returns:
        int64 [sequence / cp_size]: chunk cp_rank, then chunk 2 x cp_size - 1 - cp_rank.
    """
    if cp_size == 1:
        return torch.arange(sequence)
    chunks = torch.arange(sequence).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def gathered_positions(sequence: int, *, cp_size: int) -> Tensor:
    """True positions in the row of the tokens of all cp ranks, in rank order; int64 [sequence]."""
    return torch.cat(
        [local_positions(sequence, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    )


def text_lengths(positions: Tensor, documents: Tensor | None) -> Tensor:
    """For each token of complete rows [batch, sequence] the length of its document, or of its row without documents."""
    if documents is None:
        return (positions.amax(1, keepdim=True) + 1).expand_as(positions)
    # From 0 on in each row, whatever the documents' own are.
    numbers = torch.zeros_like(documents)
    numbers[:, 1:] = (documents.diff(dim=1) != 0).cumsum(1)
    last = torch.zeros_like(positions).scatter_reduce(1, numbers, positions, "amax")
    return last.gather(1, numbers) + 1


def places_in_documents(documents: Tensor) -> Tensor:
    """For each token [batch, sequence] its place in its document, from the number of each token's document."""
    return torch.arange(documents.shape[1], device=documents.device) - starts_of_documents(
        documents
    )


def starts_of_documents(documents: Tensor) -> Tensor:
    """For each token [batch, sequence] the place in the row of the first token of its document.

    A document is a run of equal numbers: a number that returns behind another one is another document.
    """
    places = torch.arange(documents.shape[1], device=documents.device)
    return F.pad(places[1:] * (documents.diff(dim=1) != 0), (1, 0)).cummax(dim=1).values


def follow_lengths(model: nn.Module, lengths: Callable[[], Tensor | None]) -> None:
    """Lets the model's rotary embeddings take the length of each token's text from `lengths`.

    Args:
        lengths: those of the tokens at hand, [batch, sequence / cp]; None outside a batch.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds == _LONG or (isinstance(kinds, dict) and _LONG in kinds.values()):
            module.forward = _by_length(module, lengths)


def number_tokens(model: nn.Module, positions: Callable[[], Tensor | None]) -> None:
    """Lets embeddings that number the tokens at hand take the true `positions`.

    Args:
        positions: those of the tokens at hand, [batch, sequence / cp]; None if their own numbers are true.
    """
    for module in numbering(model):
        if type(module).__name__ not in _SHARED:
            module.forward = _at_positions(module.forward, positions)


def numbering(model: nn.Module) -> list[Any]:
    """The position embeddings that number the tokens of their input, unless positions are passed to them."""
    named = [module for module in model.modules() if "Position" in type(module).__name__]
    # Behind the input; as the input itself (xglm) they are the model's own, and true. So are those that it must give.
    return [
        module
        for module in named
        for each in [*inspect.signature(type(module).forward).parameters.values()][2:]
        if each.name == "position_ids" and each.default is None
    ]


def shares_numbers(model: nn.Module) -> bool:
    """Whether the model gives all rows the same positions, from 0 on."""
    return any(type(module).__name__ in _SHARED for module in model.modules())


def _at_positions(
    own: Callable[..., Tensor], positions: Callable[[], Tensor | None]
) -> Callable[..., Tensor]:
    def forward(*arguments: Any, **keywords: Any) -> Tensor:
        position_ids = positions()
        if position_ids is None:
            return own(*arguments, **keywords)
        embedded = own(*arguments, **{**keywords, "position_ids": position_ids})
        return embedded.view(*position_ids.shape, embedded.shape[-1])

    return forward


def _by_length(module: Any, lengths: Callable[[], Tensor | None]) -> Callable[..., Any]:
    own = module.forward

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        kind: Any = {} if layer_type is None else {"layer_type": layer_type}
        length = lengths()
        settings = module.config.rope_parameters
        if (
            length is None
            or (module.rope_type if layer_type is None else module.rope_type[layer_type])
            != _LONG
        ):
            return own(x, position_ids, **kind)
        limit = (settings if layer_type is None else settings[layer_type])[
            "original_max_position_embeddings"
        ]
        short = own(x, position_ids.clamp(max=limit - 1), **kind)
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), limit)
        long = own(x, torch.cat([position_ids, beyond], dim=-1), **kind)
        is_long = (length > limit)[..., None]
        if isinstance(short, Tensor):
            return torch.where(is_long, long[..., :-1, :], short)
        return tuple(
            torch.where(is_long, b[..., :-1, :], a) for a, b in zip(short, long, strict=True)
        )

    return forward
