"""The two ways in which cp ranks meet in attention, as differentiable collectives.

Gather: every rank gets the keys and values of the whole row. Exchange (Ulysses, arXiv:2309.14509): every rank gets
whole rows of some heads, and gives its part of the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed them and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def gather_sequence(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, kv heads, sequence / cp, head] -> [batch, kv heads, sequence, head], ranks in order."""
    # One collective for both; they may differ in the last dim.
    together = torch.cat([key, value], dim=-1)
    whole: Tensor = _GatherSequence.apply(together, group)  # type: ignore[assignment]
    return whole.split([key.shape[-1], value.shape[-1]], dim=-1)  # type: ignore[return-value]


def heads_to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, heads, sequence / cp, head] -> [batch, heads / cp, sequence, head]."""
    return _Exchange.apply(x, group, True)  # type: ignore[return-value]


def sequence_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, heads / cp, sequence, head] -> [batch, heads, sequence / cp, head]; the inverse."""
    return _Exchange.apply(x, group, False)  # type: ignore[return-value]


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
        parts = gradient.reshape(batch, heads, -1, ctx.length, width).permute(2, 0, 1, 3, 4).flatten(0, 1).contiguous()
        own = parts.new_empty((batch, *parts.shape[1:]))
        _reduce_scatter(own, parts, group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    """All-to-all between the heads and the sequence; its own inverse the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_sequence: bool) -> Tensor:
        ctx.group = group
        ctx.to_sequence = to_sequence
        return _to_sequence(x, group) if to_sequence else _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back = _to_heads if ctx.to_sequence else _to_sequence
        return back(gradients[0], ctx.group), None, None


def _to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    batch, _, length, width = x.shape
    # (batch, cp x heads / cp, length, head) -> (cp, batch, heads / cp, length, head), the first dim naming the receiver
    parts = x.reshape(batch, group.size(), -1, length, width).transpose(0, 1).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    # the first dim now names the sender, who holds one part of the sequence
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    batch, heads, _, width = x.shape
    # (batch, heads, cp x length, head) -> (cp, batch, heads, length, head)
    parts = x.reshape(batch, heads, group.size(), -1, width).permute(2, 0, 1, 3, 4).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.transpose(0, 1).flatten(1, 2)
