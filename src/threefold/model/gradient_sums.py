"""Gradients summed in floating point, as FSDP2 and DDP sum them: `train.reduce: fast`.

The step calls the model's sums (`FloatSums`, or `exact.sums.ExactSums`) wherever numbers of several micro-batches or
ranks are added, and so does not know which of the two it uses.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from threefold.errors import ConfigError, Problem
from threefold.mesh.mesh import Mesh

_Result = TypeVar("_Result")
# This rank's parts of the gradients, by whether tp splits them, and whether fsdp does.
SplitGradients = Mapping[tuple[bool, bool], list[Tensor]]


class GradientSums(Protocol):
    """How gradients and losses of micro-batches and ranks are added."""

    @property
    def averaged_over(self) -> int:
        """By how many ranks what backward leaves in the gradients is divided."""

    def complete(self, backward: Callable[[], _Result], num_micro_batches: int) -> _Result:
        """Calls `backward`, which goes through a rank's micro-batches, and completes the gradients over dp and cp."""

    def summand(self, loss: Tensor) -> Tensor:
        """A micro-batch's summed loss, detached, in the form in which it is added to the others."""

    def norm(self, gradients: SplitGradients) -> Tensor:
        """The norm of the whole gradient, the same on every rank; not finite if a number on any rank is not."""


class FloatSums:
    """The default: one order of sums for one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def averaged_over(self) -> int:
        """FSDP2 and DDP average over the dp x cp ranks."""
        return self._mesh.size("loss")

    def complete(self, backward: Callable[[], _Result], num_micro_batches: int) -> _Result:
        """Calls `backward`; FSDP2 and DDP complete the gradients in it."""
        return backward()

    def summand(self, loss: Tensor) -> Tensor:
        """The loss as it is."""
        return loss.detach()

    def norm(self, gradients: SplitGradients) -> Tensor:
        """The root of the sum of squares; what tp does not split is the same on its ranks and counts once."""
        device = self._mesh.device
        squares = torch.stack(
            [_square_sum(gradients[over_tp, True], device) for over_tp in (True, False)]
        )
        # Replicas have equal gradients; only ranks that share one copy hold different parts.
        self._mesh.all_reduce("fsdp", squares)
        squares = squares + torch.stack(
            [_square_sum(gradients[over_tp, False], device) for over_tp in (True, False)]
        )
        if self._mesh.group("tp") is None:
            return squares.sum().sqrt()
        # The second is 0, or NaN if `whole` is not finite on one tp rank alone: all must know.
        parts = torch.stack([squares[0], squares[1] - squares[1]])
        self._mesh.all_reduce("tp", parts)
        return (parts.sum() + squares[1]).sqrt()


def _square_sum(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    # One kernel for tensors of one type.
    alike = (
        [each for each in tensors if each.dtype == kind]
        for kind in dict.fromkeys(each.dtype for each in tensors)
    )
    norms = [norm for some in alike for norm in torch._foreach_norm(some, dtype=torch.float32)]
    return torch.stack(norms).square().sum().to(device)


def hook_problems(parameters: Iterable[tuple[str, Any]]) -> Iterator[Problem]:
    """The first parameter with hooks on its gradient, which shards do not call, and copies with parts of it."""
    for name, each in parameters:
        hooks = {*(each._backward_hooks or {}).values()} - {refuse_direct}
        if hooks or each._post_accumulate_grad_hooks:
            yield Problem(
                f"the parameter {name} has hooks on its gradient",
                "none: they would get parts of it on a mesh or in micro-batches, and nothing with shards",
                "optimizer.register_step_pre_hook(hook), where parameter.grad is complete",
            )
            return


def refuse_direct(gradient: Tensor) -> None:
    """ConfigError: a hook on parameters in shards, whose gradients are FSDP2's, which does not call it."""
    raise ConfigError(
        "the loss reads parameters of the model itself, of which each rank holds shards",
        expected="a function of the outputs and the batch: gradients of parameters would not be averaged over ranks",
        fix="return what it reads from the forward of a custom module; or a mesh without dp_shard and cp",
    )
