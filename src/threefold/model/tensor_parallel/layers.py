"""What a split layer computes on one tp rank, on local tensors.

transformers' styles run every product through DTensor and sum the gradient of a layer's input once for each projection
that reads it. Here a projection is a plain product with the local part of its weight, and projections that read the
same tensor (query, key and value; gate and up) share one sum of its gradient. A layer then costs two all-reduces
forward and two backward (Megatron-LM, arXiv:1909.08053). Parameters stay DTensors, so that everything else knows them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from threefold.model.tensor_parallel.sequence import exchange, exchanges_directly, scatter_sum


class SharedInput:
    """One model's split projections; lets those that read the same tensor share the sum of its gradient."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: tuple[Tensor, Tensor] | None = None

    def take(self, x: Tensor) -> Tensor:
        """`x`, whose gradient will be summed over the group; once for consecutive takers of the same tensor."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._last is None or self._last[0] is not x:
            self._last = (x, _SumGradient.apply(x, self._group))  # type: ignore[assignment]
        assert self._last is not None
        return self._last[1]

    def forget(self) -> None:
        """Lets go of the tensor taken last."""
        self._last = None


def column_forward(module: nn.Linear, shared: SharedInput | None) -> Callable[[Tensor], Tensor]:
    """x [.., in] on every rank -> this rank's part [.., out / tp].

    Args:
        shared: sums the gradient of x; None where x was gathered, which sums it already.
    """

    def forward(x: Tensor) -> Tensor:
        return F.linear(x if shared is None else shared.take(x), local_part(module.weight), local_part(module.bias))

    return forward


def row_forward(module: nn.Linear, shared: SharedInput | None, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """This rank's part [.., in / tp] -> the sum over the ranks [.., out], whole or (without `shared`) its own part."""

    def forward(x: Tensor) -> Tensor:
        y = row_sum(F.linear(x, local_part(module.weight)), shared, group)
        return y if module.bias is None else y + local_part(module.bias)

    return forward


def row_sum(product: Tensor, shared: SharedInput | None, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' products [.., out], whole or (without `shared`) this rank's part of the sequence."""
    if shared is None:
        return scatter_sum(product, group)
    shared.forget()
    return _Sum.apply(product, group)  # type: ignore[return-value]


def vocabulary_forward(
    module: nn.Embedding, group: dist.ProcessGroup, *, start: int, scattered: bool
) -> Callable[[Tensor], Tensor]:
    """Token ids -> embeddings [.., hidden]; each rank looks up the entries it holds, from `start` on.

    Args:
        scattered: give each rank its part of the sequence only.
    """

    def forward(ids: Tensor) -> Tensor:
        weight = local_part(module.weight)
        own = (ids >= start) & (ids < start + weight.shape[0])
        place = torch.where(own, ids - start, 0)
        padding = module.padding_idx - start if module.padding_idx is not None else -1
        padding_idx = padding if 0 <= padding < weight.shape[0] else None
        if weight.shape[0]:
            found = F.embedding(place, weight, padding_idx)
        else:
            found = weight.new_zeros(*ids.shape, weight.shape[1])
        found = torch.where(own[..., None], found, 0.0)
        y: Tensor = scatter_sum(found, group) if scattered else _Sum.apply(found, group)  # type: ignore[assignment]
        return y

    return forward


def local_part(parameter: Any) -> Any:
    """This rank's part of a parameter, or all of a plain one."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the group's tensors, the same bits on every rank; `x` stays as it is.

    Not in place: selective recomputation keeps the product that this is the sum of.
    """
    if not exchanges_directly(x, group):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
    # a + b is b + a: the same bits on both
    return exchange(x.contiguous(), group).add_(x)


class _Sum(torch.autograd.Function):
    """All-reduce forward; the gradient is on every rank already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum_over(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumGradient(torch.autograd.Function):
    """Identity forward; all-reduce of what each rank's columns say of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_over(gradients[0], ctx.group), None
