"""The masks of one batch: which of a rank's queries sees which key, at their true positions in the row.

A layer's mask is the model's own mask function, evaluated at true positions, so windows and chunks mean what they mean
in one process. The keys stand in the order in which the ranks deliver them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers.masking_utils import causal_mask_function, sdpa_mask

from threefold.model.context_parallel.flex import block_mask


@dataclass(frozen=True)
class HalvedMask:
    """A mask [batch, 1, queries, keys] as that of the head half and that of the tail half of the queries.

    Attributes:
        halves: (the keys that any query of the half sees, or None for all; the half's mask over these keys).
    """

    halves: tuple[tuple[Tensor | None, Tensor], ...]


Mask: TypeAlias = Tensor | BlockMask | HalvedMask | None


@dataclass(frozen=True)
class BatchMasks:
    """Makes the masks of one batch.

    Attributes:
        queries, keys: true positions of the queries that this rank computes and of all keys, int64.
        documents: [batch, sequence] number of each token's document by its true position, or None.
        kernel: `sdpa` with masks in memory, or `flex` with masks by blocks.
        alone: this rank holds whole rows.
        halved: head and tail half are computed apart, each over the keys that it sees.
    """

    queries: Tensor
    keys: Tensor
    documents: Tensor | None
    kernel: str
    alone: bool
    halved: bool

    def mask(
        self, batch_size: int, *, mask_function: Callable[..., Any], device: torch.device | str = "cpu", **kwargs: Any
    ) -> Mask:
        """The boolean mask of one kind of layer; None where one process needs none."""
        plain = self.alone and self.documents is None
        if self.kernel == "flex":
            if plain and mask_function is causal_mask_function:
                return None
            return block_mask(
                mask_function, queries=self.queries, keys=self.keys, documents=self.documents, batch=batch_size
            )
        if plain:
            kwargs["attention_mask"] = None  # ones, and looking at them would wait for the device
            # Hidden states may be a part of the sequence here; attention sees all of it.
            kwargs["q_length"] = kwargs["kv_length"] = len(self.keys)
            return sdpa_mask(batch_size=batch_size, mask_function=mask_function, device=device, **kwargs)
        rows = torch.arange(batch_size, device=device)[:, None, None, None]
        heads = torch.zeros(1, dtype=torch.long, device=device)[None, :, None, None]
        mask: Tensor = mask_function(rows, heads, self.queries[None, None, :, None], self.keys[None, None, None, :])
        visible = _visible_keys(mask) if self.halved else None
        if self.documents is not None:
            own = self.documents.index_select(1, self.queries)[:, None, :, None]
            mask = mask & (own == self.documents.index_select(1, self.keys)[:, None, None, :])
        return mask if visible is None else _halved(mask, visible)


def _visible_keys(mask: Tensor) -> list[Tensor | None]:
    """For the head half and the tail half of the queries the keys that any of them sees; None where that is most."""
    found: list[Tensor | None] = []
    for half in mask.chunk(2, dim=2):
        visible = half.any(dim=2).flatten(0, 1).any(dim=0).nonzero()[:, 0]
        found.append(visible if len(visible) < 0.9 * mask.shape[3] else None)
    return found


def _halved(mask: Tensor, visible: list[Tensor | None]) -> HalvedMask:
    halves = mask.chunk(2, dim=2)
    return HalvedMask(
        tuple(
            (keys, half if keys is None else half.index_select(3, keys))
            for keys, half in zip(visible, halves, strict=True)
        )
    )
