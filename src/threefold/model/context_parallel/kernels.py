"""Which of torch's fused kernels computes attention that needs no mask in memory, by device, type and size.

`scaled_dot_product_attention` tries its kernels in a fixed order, flash first. Here the order is a reasoned choice; a
kernel that cannot serve a call is skipped, so the choice affects time and never the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import PretrainedConfig

from threefold.model.layer_kinds import common_number
from threefold.plan.families import FAMILIES

# The head sizes that flash and cuDNN have, the latter's backward included.
_FLASH_HEAD, _CUDNN_HEAD = 256, 128
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Before torch 2.12 varlen_attn has no argument for it, and takes fewer heads of keys as they are.
_GROUPED = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def head_size(config: PretrainedConfig) -> int | None:
    """The size of a query and of a key of one head; None if the config does not say."""
    text = config.get_text_config()
    names = (
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "head_dim",
        "hidden_size",
        "num_attention_heads",
    )
    nope, rope, own, hidden, heads = (common_number(text, name) for name in names)
    if nope is not None and rope is not None:
        return nope + rope
    return hidden // heads if own is None and hidden and heads else own


def choose(
    capability: tuple[int, int],
    *,
    dtype: str,
    head_dim: int,
    halved: bool,
    deterministic: bool = False,
) -> tuple[str, str]:
    """(`cudnn`, `flash` or `efficient`, why) for causal attention on a CUDA device.

    Args:
        capability: of the device, as torch gives it.
        dtype: that attention computes in, `bfloat16` or `float32`.
        head_dim: of a query and a key.
        halved: queries are two chunks of a row, each over the keys up to its end (cp ranks that gather keys).
        deterministic: every call must give the same bits.
    """
    if dtype == "float32":
        return "efficient", "flash and cuDNN have no float32"
    if head_dim > _FLASH_HEAD or capability < (8, 0):
        limit = (
            f"heads of {head_dim}"
            if head_dim > _FLASH_HEAD
            else f"capability {capability[0]}.{capability[1]}"
        )
        return "efficient", f"flash and cuDNN do not serve {limit}"
    if halved:
        return (
            "flash",
            "its causal order ends at the last key, as that of a chunk of a row does",
        )
    if deterministic:
        return (
            "flash",
            "its backward can give the same bits every time, which cuDNN's cannot (pytorch#182551)",
        )
    if capability[0] != 9:
        return (
            "flash",
            f"cuDNN is faster on capability 9 only; this is {capability[0]}.{capability[1]}",
        )
    if head_dim > _CUDNN_HEAD or head_dim % 8:
        return "flash", f"cuDNN's backward does not serve heads of {head_dim}"
    return (
        "cudnn",
        "1.7 to 2.3 times as fast as flash on capability 9, by transformers' measurements (#48163)",
    )


@contextmanager
def first(kernel: str) -> Iterator[None]:
    """Inside, in forward and in backward, `cudnn` is tried first; the others keep torch's order."""
    if kernel != "cudnn":
        yield
        return
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        yield


class DocumentLengths(NamedTuple):
    """The mask of whole rows, one behind another, whose documents are causal and apart.

    Attributes:
        begins: int32 [documents + 1], the place of each one's first token among those of all rows; last, their number.
        beyond: more tokens than any document has, at least 2.
    """

    begins: Tensor
    beyond: int

    @classmethod
    def of(cls, documents: Tensor, device: torch.device) -> DocumentLengths:
        """On a device, from the number of each token's document [rows, sequence] in the host's memory."""
        first = documents.diff(prepend=documents[:, :1] - 1).flatten().nonzero()[:, 0]
        begins = F.pad(first, (0, 1), value=documents.numel()).int()
        return cls(begins.to(device, non_blocking=True), int(begins.diff().max()) + 1)


def unserved(config: PretrainedConfig) -> str:
    """Parts of a model that attention by lengths does not compute, or may not; empty if it computes all."""
    family = FAMILIES.get(config.get_text_config().model_type)
    head_dim = head_size(config)
    if not family or family.written_out:
        return "its layers ask for more than plain attention, or are not known by name"
    return (
        ""
        if head_dim in range(8, _FLASH_HEAD + 1, 8)
        else f"flash does not serve heads of {head_dim}"
    )


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
