"""Attention under any mask without a mask in memory: torch's flex_attention, which skips blocks that are all hidden.

For CUDA: its backward has no kernel for a CPU. A mask is a function of the places of a query and a key; here it is the
model's own, at true positions, with the documents of each row. Blocks (128 x 128) that it leaves empty are never
computed, so windows, documents and the causal half cost what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import PretrainedConfig

from threefold.errors import Problem
from threefold.model.context_parallel.backend import drops_weights
from threefold.model.context_parallel.rotary import places_in_documents
from threefold.plan import choices

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def problems(config: PretrainedConfig, *, device: str) -> list[Problem]:
    """Why blocks cannot be used although they were asked for by name; empty if they can."""
    possible = choices.attention("auto", choices.Device.here(device), drops_weights=drops_weights(config))
    if possible.value == "flex":
        return []
    expected = "a CUDA device with triton, and a model without attention dropout"
    return [Problem(f"model.attention = flex, but {possible.why}", expected, "--model.attention auto")]


def block_mask(
    mask_function: MaskFunction, *, queries: Tensor, keys: Tensor, documents: Tensor | None, batch: int
) -> BlockMask:
    """The mask of one kind of layer.

    Args:
        mask_function: (row, head, query's place, key's place) -> whether the query sees the key.
        queries, keys: true places in the row of the local queries and of the keys, int64 [queries], [keys].
        documents: [batch, sequence] number of each token's document by its true place, or None.
    """

    places = places_in_documents(documents) if documents is not None else None

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own, other = queries[query], keys[key]
        if documents is None or places is None:
            return mask_function(row, head, own, other)
        seen = mask_function(row, head, places[row, own], places[row, other])
        return seen & (documents[row, own] == documents[row, other])

    create = _compiled(create_block_mask) if queries.is_cuda else create_block_mask
    rows = batch if documents is not None else None
    found: BlockMask = create(sees, rows, None, len(queries), len(keys), device=queries.device)
    return found


def attend_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Output [batch, queries, heads, head] of query [batch, heads, queries, head] over [batch, kv heads, keys, head].

    A sink is a key of its own that gives nothing: with the logarithm l of the softmax' sum and the sink's score s it
    leaves the share exp(l) / (exp(l) + exp(s)) of the output.
    """

    def capped(score: Tensor, row: Tensor, head: Tensor, own: Tensor, other: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    flex = _compiled(flex_attention) if query.is_cuda else flex_attention
    settings: dict[str, Any] = {
        "score_mod": capped if softcap is not None else None,
        "block_mask": mask,
        "scale": scaling,
        "enable_gqa": query.shape[1] != key.shape[1],
    }
    if s_aux is None:
        output: Tensor = flex(query, key, value, **settings)
    else:
        output, normaliser = flex(query, key, value, return_lse=True, **settings)
        share = torch.sigmoid(normaliser - s_aux.reshape(1, -1, 1).to(normaliser.dtype))
        output = output * share[..., None].to(output.dtype)
    return output.transpose(1, 2).contiguous()


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function)
