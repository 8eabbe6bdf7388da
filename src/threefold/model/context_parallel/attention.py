"""Attention of local queries over all keys, for every term that a model adds to it.

torch's fused kernel where the model's attention is plain; by blocks where the mask is made of them; a written-out one
where a layer caps its scores (gemma2) or has sinks (gpt_oss), which the fused kernel would leave out without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from threefold.model.context_parallel.flex import attend_blocks
from threefold.model.context_parallel.masks import HalvedMask, Mask


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **kwargs: Any
) -> tuple[Tensor, None]:
    """Output [batch, queries, heads, head] of one attention layer.

    Args:
        query: [batch, heads, queries, head]; key, value: [batch, kv heads, keys, head].
        mask: boolean [batch, 1, queries, keys], true where a query sees a key, its halves or its blocks; None for
            plain causal.
        kwargs: what the model's layer passes: scaling, dropout, softcap, s_aux (sinks), sliding_window (in the mask).
    """
    if isinstance(mask, HalvedMask):
        outputs = []
        for queries, (visible, own) in zip(query.chunk(2, dim=2), mask.halves, strict=True):
            keys = key if visible is None else key.index_select(2, visible)
            values = value if visible is None else value.index_select(2, visible)
            outputs.append(attend(module, queries, keys, values, own, **kwargs)[0])
        # (batch, queries, heads, head)
        return torch.cat(outputs, dim=1), None
    if isinstance(mask, BlockMask):
        return attend_blocks(query, key, value, mask, **kwargs), None
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        kwargs.pop("softcap", None)
        kwargs.pop("s_aux", None)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    dropout = kwargs.pop("dropout", 0.0)
    return _written_out(query, key, value, mask, dropout=dropout if module.training else 0.0, **kwargs), None


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        # A sink takes its share of the softmax and gives nothing.
        sinks = s_aux.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], -1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if s_aux is not None:
        weights = weights[..., :-1]
    weights = torch.dropout(weights, dropout, True)
    return (weights @ value).transpose(1, 2).contiguous()
