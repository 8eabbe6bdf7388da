"""One sequence over several ranks: the split, the positions, the masks, and attention across the cp axis.

A batch of rows [batch, sequence] becomes [batch, sequence / cp] on each cp rank: its head chunk and its tail chunk of
2 x cp equal ones, so that causal work is balanced. Everything that depends on where a token stands (positions, masks,
documents) is computed from its true place in the row before the split or from true positions after it. A layer's mask
is the model's own mask function, evaluated at the true positions, so windows and chunks mean what they mean in one
process. Two methods: `gather` brings the keys and values of the whole row to every rank's queries, `ulysses` brings
whole rows of some heads to every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import causal_mask_function, sdpa_mask

from threefold.errors import Problem
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model.context_parallel.attention import attend
from threefold.model.context_parallel.collectives import gather_sequence, heads_to_sequence, sequence_to_heads
from threefold.model.context_parallel.flex import block_mask

_instance_numbers = itertools.count()

# Below it all-to-all costs more than it saves (on a CPU, 2 ranks: 0.80 of one process' speed at 512, 0.92 at 2048).
_ULYSSES_FROM = 2048
# Layers that carry a state along the sequence; none of the two methods keeps it.
_RECURRENT = ("mamba", "rwkv", "linear_attention", "recurrent", "xlstm", "conv", "hybrid")


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


def choose(method: str, config: PretrainedConfig, topology: Topology, *, seq_len: int) -> tuple[str, str]:
    """(`gather` or `ulysses`, why) for what `mesh.cp_method` asks."""
    if method != "auto":
        return method, "as given"
    if not _heads_divide(config, topology):
        return "gather", "the heads of a tp rank do not divide by cp"
    if seq_len < _ULYSSES_FROM:
        return "gather", f"rows shorter than {_ULYSSES_FROM} tokens"
    return "ulysses", f"the heads divide by cp, and rows have {_ULYSSES_FROM} tokens or more"


def problems(method: str, config: PretrainedConfig, topology: Topology) -> list[Problem]:
    """What stands against splitting this architecture's sequences; empty where nothing does."""
    if topology.cp == 1:
        return []
    text = config.get_text_config()
    found = []
    kinds = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    carried = sorted({kind for kind in (config.model_type, *kinds) if any(word in kind for word in _RECURRENT)})
    if carried:
        found.append(
            Problem(
                f"mesh.cp = {topology.cp}, but {config.model_type!r} has recurrent layers ({', '.join(carried)})",
                "attention layers only: a recurrent state runs along the whole sequence",
                "--mesh.cp 1   (use mesh.dp or mesh.tp instead)",
            )
        )
    if method == "ulysses" and not _heads_divide(config, topology):
        found.append(
            Problem(
                f"mesh.cp_method = ulysses, but the heads of a tp rank do not divide by mesh.cp ({topology.cp})",
                "attention heads and key-value heads that are multiples of mesh.tp x mesh.cp",
                "--mesh.cp_method gather   (works for any number of heads)",
            )
        )
    return found


def _heads_divide(config: PretrainedConfig, topology: Topology) -> bool:
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return heads % (topology.tp * topology.cp) == 0 and kv_heads % (topology.tp * topology.cp) == 0


class ContextParallel:
    """The cp axis of one model: splits its batches and computes its attention.

    Registers an attention function and a mask function under a name of its own (`name`) that the model's config is to
    use; several models, each with its own, can live in one process.
    """

    def __init__(self, mesh: Mesh, *, method: str = "gather", kernel: str = "sdpa") -> None:
        """Args:
        method: how cp ranks meet, `gather` or `ulysses`.
        kernel: `sdpa` with masks in memory, or `flex` with masks by blocks (`block_attention`).
        """
        self.size = mesh.size("cp")
        self.rank = mesh.cp_rank
        self.name = f"threefold_{next(_instance_numbers)}"
        self._group = mesh.group("cp")
        self._method = method
        self._kernel = kernel
        # What the mask function needs of the batch in flight; set by `shard`, read while the model builds its masks.
        self._query_positions = torch.empty(0, dtype=torch.long)
        self.key_positions = torch.empty(0, dtype=torch.long)
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
        own = places[self.rank].to(device)
        self.key_positions = torch.cat(places).to(device)
        self._query_positions = self.key_positions if self._method == "ulysses" else own
        self._documents = batch.get("document_ids")
        if self.size == 1:
            return batch
        return {name: rows.index_select(1, own) for name, rows in batch.items()}

    def _mask(
        self, batch_size: int, *, mask_function: Callable[..., Any], device: torch.device | str = "cpu", **kwargs: Any
    ) -> Tensor | BlockMask | None:
        """Boolean mask [batch, 1, queries, sequence] of one kind of layer, at true positions.

        The keys stand in the order in which the ranks deliver them. None where one process needs no mask. Where the
        kernel is `flex`, the mask's blocks instead.
        """
        documents = self._documents
        if self._kernel == "flex":
            if self.size == 1 and documents is None and mask_function is causal_mask_function:
                return None
            return block_mask(
                mask_function,
                queries=self._query_positions,
                keys=self.key_positions,
                documents=documents,
                batch=batch_size,
            )
        if self.size == 1 and documents is None:
            kwargs["attention_mask"] = None  # ones, and looking at them would wait for the device
            # Hidden states may be a part of the sequence here; attention sees all of it.
            kwargs["q_length"] = kwargs["kv_length"] = len(self.key_positions)
            return sdpa_mask(batch_size=batch_size, mask_function=mask_function, device=device, **kwargs)
        queries, keys = self._query_positions, self.key_positions
        rows = torch.arange(batch_size, device=device)[:, None, None, None]
        heads = torch.zeros(1, dtype=torch.long, device=device)[None, :, None, None]
        mask = mask_function(rows, heads, queries[None, None, :, None], keys[None, None, None, :])
        visible = _visible_keys(mask) if self.size > 1 and self._method == "gather" else None
        if documents is not None:
            own = documents.index_select(1, queries)[:, None, :, None]
            mask = mask & (own == documents.index_select(1, keys)[:, None, None, :])
        # Made once for all layers; rides on the mask, so that a layer recomputed in backward finds it again.
        mask.threefold_parts = _parts(mask, visible) if visible is not None else None
        return mask

    def _attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | BlockMask | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of local queries [batch, heads, sequence / cp, head] over the keys of the whole row."""
        if self._group is None:
            return attend(module, query, key, value, attention_mask, **kwargs)
        if attention_mask is None:
            raise RuntimeError(f"{type(module).__name__} was given no mask under context parallelism")
        if self._method == "ulysses":
            return self._by_heads(module, query, key, value, attention_mask, **kwargs)
        key, value = gather_sequence(key, value, self._group)
        parts = getattr(attention_mask, "threefold_parts", None)
        if parts is None:
            return attend(module, query, key, value, attention_mask, **kwargs)
        outputs = []
        for queries, visible, mask in parts:
            keys = key if visible is None else key.index_select(2, visible)
            values = value if visible is None else value.index_select(2, visible)
            outputs.append(attend(module, query[:, :, queries], keys, values, mask, **kwargs)[0])
        # (batch, queries, heads, head)
        return torch.cat(outputs, dim=1), None

    def _by_heads(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | BlockMask,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        assert self._group is not None
        query, key, value = (heads_to_sequence(x, self._group) for x in (query, key, value))
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"].chunk(self.size)[self.rank]
        output, _ = attend(module, query, key, value, mask, **kwargs)
        # (batch, sequence, heads / cp, head) -> (batch, sequence / cp, heads, head)
        return sequence_to_heads(output.transpose(1, 2), self._group).transpose(1, 2).contiguous(), None


def _visible_keys(mask: Tensor) -> list[Tensor | None]:
    """For the head half and the tail half of the queries the keys that any of them sees; None where that is most."""
    found: list[Tensor | None] = []
    for half in mask.chunk(2, dim=2):
        visible = half.any(dim=2).flatten(0, 1).any(dim=0).nonzero()[:, 0]
        found.append(visible if len(visible) < 0.9 * mask.shape[3] else None)
    return found


def _parts(mask: Tensor, visible: list[Tensor | None]) -> list[tuple[slice, Tensor | None, Tensor]]:
    """(queries, their keys or None for all, their mask) of the two halves."""
    half = mask.shape[2] // 2
    parts: list[tuple[slice, Tensor | None, Tensor]] = []
    for queries, keys in zip((slice(0, half), slice(half, 2 * half)), visible, strict=True):
        own = mask[:, :, queries]
        parts.append((queries, keys, own if keys is None else own.index_select(3, keys)))
    return parts
