"""Gradients after the last backward: completed over tp and copies of the model, one norm over all axes, clipped."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from threefold.model.collectives import is_sharded, local_part
from threefold.model.model import Model

# Gradients that copies of a model average in one collective.
_TOGETHER_BYTES = 64 * 1024**2


class _LocalGradient(NamedTuple):
    """This rank's part of a gradient, where torch looks for a parameter's: it does not clip several meshes at once."""

    grad: Tensor


class Gradients:
    """The gradients of one model; every rank calls these in the same order."""

    def __init__(self, model: Model) -> None:
        self._model, self._mesh = model, model.mesh

    def average(self) -> None:
        """Averages over the dp ranks, each of which holds the whole model; where one has no gradient it counts as 0."""
        if self._mesh.group("dp") is None:
            return
        parameters = [
            parameter
            for parameter in self._model.module.parameters()
            if parameter.requires_grad
        ]
        present = torch.tensor(
            [parameter.grad is not None for parameter in parameters], device=self._mesh.device
        )
        anywhere = present.int()
        self._mesh.all_reduce("dp", anywhere, dist.ReduceOp.MAX)
        pending: list[Tensor] = []
        for parameter, any_rank in zip(parameters, anywhere.tolist(), strict=True):
            if any_rank:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                size = sum(gradient.nbytes for gradient in pending)
                if pending and (
                    pending[0].dtype != parameter.grad.dtype or size > _TOGETHER_BYTES
                ):
                    self._average(pending, "dp")
                    pending = []
                pending.append(parameter.grad)
        if pending:
            self._average(pending, "dp")

    def _average(self, gradients: list[Tensor], axis: str) -> None:
        self._sum(gradients, axis, divisor=self._mesh.size(axis))

    def _sum(self, gradients: list[Tensor], axis: str, *, divisor: int = 1) -> None:
        """Adds up over an axis in one collective, and divides the sums."""
        together = torch.cat([gradient.flatten() for gradient in gradients]).to(
            self._mesh.device
        )
        self._mesh.all_reduce(axis, together)
        parts = together.div_(divisor).split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(
            gradients, [p.view_as(own) for p, own in zip(parts, gradients, strict=True)]
        )

    def complete(
        self, *, scale: Tensor | None = None, observe: Callable[[], None] | None = None
    ) -> Tensor:
        """Completes the gradients over tp; returns their norm (`model/gradient_sums.py`, `model/exact/sums.py`).

        Args:
            scale: of all gradients, before anything else.
            observe: called when they are complete.
        """
        parameters = dict(self._model.module.named_parameters())
        if isinstance(self._model.forward, FSDPModule) and self._mesh.group("loss") is not None:
            # Parameters that ranks hold whole beside their shards (`model.precision`).
            kept = [
                each.grad
                for each in parameters.values()
                if each.grad is not None and not is_sharded(each)
            ]
            if kept:
                self._average([local_part(gradient) for gradient in kept], "loss")
        if scale is not None:
            self._widen()
            every = [
                local_part(parameter.grad)
                for parameter in parameters.values()
                if parameter.grad is not None
            ]
            _multiply(every, scale.float())
        self._sum_partial(
            [parameters[name].grad for name in self._model.tensor.partial_gradients]
        )
        split = self._model.tensor.placements
        # By whether tp splits them, and whether fsdp does.
        gradients: dict[tuple[bool, bool], list[Tensor]] = collections.defaultdict(list)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                _place_as_parameter(parameter)
                over_tp = name in split and not split[name].is_replicate()
                gradients[over_tp, is_sharded(parameter)].append(local_part(parameter.grad))
        norm = self._model.sums.norm(gradients)
        if observe is not None:
            observe()
        return norm

    def clip(self, norm: Tensor, limit: float) -> None:
        """Scales the complete gradients, in float32, from their norm down to `limit`; 0: leaves them as they are."""
        self._widen()
        if limit:
            every = (parameter.grad for parameter in self._model.module.parameters())
            held: Any = [
                _LocalGradient(local_part(gradient))
                for gradient in every
                if gradient is not None
            ]
            torch.nn.utils.clip_grads_with_norm_(held, limit, norm)

    def _widen(self) -> None:
        """Gives the gradients of a working copy the type of their weights, in which they are not rounded."""
        for parameter in (
            self._model.module.parameters() if self._model.working is not None else ()
        ):
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)

    def _sum_partial(self, gradients: Sequence[Tensor | None]) -> None:
        """Sums over tp the gradients that each rank knows only in part; once a step, in one collective."""
        own = [local_part(gradient) for gradient in gradients if gradient is not None]
        if self._mesh.group("tp") is None or not own:
            return
        # With exact sums: two ranks add the same numbers in either order (`mesh.exact_limits`).
        self._sum(own, "tp")


def clip_factor(norm: Tensor, limit: float) -> Tensor | None:
    """The factor that scales gradients with a norm above `limit` down to it; None with a limit of 0: no scaling."""
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit else None


def _multiply(tensors: list[Tensor], factor: Tensor) -> None:
    # Shards may be in the host's memory.
    for device in dict.fromkeys(each.device for each in tensors):
        torch._foreach_mul_(
            [each for each in tensors if each.device == device], factor.to(device)
        )


def _place_as_parameter(parameter: nn.Parameter) -> None:
    """Gives a gradient its parameter's placement; autograd may leave it as a pending sum (for embeddings it does)."""
    gradient = parameter.grad
    both_split = isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
    if both_split and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)
