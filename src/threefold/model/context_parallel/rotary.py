"""Rotary embeddings that depend on a text's length (longrope): the length is that of a token's own row or document.

transformers takes the largest position of the tensor at hand. Here a tensor can be a part of a row, or hold several
rows and documents, of which one long one would change the factors of all. So both sets of factors are computed, and
each token takes the one that its document alone would give it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_LONG = "longrope"


def text_lengths(positions: Tensor, documents: Tensor | None) -> Tensor:
    """For each token of complete rows [batch, sequence] the length of its document, or of its row without documents."""
    if documents is None:
        return (positions.amax(1, keepdim=True) + 1).expand_as(positions)
    numbers = documents + 1  # padding has number -1
    last = torch.zeros(len(positions), positions.shape[1] + 2, dtype=positions.dtype, device=positions.device)
    return last.scatter_reduce(1, numbers, positions, "amax").gather(1, numbers) + 1


def places_in_documents(documents: Tensor) -> Tensor:
    """For each token [batch, sequence] its place in its document, from the number of each token's document."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.cat([torch.zeros_like(places[:, :1]), places[:, 1:] * (documents.diff(dim=1) != 0)], dim=1)
    return places - begins.cummax(dim=1).values


def follow_lengths(model: nn.Module, lengths: Callable[[], Tensor | None]) -> None:
    """Lets the model's rotary embeddings take the length of each token's text from `lengths`.

    Args:
        lengths: those of the tokens at hand, [batch, sequence / cp]; None outside of a batch.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds == _LONG or (isinstance(kinds, dict) and _LONG in kinds.values()):
            module.forward = _by_length(module, lengths)


def _by_length(module: Any, lengths: Callable[[], Tensor | None]) -> Callable[..., Any]:
    own = module.forward

    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        kind: Any = {} if layer_type is None else {"layer_type": layer_type}
        known, settings = lengths(), module.config.rope_parameters
        if known is None or (module.rope_type if layer_type is None else module.rope_type[layer_type]) != _LONG:
            return own(x, position_ids, **kind)
        limit = (settings if layer_type is None else settings[layer_type])["original_max_position_embeddings"]
        short = own(x, position_ids.clamp(max=limit - 1), **kind)
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), limit)
        long = own(x, torch.cat([position_ids, beyond], dim=-1), **kind)
        is_long = (known > limit)[..., None]
        if isinstance(short, Tensor):
            return torch.where(is_long, long[..., :-1, :], short)
        return tuple(torch.where(is_long, b[..., :-1, :], a) for a, b in zip(short, long, strict=True))

    return forward
