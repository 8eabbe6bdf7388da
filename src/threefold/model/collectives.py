"""Differentiable collectives: the communication of a forward, and that of its gradient.

Along the sequence, for tp: `gather_parts` and `scatter_sum` (arXiv:2205.05198); for whole tensors: `sum_over` and
`sum_gradient` (Megatron-LM, arXiv:1909.08053). For the two cp methods of attention: `gather_sequence`
gives every rank the keys and values of the entire row; `heads_to_sequence` (Ulysses, arXiv:2309.14509) gives it entire
rows of some heads.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

Collective: TypeAlias = Callable[[Tensor, dist.ProcessGroup], Tensor]

# torch 2.13 renamed them and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _differentiable(
    forward_op: Collective, backward_op: Collective, *, in_place: bool = False
) -> Collective:
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
            ctx.group = group
            if in_place:
                ctx.mark_dirty(x)
            return forward_op(x, group)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            return backward_op(gradients[0], ctx.group), None

    return Differentiable.apply  # type: ignore[return-value]


# From this many bytes per row on, a collective per row costs less than copies around one collective for all.
_ROW_BYTES = 1024**2


def _row_by_row(part: Tensor) -> bool:
    """Whether a [batch, sequence / ranks, ..] is sent row by row, straight from and into the final layout."""
    large = part.shape[0] == 1 or part[0].nbytes >= _ROW_BYTES
    return large and not torch.compiler.is_compiling()  # which does not know these collectives


def _gathered(x: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    # (ranks x batch, ..) -> (batch, ..), the ranks' parts in order along `dim`
    parts = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts.chunk(group.size()), dim=dim)


def _gathered_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = x.contiguous()
    if not _row_by_row(own):
        return _gathered(own, group, dim=1)
    whole = own.new_empty((own.shape[0], own.shape[1] * group.size(), *own.shape[2:]))
    group.allgather_into_tensor_coalesced(list(whole.unbind()), list(own.unbind())).wait()
    return whole


def _scattered_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return start_scattered_sum(x, group)()


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the group's tensors, the same bits on every rank; `x` stays as it is."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def start_sum(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begins to sum the group's tensors, in `x` if that is contiguous; what it returns waits for the sum."""
    total = x.contiguous()
    return _finished(dist.all_reduce(total, group=group, async_op=True), total)


def _finished(work: Any, result: Tensor) -> Callable[[], Tensor]:
    """Waits for a collective, and returns what it has computed."""

    def finish() -> Tensor:
        work.wait()
        return result

    return finish


def start_scattered_sum(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begins to sum the group's [batch, sequence, ..]; what it returns waits for this rank's part of the sequence."""
    rows = x.contiguous()
    own = x.new_empty((x.shape[0], x.shape[1] // group.size(), *x.shape[2:]))
    if _row_by_row(own):
        work = group.reduce_scatter_tensor_coalesced(list(own.unbind()), list(rows.unbind()))
    else:
        parts = torch.cat(rows.chunk(group.size(), dim=1))
        if torch.compiler.is_compiling():  # which orders work and waits by itself
            reduce_scatter(own, parts, group=group)
            return lambda: own
        work = reduce_scatter(own, parts, group=group, async_op=True)
    return _finished(work, own)


# cp ranks hold a head and a tail chunk of each row: of 2 x ranks chunks, rank r has number r and number r from behind.


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    """The [batch, heads, sequence, ..] that ranks hold in parts, its tokens in their order."""
    heads, tails = zip(*(part.chunk(2, dim=2) for part in parts), strict=True)
    return torch.cat([*heads, *reversed(tails)], dim=2)


def _chunks_of_ranks(row: Tensor, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """The head and the tail chunk of a row that each rank holds; the inverse."""
    chunks = row.chunk(2 * ranks, dim=2)
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(ranks)]


class _GatheredRows(torch.autograd.Function):
    """Keys and values of whole rows, by one collective each way; they may differ in the last dim.

    Backward sums what every rank's queries contribute.
    """

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.shapes = group, (key.shape, value.shape)
        sent = key.new_empty(key.numel() + value.numel())
        for place, own in zip(_side_by_side(sent, *ctx.shapes), (key, value), strict=True):
            place.copy_(own)
        received = sent.new_empty(group.size(), len(sent))
        _all_gather(received.view(-1), sent, group=group)
        keys, values = zip(
            *(_side_by_side(part, *ctx.shapes) for part in received.unbind()), strict=True
        )
        return _in_order(keys), _in_order(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ranks = ctx.group.size()
        sent = gradients[0].new_empty(ranks, sum(shape.numel() for shape in ctx.shapes))
        for part, *own in zip(
            sent.unbind(),
            *(_chunks_of_ranks(each, ranks) for each in gradients),
            strict=True,
        ):
            for place, (head, tail) in zip(_side_by_side(part, *ctx.shapes), own, strict=True):
                first, last = place.chunk(2, dim=2)
                first.copy_(head)
                last.copy_(tail)
        own_sum = torch.empty_like(sent[0])
        reduce_scatter(own_sum, sent.view(-1), group=ctx.group)
        of_key, of_value = _side_by_side(own_sum, *ctx.shapes)
        return of_key, of_value, None


def _side_by_side(flat: Tensor, key: torch.Size, value: torch.Size) -> tuple[Tensor, Tensor]:
    """Views of a flat tensor, one in the shape of a key and one in that of a value."""
    return flat[: key.numel()].view(key), flat[key.numel() :].view(value)


def _sent_to_each(parts: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """The parts received from each rank, if this one sends a part to each."""
    sent = torch.stack(list(parts))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.unbind()


def _to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _in_order(_sent_to_each(x.chunk(group.size(), dim=1), group))


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.cat(pair, dim=2) for pair in _chunks_of_ranks(x, group.size())]
    return torch.cat(_sent_to_each(parts, group), dim=1)


# [batch, sequence / tp, hidden] -> [batch, sequence, hidden]; the gradient is summed and split again.
gather_parts = _differentiable(_gathered_parts, _scattered_sum)
# Each rank's [batch, sequence, hidden] -> its part of their sum, [batch, sequence / tp, hidden].
scatter_sum = _differentiable(_scattered_sum, _gathered_parts)
# The sum of the ranks' tensors; its gradient is on every rank already.
sum_over = _differentiable(_summed, lambda gradient, _: gradient)
# The same in place, for a tensor that is not used elsewhere.
sum_into = _differentiable(
    lambda x, group: start_sum(x, group)(), lambda gradient, _: gradient, in_place=True
)
# The tensor itself, whose gradient is summed: each rank knows only the part that its own columns contribute.
sum_gradient = _differentiable(lambda x, _: x.view_as(x), _summed)
# The sum of the ranks' tensors, each of which has a part in every rank's loss: their gradients are summed too.
sum_over_all = _differentiable(_summed, _summed)
# [batch, heads, sequence / cp, head] -> [batch, heads / cp, sequence, head], and the inverse.
heads_to_sequence = _differentiable(_to_sequence, _to_heads)
sequence_to_heads = _differentiable(_to_heads, _to_sequence)


def gather_sequence(
    key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, kv heads, sequence / cp, head] -> [batch, kv heads, sequence, head], as in the row."""
    return _GatheredRows.apply(key, value, group)  # type: ignore[return-value]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, width: int, scale: float
    ) -> Tensor:
        ctx.place = dim, dist.get_rank(group) * width, x.shape[dim]
        ctx.scale = scale
        missing = list(x.shape)
        missing[dim] = width - x.shape[dim]
        whole = torch.cat([x, x.new_zeros(missing)], dim=dim) if missing[dim] else x
        return _gathered(whole, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        dim, start, size = ctx.place
        start = min(start, gradients[0].shape[dim])
        return gradients[0].narrow(dim, start, size) * ctx.scale, None, None, None, None


def join(
    x: Tensor,
    group: dist.ProcessGroup,
    *,
    dim: int,
    total: int | None = None,
    scale: float = 1.0,
) -> Tensor:
    """The ranks' parts in order along `dim`, on every rank; its gradient is the same on each, which takes its own part.

    Args:
        total: size of the whole, cut as torch's `chunk` cuts it; None: the parts are equally large.
        scale: of the gradient.
    """
    width = x.shape[dim] if total is None else -(-total // group.size())
    joined: Tensor = _Join.apply(x, group, dim, width, scale)  # type: ignore[assignment]
    return joined if total is None else joined.narrow(dim, 0, total)


def whole_of(tensor: Any) -> Any:
    """All of a tensor, of which a rank may hold a part; every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether FSDP2 has a tensor, of which ranks hold parts, or one rank all of it."""
    return isinstance(tensor, DTensor) and "fsdp" in (tensor.device_mesh.mesh_dim_names or ())


def local_part(parameter: Any) -> Any:
    """This rank's part of a parameter, or all of a plain one."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.compiler.is_compiling() or not (
        torch.is_grad_enabled() and parameter.requires_grad
    ):
        return parameter.to_local()
    return _LocalPart.apply(parameter)


class _LocalPart(torch.autograd.Function):
    """Like `to_local`, but its backward need not work out the layout: for 30 parameters, 6 % of a step of 130 ms."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        local = parameter._local_tensor
        ctx.spec, ctx.strides = parameter._spec, local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> DTensor:
        own = gradients[0]
        if own.stride() != ctx.strides:
            own = torch.empty_strided(
                own.shape, ctx.strides, dtype=own.dtype, device=own.device
            ).copy_(own)
        return DTensor(own, copy.copy(ctx.spec), requires_grad=False)  # type: ignore[call-arg]
