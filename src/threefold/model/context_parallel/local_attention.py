"""Attention of local queries over all keys, with every term that a model adds to it, and its masks.

A layer's mask is the model's own mask function, evaluated at true positions in the row, so windows and chunks mean what
they mean in one process. Plain causal attention has no mask in memory: keys are in the order of the row, so that each
half of a rank's queries sees the keys from the first to its own last. The kernel is torch's fused one if the model's
attention is plain; flex_attention if the mask is made of blocks; varlen_attn if it is causal in the documents of whole
rows; one written out here if a layer caps its scores (gemma2) or has sinks (gpt_oss), which the fused kernel would
silently leave out.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from threefold.errors import ConfigError
from threefold.model.context_parallel.flex import attend_blocks, block_mask
from threefold.model.context_parallel.positions import starts_of_documents

# Before torch 2.12 varlen_attn has no argument for it, and takes fewer heads of keys as they are.
_GROUPED = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class DocumentLengths(NamedTuple):
    """The mask of whole rows, one behind another, whose documents are causal and apart.

    Attributes:
        begins: int32 [documents + 1], the place of each one's first token among those of all rows; last, their number.
        beyond: more tokens than any document has, at least 2.
    """

    begins: Tensor
    beyond: int

    @classmethod
    def of(cls, documents: Tensor, device: torch.device) -> "DocumentLengths":
        """On a device, from the number of each token's document [rows, sequence] in the host's memory."""
        first = documents.diff(prepend=documents[:, :1] - 1).flatten().nonzero()[:, 0]
        begins = F.pad(first, (0, 1), value=documents.numel()).int()
        return cls(begins.to(device, non_blocking=True), int(begins.diff().max()) + 1)


# For the head half and the tail half of the queries: (the range of the keys that they see; their mask, None if causal).
HalvedMask: TypeAlias = tuple[tuple[slice, Tensor | None], ...]
Mask: TypeAlias = Tensor | BlockMask | DocumentLengths | HalvedMask | None


@dataclass(frozen=True)
class BatchMasks:
    """Makes the masks of one batch.

    Attributes:
        queries: true positions of the queries that this rank computes, int64.
        keys: those of all keys, int64: 0, 1, ..
        documents: [batch, sequence] number of each token's document by its true position, or None.
        kernel: `sdpa` with masks in memory, or another with masks by blocks.
        alone: no other rank holds tokens of these rows.
        chunks: the numbers of the head and of the tail chunk of the row that are computed here, apart, each over the
            keys that it sees; None for whole rows.
        additive: the model keeps its own attention, which adds a mask to the scores (0, or the lowest number).
        lengths: of the documents, in place of a causal mask.
    """

    queries: Tensor
    keys: Tensor
    documents: Tensor | None
    kernel: str
    alone: bool
    chunks: tuple[int, int] | None
    additive: bool = False
    lengths: DocumentLengths | None = None

    def mask(
        self,
        batch_size: int,
        *,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> Mask:
        """The mask of one kind of layer, boolean unless `additive`; None if one process needs none."""
        if not self.additive:
            return self._boolean(batch_size, device=device, **kwargs)
        skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
        kwargs |= dict.fromkeys(skips, False)
        shown = self._boolean(batch_size, device=device, **kwargs)
        assert isinstance(shown, Tensor)
        dtype = kwargs.get("dtype", torch.float32)
        return torch.zeros(shown.shape, dtype=dtype, device=device).masked_fill_(
            ~shown, torch.finfo(dtype).min
        )

    def _boolean(
        self,
        batch_size: int,
        *,
        mask_function: Callable[..., Any],
        device: torch.device | str,
        **kwargs: Any,
    ) -> Mask:
        plain = self.alone and self.documents is None
        if (
            self.documents is None
            and mask_function is causal_mask_function
            and not self.additive
        ):
            if self.chunks is not None:
                size = len(self.queries) // 2
                return tuple((slice(0, (number + 1) * size), None) for number in self.chunks)
            if self.kernel != "sdpa" or not self.alone:
                return None
        if self.lengths and mask_function is causal_mask_function:
            return self.lengths
        if self.kernel != "sdpa":
            return block_mask(
                mask_function,
                queries=self.queries,
                num_keys=len(self.keys),
                documents=self.documents,
                batch=batch_size,
            )
        if plain:
            # Ones, and looking at them would wait for the device.
            kwargs["attention_mask"] = None
            kwargs["allow_is_bidirectional_skip"] = False  # no mask at all means causal
            # Hidden states may be a part of the sequence here; attention sees all of it.
            kwargs["q_length"] = kwargs["kv_length"] = len(self.keys)
            return sdpa_mask(
                batch_size=batch_size, mask_function=mask_function, device=device, **kwargs
            )
        if len(self.queries) % kwargs["q_length"]:  # tp ranks may share the sequence
            raise ConfigError(
                f"the model asks for a mask of {kwargs['q_length']} places; its rows have {len(self.keys)} tokens",
                expected="attention over the tokens of a row, if rows hold documents or are split",
                fix="--data.document_mask false --mesh.cp 1",
            )
        rows = torch.arange(batch_size, device=device)[:, None, None, None]
        heads = torch.zeros(1, dtype=torch.long, device=device)[None, :, None, None]
        try:
            in_row: Tensor = mask_function(
                rows, heads, self.queries[None, None, :, None], self.keys[None, None, None]
            )
        except IndexError as error:
            raise ConfigError(
                f"a mask of this model is made of the {kwargs['q_length']} tokens that a rank holds (mesh.cp > 1)",
                expected="masks that are functions of a token's place in its row",
                fix="--mesh.cp 1   (use mesh.dp or mesh.dp_shard instead)",
            ) from error
        if self.documents is None:
            return _halved(in_row, in_row) if self.chunks is not None else in_row
        starts = starts_of_documents(self.documents)
        own, other = self._of_both(starts)
        # Chunks are counted from the beginning of a document.
        mask = mask_function(rows, heads, *self._of_both(self.keys - starts)) & (own == other)
        return _halved(mask, mask | in_row) if self.chunks is not None else mask

    def _of_both(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values of each token [batch, sequence], for the queries [batch, 1, queries, 1] and the keys."""
        return values.index_select(1, self.queries)[:, None, :, None], values.index_select(
            1, self.keys
        )[:, None, None]


@dataclass(frozen=True)
class CachedMasks:
    """The masks of whole rows behind a cache of their keys and values, which transformers counts from its length.

    Attributes:
        additive: as of `BatchMasks`.
    """

    additive: bool

    def mask(self, batch_size: int, **kwargs: Any) -> Mask:
        """The mask [batch, 1, queries, keys] of one kind of layer, boolean unless `additive`."""
        kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
        return (eager_mask if self.additive else sdpa_mask)(batch_size=batch_size, **kwargs)


def _halved(mask: Tensor, in_row: Tensor) -> HalvedMask:
    """The mask [.., queries, keys] in two halves, each over the keys from the first to the last that `in_row` sees.

    That is the mask without documents: a row's bits must not depend on the documents of the rows beside it.
    """
    halves: list[tuple[slice, Tensor | None]] = []
    for own, wide in zip(mask.chunk(2, dim=2), in_row.chunk(2, dim=2), strict=True):
        span = slice(None)
        if not own.is_cuda:  # there the host would have to wait
            keys = wide.any(dim=2).flatten(0, 1).any(dim=0).nonzero()
            # A mask may be made for no layer (a window of 0), and show nothing.
            span = slice(int(keys[0]), int(keys[-1]) + 1) if len(keys) else slice(None)
        halves.append((span, own[..., span]))
    return tuple(halves)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **kwargs: Any
) -> tuple[Tensor, None]:
    """Output [batch, queries, heads, head] of one attention layer.

    Args:
        query: [batch, heads, queries, head]; key, value: [batch, kv heads, keys, head].
        mask: boolean [batch, 1, queries, keys], true if a query sees a key, its halves or its blocks; None for
            plain causal, the last query at the last key; the lengths of causal documents.
        kwargs: what the model's layer passes: scaling, dropout, softcap, s_aux (sinks), sliding_window (in the mask).
    """
    if isinstance(mask, BlockMask):  # which is a tuple itself
        return attend_blocks(query, key, value, mask, **kwargs), None
    if isinstance(mask, DocumentLengths):
        # Not for any family that `attention_choice.unserved` accepts.
        assert not {"softcap", "s_aux"} & kwargs.keys()
        return attend_lengths((query, key, value), mask, scaling=kwargs.get("scaling")), None
    if isinstance(mask, tuple):
        outputs = []
        for queries, (span, own) in zip(query.chunk(2, dim=2), mask, strict=True):
            outputs.append(
                attend(module, queries, key[:, :, span], value[:, :, span], own, **kwargs)[0]
            )
        return torch.cat(outputs, dim=1), None  # (batch, queries, heads, head)
    if (
        mask is None
        and query.shape[2] != key.shape[2]
        and kwargs.get("position_bias") is not None
    ):
        mask = _causal(query.shape[2], key.shape[2], query.device)
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        kwargs = {
            name: value for name, value in kwargs.items() if name not in ("softcap", "s_aux")
        }
        if mask is None and query.shape[2] == key.shape[2]:
            # Not the layer's own attribute: bigbird_pegasus' is wrong.
            kwargs.setdefault("is_causal", True)
        elif (mask is None or not query.is_cuda) and kwargs.get("position_bias") is None:
            return _fused(module, query, key, value, mask, **kwargs), None
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    dropout = kwargs.pop("dropout", 0.0)
    return _written_out(
        query, key, value, mask, dropout=dropout if module.training else 0.0, **kwargs
    ), None


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> Tensor:
    """torch's kernel, where transformers' call would repeat keys and values, or take the queries for the first ones."""
    if mask is None:
        places = query.shape[2], key.shape[2]
        mask = lower_right(*places) if query.is_cuda else _causal(*places, query.device)
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and not (
        query.dtype != torch.float32 and key.shape[-1] == value.shape[-1] <= 256
    ):
        # Its kernel does not support grouped heads.
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
        groups = 1
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=groups > 1,
    )
    return output.transpose(1, 2).contiguous()


def lower_right(queries: int, keys: int) -> Tensor:
    """A bias with which torch's CUDA kernels align the last query to the last key, with no mask in memory."""
    # The constructor allocates a tensor of its sizes that no kernel reads.
    bias = causal_lower_right(1, 1)
    bias.seq_len_q, bias.seq_len_kv = queries, keys
    return bias


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


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
        mask = _causal(query.shape[2], key.shape[2], query.device)
    groups = query.shape[1] // key.shape[1]
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    scores = (
        query
        @ key.transpose(2, 3)
        * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    )
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


def attend_lengths(
    whole: tuple[Tensor, ...], mask: DocumentLengths, *, scaling: float | None
) -> Tensor:
    """Output [rows, sequence, heads, head] of queries, keys and values [rows, heads, sequence, head] of whole rows."""
    # (rows, heads, sequence, head) -> (rows x sequence, heads, head)
    flat = (each.transpose(1, 2).flatten(0, 1) for each in whole)
    places = mask.begins, mask.begins, mask.beyond, mask.beyond
    # The window: all keys before the query, none behind it.
    output = varlen_attn(*flat, *places, scale=scaling, window_size=(-1, 0), **_GROUPED)
    return output.unflatten(0, (len(whole[0]), -1)).contiguous()
