"""One sequence over several ranks: the split, the positions, the masks, and attention across the cp axis.

A batch of rows [batch, sequence] becomes [batch, sequence / cp] on each cp rank: its head chunk and its tail chunk of
2 x cp equal ones, so that causal work is balanced. Everything that depends on where a token stands (positions, masks,
documents) is computed from its true place in the row before the split or from true positions after it. Keys and values
are gathered over the axis with autograd; queries stay. A layer's mask is the model's own mask function, evaluated at
the true positions, so windows and chunks mean what they mean in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from threefold.mesh.groups import Mesh
from threefold.model.attention import attend

_instance_numbers = itertools.count()

# torch 2.13 renamed them and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def local_positions(sequence: int, *, cp_size: int, cp_rank: int) -> Tensor:
    """True positions in the row of the tokens that a cp rank holds, in the order in which it holds them.

    Args:
        sequence: length of the whole row, a multiple of 2 x cp_size (of 1 where cp_size is 1).

    Returns:
        int64 [sequence / cp_size]: chunk cp_rank, then chunk 2 x cp_size - 1 - cp_rank.
    """
    if cp_size == 1:
        return torch.arange(sequence)
    chunks = torch.arange(sequence).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


class ContextParallel:
    """The cp axis of one model: splits its batches and computes its attention.

    Registers an attention function and a mask function under a name of its own (`name`) that the model's config is to
    use; several models, each with its own, can live in one process.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.size = mesh.size("cp")
        self.rank = mesh.cp_rank
        self.name = f"threefold_{next(_instance_numbers)}"
        self._group = mesh.group("cp")
        # What the mask function needs of the batch in flight; set by `shard`, read while the model builds its masks.
        self._query_positions = torch.empty(0, dtype=torch.long)
        self._key_positions = torch.empty(0, dtype=torch.long)
        self._documents: Tensor | None = None
        AttentionInterface.register(self.name, self._attention)
        AttentionMaskInterface.register(self.name, self._mask)

    def shard(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a batch, and sets the masks for the forward pass that follows.

        Args:
            batch: `input_ids`, `labels`, `position_ids` and optionally `document_ids`, each [batch, sequence].

        Returns:
            the same keys, each [batch, sequence / cp], in head-tail order.
        """
        sequence = batch["input_ids"].shape[1]
        device = batch["input_ids"].device
        places = [local_positions(sequence, cp_size=self.size, cp_rank=rank) for rank in range(self.size)]
        self._query_positions = places[self.rank].to(device)
        self._key_positions = torch.cat(places).to(device)
        self._documents = batch.get("document_ids")
        if self.size == 1:
            return batch
        return {name: rows.index_select(1, self._query_positions) for name, rows in batch.items()}

    def _mask(
        self, batch_size: int, *, mask_function: Callable[..., Any], device: torch.device | str = "cpu", **kwargs: Any
    ) -> Tensor | None:
        """Boolean mask [batch, 1, sequence / cp, sequence] of one kind of layer, at true positions.

        The keys stand in the order in which the gather delivers them. None where one process needs no mask.
        """
        documents = self._documents
        if self.size == 1 and documents is None:
            kwargs["attention_mask"] = None  # ones, and looking at them would wait for the device
            return sdpa_mask(batch_size=batch_size, mask_function=mask_function, device=device, **kwargs)
        queries = self._query_positions[None, None, :, None]
        keys = self._key_positions[None, None, None, :]
        rows = torch.arange(batch_size, device=device)[:, None, None, None]
        heads = torch.zeros(1, dtype=torch.long, device=device)[None, :, None, None]
        mask = mask_function(rows, heads, queries, keys)
        if documents is not None:
            own = documents.index_select(1, self._query_positions)[:, None, :, None]
            mask = mask & (own == documents.index_select(1, self._key_positions)[:, None, None, :])
        return mask.expand(batch_size, 1, len(self._query_positions), len(self._key_positions))

    def _attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of local queries [batch, heads, sequence / cp, head] over the keys of the whole row."""
        if self._group is not None:
            if attention_mask is None:
                raise RuntimeError(f"{type(module).__name__} was given no mask under context parallelism")
            key, value = _gather_sequence(key, value, self._group)
        return attend(module, query, key, value, attention_mask, **kwargs)


def _gather_sequence(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    # both: (batch, kv heads, sequence / cp, head), which may differ in the last dim
    together = torch.cat([key, value], dim=-1)
    whole: Tensor = _GatherSequence.apply(together, group)  # type: ignore[assignment]
    return whole.split([key.shape[-1], value.shape[-1]], dim=-1)  # type: ignore[return-value]


class _GatherSequence(torch.autograd.Function):
    """All-gather along dim 2; backward sums what every rank's queries say of this rank's keys (reduce-scatter)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.length = local.shape[2]
        parts = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        _all_gather(parts, local.contiguous(), group=group)
        # (cp x batch, heads, sequence / cp, head) -> (batch, heads, sequence, head)
        return parts.view(group.size(), *local.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        batch, heads, _, width = gradient.shape
        # (batch, heads, sequence, head) -> (cp x batch, heads, sequence / cp, head)
        parts = gradient.view(batch, heads, -1, ctx.length, width).permute(2, 0, 1, 3, 4).flatten(0, 1).contiguous()
        own = parts.new_empty((batch, *parts.shape[1:]))
        _reduce_scatter(own, parts, group=ctx.group)
        return own, None
