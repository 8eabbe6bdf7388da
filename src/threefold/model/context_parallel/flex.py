"""Attention under any mask without a mask in memory: torch's flex_attention, which skips blocks that are all hidden.

For CUDA: its backward has no kernel for a CPU. A mask is a function of the places of a query and a key; here it is the
model's own, at true positions, with the documents of each row. Blocks (128 x 128) that it leaves empty are never
computed, so windows, documents and the causal half cost what they hold. In the others it is computed for each pair, so
it reads one number of a tensor for a query and none for a key: where the query's document starts.
"""

from collections.abc import Callable
from functools import cache
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import PretrainedConfig
from transformers.masking_utils import and_masks, causal_mask_function

from threefold.errors import Problem
from threefold.model.context_parallel.attention_choice import drops_weights
from threefold.model.context_parallel.positions import starts_of_documents
from threefold.plan import choices

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_ALL_HOLD = and_masks(causal_mask_function).__code__


def problems(config: PretrainedConfig, asked: str, *, device: str) -> list[Problem]:
    """Why blocks cannot be used although they were asked for by name (`flex`, `varlen`); empty if they can."""
    possible = choices.attention(
        "auto", choices.Device.here(device), drops_weights=drops_weights(config)
    )
    if possible.value != "sdpa":
        return []
    return [
        Problem(
            f"model.attention = {asked}, but {possible.why}",
            "a CUDA device with triton, and a model without attention dropout",
            "--model.attention auto",
        )
    ]


def block_mask(
    mask_function: MaskFunction,
    *,
    queries: Tensor,
    num_keys: int,
    documents: Tensor | None,
    batch: int,
) -> BlockMask:
    """The mask of one kind of layer.

    Args:
        mask_function: (row, head, query's place, key's place) -> whether the query sees the key.
        queries: true places in the row of the local queries, int64 [queries]; as many as keys: those are whole rows.
        num_keys: of a row; they are in its order.
        documents: [batch, sequence] number of each token's document by its true place, or None.
    """
    starts = starts_of_documents(documents).int() if documents is not None else None
    whole = len(queries) == num_keys
    causal = hides_later_keys(mask_function)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = query if whole else queries[query]
        if starts is None:
            return mask_function(row, head, own, key)
        start = starts[row, own]
        # Keys up to the query are of its document from its start on; for later keys only their own start shows it.
        inside = key >= start if causal else starts[row, key] == start
        return inside & mask_function(row, head, own - start, key - start)

    create = _compiled(create_block_mask) if queries.is_cuda else create_block_mask
    rows = batch if documents is not None else None
    mask: BlockMask = create(sees, rows, None, len(queries), num_keys, device=queries.device)
    return mask


def hides_later_keys(mask_function: MaskFunction) -> bool:
    """Whether a mask function is causal by what it is made of: transformers joins functions that all must hold."""
    if getattr(mask_function, "__code__", None) is _ALL_HOLD:
        return any(
            map(hides_later_keys, getclosurevars(mask_function).nonlocals["mask_functions"])
        )
    return mask_function is causal_mask_function


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

    A sink is an extra key that gives nothing: with the logarithm l of the softmax' sum and the sink's score s it
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
