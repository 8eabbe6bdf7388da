"""Split products overlapped part by part with their communication, in memory shared by the tp ranks' devices.

A part of the model gathers the hidden states at its entry and sums its output at its exit. A device that can read and
write the memory of the others (symmetric memory, over NVLink) multiplies the part of the rows that has arrived while
the next is on its way (asynchronous tensor parallelism, doi:10.1145/3567955.3567959, by torch's `symm_mem`
operations). The sums are those of `layers`, whose parts of rows are added in another order.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from threefold.mesh.mesh import Mesh
from threefold.model.collectives import gather_parts, scatter_sum, start_scattered_sum

_SEQUENCE = 1  # of [batch, sequence, hidden]


def lacking(mesh: Mesh) -> str | None:
    """Why the tp ranks cannot share memory; None if they can."""
    if not mesh.on_cuda:
        return f"a {mesh.device.type} has none"
    own, ranks = mesh.device.index, mesh.tp_size
    devices = range(own - mesh.tp_rank, own - mesh.tp_rank + ranks)
    if devices[0] < 0 or devices[-1] >= torch.cuda.device_count():
        return f"the {ranks} tp ranks do not see one another's devices"
    for other in devices:
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"device {own} has no access to the memory of device {other}"
    return None


def unfit(mesh: Mesh) -> str | None:
    """Why the tp ranks should not send so by default; None: NVLink joins them, and what they compute so is right.

    Every rank calls it. Where it is None, they share memory.
    """
    group = mesh.group("tp")
    assert group is not None
    for look in (lacking, _unlinked, _wrong_entry, _wrong_exit):
        if (
            reason := mesh.decide(
                look.__name__, look(mesh), lambda own: next(filter(None, own), None)
            )
        ) is not None:
            return str(reason)
    return None


def _unlinked(mesh: Mesh) -> str | None:
    """A tp rank's device not connected to this rank's by NVLink, with or without switches; None if there is none."""
    own, cuda = mesh.device.index, torch._C._autograd.DeviceType.CUDA
    try:
        links = torch._C._distributed_c10d._detect_dma_connectivity(cuda, "nvlink").matrix[own]
    except Exception as error:  # of NVIDIA's library, or a torch without this function
        return f"NVLink cannot be looked for: {error}"
    first = own - mesh.tp_rank
    apart = [
        other
        for other in range(first, first + mesh.tp_size)
        if other != own and not links[other]
    ]
    return f"NVLink does not join devices {own} and {apart[0]}" if apart else None


def _wrong_entry(mesh: Mesh) -> str | None:
    """The problem with a product at an entry."""
    group, part, weight = _integers(mesh)

    def compute() -> Tensor:
        share_memory(group)
        return entry_product(part, weight, group)[1]

    return _differs(compute, gather_parts(part, group) @ weight.t())


def _wrong_exit(mesh: Mesh) -> str | None:
    """The problem with a product at an exit."""
    group, part, weight = _integers(mesh)
    whole = gather_parts(part, group)
    right = scatter_sum(whole @ weight.t(), group)
    return _differs(lambda: exit_sum(whole, weight, group), right)


def _integers(mesh: Mesh) -> tuple[dist.ProcessGroup, Tensor, Tensor]:
    """For each rank a part of a row and a weight, whose products and sums are exact in bfloat16, in any order."""
    group = mesh.group("tp")
    draws = torch.Generator().manual_seed(mesh.tp_rank)
    assert group is not None
    numbers = torch.randint(-1, 2, (80, 16), generator=draws).to(mesh.device, torch.bfloat16)
    return group, numbers[None, 16:], numbers[:16]


def _differs(compute: Callable[[], Tensor], right: Tensor) -> str | None:
    try:
        return (
            None
            if torch.equal(compute(), right)
            else "what torch's operations compute there is wrong"
        )
    except Exception as error:
        return f"torch's operations fail there: {error}"


def share_memory(group: dist.ProcessGroup) -> None:
    """Lets a group's ranks find one another's memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 needs it no more
        symmetric_memory.enable_symm_mem_for_group(group.group_name)


def _gathered_product(
    part: Tensor, weight: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The ranks' parts of the sequence in order, and their product with `weight` [in, out]."""
    operation = torch.ops.symm_mem.fused_all_gather_matmul
    whole, (product,) = operation(part, [weight], _SEQUENCE, group.group_name, return_A=True)
    return whole, product


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight in `y = x weight^T`; `gradient` is that of y."""
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class _EntryProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, weight: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        whole, product = _gathered_product(part, weight.t(), group)
        ctx.save_for_backward(whole, weight)
        ctx.group = group
        ctx.set_materialize_grads(False)
        return whole, product

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        whole, weight = ctx.saved_tensors
        of_whole, of_product = gradients
        if of_product is not None:
            through = of_product @ weight
            of_whole = through if of_whole is None else of_whole + through
        if of_whole is None:
            return None, None, None
        finish = start_scattered_sum(of_whole, ctx.group)
        wanted = ctx.needs_input_grad[1] and of_product is not None
        of_weight = _of_weight(of_product, whole) if wanted and of_product is not None else None
        return finish(), of_weight, None


class _ExitSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        operation = torch.ops.symm_mem.fused_matmul_reduce_scatter
        total: Tensor = operation(x, weight.t(), "sum", _SEQUENCE, group.group_name)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        whole, of_x = _gathered_product(gradients[0].contiguous(), weight, ctx.group)
        return of_x, _of_weight(whole, x) if ctx.needs_input_grad[1] else None, None


def entry_product(
    part: Tensor, weight: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """[batch, sequence / tp, in] -> the row [batch, sequence, in], and its product with a weight [out / tp, in]."""
    return _EntryProduct.apply(part, weight, group)  # type: ignore[return-value]


def exit_sum(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, sequence, in / tp] -> this rank's part [batch, sequence / tp, out] of the sum of all ranks' products.

    The weight is [out, in / tp].
    """
    return _ExitSum.apply(x, weight, group)  # type: ignore[return-value]
