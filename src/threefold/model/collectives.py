"""Collectives that autograd passes through: what is sent forward, and what its gradient sends back.

Along the sequence, for tp: `gather_parts` and `scatter_sum` (arXiv:2205.05198); for all of a tensor: `sum_over` and
`sum_gradient` (Megatron-LM, arXiv:1909.08053). For the two ways in which cp ranks meet in attention: `gather_sequence`
gives every rank the keys and values of the entire row; `heads_to_sequence` (Ulysses, arXiv:2309.14509) gives it entire
rows of some heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Collective: TypeAlias = Callable[[Tensor, dist.ProcessGroup], Tensor]

# torch 2.13 renamed them and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _differentiable(forward_op: Collective, backward_op: Collective) -> Collective:
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            return forward_op(x, group)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return backward_op(gradients[0], ctx.group), None

    return Differentiable.apply  # type: ignore[return-value]


def _exchanges_directly(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether two ranks on a CPU meet: gloo's collectives take milliseconds at any size, one exchange does not."""
    return group.size() == 2 and not x.is_cuda


def _exchange(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the other of two ranks gives for `mine`, of the same shape."""
    theirs = torch.empty_like(mine)
    peer = 1 - dist.get_rank(group)
    both = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return theirs


def _gathered(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    # (ranks x batch, ..) -> (batch, ..), the ranks' parts in order along `dim`
    parts = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts.chunk(group.size()), dim=dim)


def _scattered(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    parts = torch.cat(x.chunk(group.size(), dim=dim))
    own = parts.new_empty((x.shape[0], *parts.shape[1:]))
    _reduce_scatter(own, parts, group=group)
    return own


def _gathered_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    mine = x.contiguous()
    if not _exchanges_directly(mine, group):
        return _gathered(mine, group, dim=1)
    theirs = _exchange(mine, group)
    return torch.cat([mine, theirs] if dist.get_rank(group) == 0 else [theirs, mine], dim=1)


def _scattered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if not _exchanges_directly(x, group):
        return _scattered(x, group, dim=1)
    parts, rank = [part.contiguous() for part in x.chunk(2, dim=1)], dist.get_rank(group)
    return _exchange(parts[1 - rank], group).add_(parts[rank])


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the group's tensors, the same bits on every rank; `x` stays as it is.

    Not in place: selective recomputation keeps the product that this is the sum of.
    """
    if not _exchanges_directly(x, group):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
    # a + b is b + a: the same bits on both
    return _exchange(x.contiguous(), group).add_(x)


def _all_to_all(x: Tensor, group: dist.ProcessGroup, *, cut: int, join: int) -> Tensor:
    """Cuts along one dim, a part for each rank, and joins the received parts along another, in rank order."""
    parts = torch.stack(x.chunk(group.size(), dim=cut))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), dim=join)


# [batch, sequence / tp, hidden] -> [batch, sequence, hidden]; the gradient is summed and split again.
gather_parts = _differentiable(_gathered_parts, _scattered_sum)
# Each rank's [batch, sequence, hidden] -> its part of their sum, [batch, sequence / tp, hidden].
scatter_sum = _differentiable(_scattered_sum, _gathered_parts)
# The sum of the ranks' tensors; its gradient is on every rank already.
sum_over = _differentiable(_summed, lambda gradient, _: gradient)
# The tensor itself, whose gradient is summed: each rank knows only the part that its own columns contribute.
sum_gradient = _differentiable(lambda x, _: x.view_as(x), _summed)
# Each rank's [.., sequence / cp, head] -> [.., sequence, head]; backward sums what every rank's queries contribute.
_gather_rows = _differentiable(partial(_gathered, dim=2), partial(_scattered, dim=2))
_to_sequence, _to_heads = partial(_all_to_all, cut=1, join=2), partial(_all_to_all, cut=2, join=1)
# [batch, heads, sequence / cp, head] -> [batch, heads / cp, sequence, head], and the inverse.
heads_to_sequence = _differentiable(_to_sequence, _to_heads)
sequence_to_heads = _differentiable(_to_heads, _to_sequence)


def gather_sequence(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, kv heads, sequence / cp, head] -> [batch, kv heads, sequence, head], ranks in order."""
    # One collective for both; they may differ in the last dim.
    gathered = _gather_rows(torch.cat([key, value], dim=-1), group)
    return gathered.split([key.shape[-1], value.shape[-1]], dim=-1)  # type: ignore[return-value]


def local_part(parameter: Any) -> Any:
    """This rank's part of a parameter, or all of a plain one."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
