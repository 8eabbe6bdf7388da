"""The cp axis of one model: its batches are split, and each attention sees the keys of the whole row.

A batch of rows [batch, sequence] becomes [batch, sequence / cp] on each cp rank (`positions.py`). Everything that
depends on the position of a token (positions, masks, documents) is computed from true positions in the row: before the
split, or after it in `BatchMasks`. The method `gather` brings the keys and values of the entire row to every rank's
queries, `ulysses` brings entire rows of some heads to every rank; `model/collectives.py` sends them, and their
gradients back.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from threefold.errors import ConfigError, RunError, ThreefoldError
from threefold.mesh.mesh import Mesh
from threefold.model import noise
from threefold.model.collectives import gather_sequence, heads_to_sequence, sequence_to_heads
from threefold.model.context_parallel import attention_choice, limits
from threefold.model.context_parallel.local_attention import (
    BatchMasks,
    CachedMasks,
    DocumentLengths,
    Mask,
    attend,
)
from threefold.model.context_parallel.positions import (
    follow_lengths,
    local_positions,
    number_tokens,
    text_lengths,
)
from threefold.model.context_parallel.recurrence import DocumentRows, keep_documents_apart

_instance_numbers = itertools.count()


class ContextParallel:
    """The cp axis of one model: splits its batches and computes its attention.

    Registers an attention function and a mask function under a unique name (`name`), which the model's config must
    name; several models, each with its own, can coexist in one process.
    """

    def __init__(
        self, mesh: Mesh, *, method: str = "gather", kernel: str = "sdpa", causal: str = ""
    ) -> None:
        """Args:
        method: how cp ranks meet, `gather` or `ulysses`.
        kernel: `sdpa` with masks in memory, `flex` with masks by blocks (`flex_attention`), or `varlen` with lengths of
            causal documents where rows are whole (`varlen_attn`), and else masks by blocks.
        causal: the kernel of `attention_choice.choose`, tried first where no mask is needed; empty: torch's order.
        """
        self.size = mesh.cp_size
        self._rank = mesh.cp_rank
        self._tp_rank = mesh.tp_rank if mesh.tp_size > 1 else None
        self.name = f"threefold_{next(_instance_numbers)}"
        self._group = mesh.group("cp")
        self._method = method
        self._kernel = kernel
        self._causal = causal
        self._additive = False
        self._carries = False
        self._masks: BatchMasks | CachedMasks | None = None
        self.refused_documents: ThreefoldError | None = None
        self._lengths: Tensor | None = None
        self._documents: DocumentRows | None = None
        self._positions: Tensor | None = None
        AttentionInterface.register(self.name, self._attention)
        AttentionMaskInterface.register(self.name, self._mask)

    def adapt(self, model: PreTrainedModel) -> str | None:
        """Lets a model that was built under this name compute each token as in its own row or document.

        Returns:
            why the model keeps its own attention; None if it takes ours, or has none.
        """
        why = attention_choice.own_attention(model)
        self._additive = why is not None
        follow_lengths(model, lambda: self._lengths)
        number_tokens(model, lambda: self._positions)
        if problems := limits.document_problems(model):
            self.refused_documents = ConfigError.of(problems)
        self._carries = keep_documents_apart(model, lambda: self._documents)
        return None if self._carries and not attention_choice.asks_for_attention(model) else why

    def note_split_heads(self, model: PreTrainedModel, split: Iterable[str]) -> None:
        """Takes the names of the parameters of which tp ranks give parts: their modules have other heads on each.

        Attention that a plan leaves whole, or makes whole behind its projections, is computed by all of them alike,
        with the same noise.
        """
        owners = {
            ".".join(parts[:end])
            for parts in (name.split(".") for name in split)
            for end in range(1, len(parts))
        }
        for name, module in model.named_modules():
            # On the module itself: a compiled layer does not see lookups of it in a set.
            module.has_split_heads = name in owners

    @contextmanager
    def batch(
        self, rows: dict[str, Tensor], documents: Tensor | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """This rank's part of a batch; while it is open, forward and backward have the batch's masks.

        Args:
            rows: `input_ids`, `labels`, `position_ids` and optionally `document_ids`, each [batch, sequence].
            documents: the `document_ids` as they were given. In the device's memory they are kept apart by blocks: to
                count them would wait for it.

        Yields:
            the same keys, each [batch, sequence / cp], in head-tail order.

        Raises:
            ConfigError: `document_ids` for a model that does not keep documents apart (`refused_documents`).
        """
        if self.refused_documents is not None and "document_ids" in rows:
            raise self.refused_documents
        sequence = rows["input_ids"].shape[1]
        device = rows["input_ids"].device
        own = local_positions(sequence, cp_size=self.size, cp_rank=self._rank).to(
            device, non_blocking=True
        )
        # For a loss that calls its own model.
        outer = (self._masks, self._lengths, self._documents, self._positions)
        keys = torch.arange(sequence, device=device)
        by_heads = self._method == "ulysses"
        chunks = (
            None if self.size == 1 or by_heads else (self._rank, 2 * self.size - 1 - self._rank)
        )
        kernel = "sdpa" if self._additive else self._kernel
        counted = kernel == "varlen" and documents is not None and not documents.is_cuda
        self._masks = BatchMasks(
            queries=keys if by_heads else own,
            keys=keys,
            documents=rows.get("document_ids"),
            kernel=kernel,
            alone=self.size == 1,
            chunks=chunks,
            additive=self._additive,
            lengths=DocumentLengths.of(documents, device) if counted else None,
        )
        self._lengths = text_lengths(
            rows["position_ids"], rows.get("document_ids")
        ).index_select(1, own)
        self._documents = (
            DocumentRows.of(rows["document_ids"])
            if self._carries and "document_ids" in rows
            else None
        )
        local = (
            rows
            if self.size == 1
            else {name: values.index_select(1, own) for name, values in rows.items()}
        )
        self._positions = (
            local["position_ids"] if self.size > 1 or "document_ids" in rows else None
        )
        try:
            with attention_choice.first(self._causal):
                yield local
        finally:
            self._masks, self._lengths, self._documents, self._positions = outer

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Inside, each cp rank computes whole rows by itself, with a cache."""
        self._masks = CachedMasks(self._additive)
        try:
            yield
        finally:
            self._masks = None

    def _mask(self, batch_size: int, **kwargs: Any) -> Mask:
        if self._masks is None:
            raise RunError(
                "the model was called outside of a batch",
                expected="the rows that its tokens belong to: they decide which tokens see one another",
                fix="with model.context.batch(rows) as local: model.forward(...), with the backward inside it too",
            )
        return self._masks.mask(batch_size, **kwargs)

    def _attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Mask,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of local queries [batch, heads, sequence / cp, head] over the keys of the whole row."""
        if (
            self._positions is not None
            and getattr(module, "attn_temperature_tuning", False)
            and not module.use_rope
        ):
            query = query * _temperature(module, self._positions)[:, None, :, None].to(
                query.dtype
            )
        if self._group is None or isinstance(self._masks, CachedMasks):
            return self._attend(module, query, key, value, attention_mask, **kwargs)
        if self._method == "gather":
            if attention_mask is None:
                raise RuntimeError(
                    f"{type(module).__name__} was given no mask under context parallelism"
                )
            key, value = gather_sequence(key, value, self._group)
            return self._attend(module, query, key, value, attention_mask, **kwargs)
        if key.shape[1] % self.size:
            raise ConfigError(
                f"mesh.cp_method = ulysses, but a {type(module).__name__} has {key.shape[1]} key-value heads on a rank",
                expected=f"key-value heads that mesh.cp ({self.size}) divides: each cp rank takes some of them",
                fix="--mesh.cp_method gather   (works for any number of heads)",
            )
        query, key, value = (heads_to_sequence(x, self._group) for x in (query, key, value))
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"].chunk(self.size)[self._rank]
        output, _ = self._attend(module, query, key, value, attention_mask, **kwargs)
        # (batch, sequence, heads / cp, head) -> (batch, sequence / cp, heads, head)
        return sequence_to_heads(output.transpose(1, 2), self._group).transpose(
            1, 2
        ).contiguous(), None

    def _attend(
        self, module: torch.nn.Module, query: Tensor, *others: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention of heads that are all here; tp ranks that have others drop other weights of theirs."""
        if self._tp_rank is None or not kwargs.get("dropout") or not module.has_split_heads:
            return attend(module, query, *others, **kwargs)
        with noise.of_heads(self._tp_rank, query.device):
            return attend(module, query, *others, **kwargs)


def _temperature(module: Any, positions: Tensor) -> Tensor:
    """The additional scale of Llama 4's queries, [batch, sequence / cp].

    Its layers without rotary embedding scale a query by its position (arXiv:2501.19399), which they take from its index
    in the tensor: wrong for a part of a row, or for a document behind another one.
    """

    def scale(places: Tensor) -> Tensor:
        return (
            torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale))
            * module.attn_scale
            + 1.0
        )

    return scale(positions) / scale(torch.arange(positions.shape[1], device=positions.device))
