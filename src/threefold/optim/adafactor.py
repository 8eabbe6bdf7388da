"""Adafactor over sharded parameters, with the statistics of the whole ones.

The arithmetic is torch.optim.Adafactor's. Rows, columns and norms are sums over parts; all of them are added up in two
collectives a step. Where no parameter is split, torch's own class does the step.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from threefold.checkpoint.state import boxes_held
from threefold.mesh.mesh import Mesh
from threefold.model.collectives import local_part


@dataclass
class _Part:
    """This rank's part of a parameter in a step; `boxes`: (its places in the whole, its places in the part)."""

    parameter: nn.Parameter
    group: dict[str, Any]
    weight: Tensor
    gradient: Tensor
    boxes: list[tuple[tuple[slice, ...], tuple[slice, ...]]]
    copies: int
    norm: float = 0.0

    @property
    def is_factored(self) -> bool:
        return self.gradient.ndim > 1

    def sums(self) -> list[Tensor]:
        """Sums of squares over this part: of the weights, and of the gradient's rows and columns, as of the whole."""
        sums = [self.weight.square().sum().view(1)]
        if self.is_factored:
            rows, columns = (
                self.gradient.new_zeros(shape) for shape in factors(self.parameter.shape)
            )
            for (*before, row, column), inside in self.boxes:
                squares = self.gradient[inside].square()
                rows[*before, row, slice(None)] += squares.sum(-1, keepdim=True)
                columns[*before, slice(None), column] += squares.sum(-2, keepdim=True)
            sums += [rows.flatten(), columns.flatten()]
        return [each / self.copies for each in sums]


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor on any mesh; every rank calls `step`, which uses the gradients up.

    Args:
        mesh: whose ranks all hold these parameters, whole or in part; None: this process alone.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        mesh: Mesh | None = None,
        weight_decay: float = 0.1,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
    ) -> None:
        super().__init__(
            params, lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay
        )
        self._mesh = mesh

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all parameters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if not any(isinstance(parameter, DTensor) for parameter in parameters):
            return super().step(closure)
        parts = [
            self._part(parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not parts:
            return None
        sums = [each.sums() for each in parts]
        totals = self._total([total for own in sums for total in own])
        for part, own in zip(parts, sums, strict=True):
            part.norm = math.sqrt(next(totals).item())
            self._precondition(part, [next(totals) for _ in own[1:]])
        squares = self._total(
            [part.gradient.square().sum().view(1) / part.copies for part in parts]
        )
        for part in parts:
            self._apply(part, math.sqrt(next(squares).item()))
        return None

    def _part(self, parameter: nn.Parameter, group: dict[str, Any]) -> _Part:
        shards = 1
        if isinstance(parameter, DTensor):
            shards = math.prod(
                parameter.device_mesh.size(dim)
                for dim, each in enumerate(parameter.placements)
                if not each.is_replicate()
            )
        world = self._mesh.world_size if self._mesh is not None else 1
        boxes = [(box.slices, inside) for box, inside in boxes_held(parameter)]
        assert parameter.grad is not None
        gradient = local_part(parameter.grad)
        return _Part(parameter, group, local_part(parameter), gradient, boxes, world // shards)

    def _total(self, own: list[Tensor]) -> Any:
        """The sums over all ranks of tensors, one after the other."""
        together = torch.cat(own)
        if self._mesh is not None:
            self._mesh.all_reduce("world", together)
        return iter(together.split([each.numel() for each in own]))

    def _precondition(self, part: _Part, totals: list[Tensor]) -> None:
        """Updates the statistics, and makes of the gradient the update before it is clipped, in place."""
        state, (smallest, _) = self._state(part), part.group["eps"]
        smallest = torch.finfo(part.weight.dtype).eps if smallest is None else smallest
        state["step"] += 1
        moved = state["step"].item() ** part.group["beta2_decay"]
        if not part.is_factored:
            variance = local_part(state["variance"])
            variance.lerp_(part.gradient.square(), moved)
            part.gradient.mul_(variance.clamp(min=smallest**2).rsqrt_())
            return
        rows = local_part(state["row_var"])
        columns = local_part(state["col_var"])
        shape = part.parameter.shape
        rows.lerp_(totals[0].view(rows.shape) / shape[-1], moved)
        columns.lerp_(totals[1].view(columns.shape) / shape[-2], moved)
        scale = rows.mean(dim=-2, keepdim=True).clamp_(min=smallest)
        for (*before, row, column), inside in part.boxes:
            estimate = rows[*before, row, slice(None)] @ columns[*before, slice(None), column]
            estimate.div_(scale[tuple(before)])
            part.gradient[inside].mul_(estimate.clamp_(min=smallest**2).rsqrt_())

    def _state(self, part: _Part) -> dict[str, Any]:
        """The state as torch makes it; rows and columns are whole on every rank."""
        state = self.state[part.parameter]
        parameter = part.parameter
        if not state:
            state["step"] = torch.tensor(0.0)
            if not part.is_factored:
                state["variance"] = torch.zeros_like(
                    parameter, memory_format=torch.preserve_format
                )
            else:
                for name, shape in zip(
                    ("row_var", "col_var"), factors(parameter.shape), strict=True
                ):
                    state[name] = _whole(part.gradient.new_zeros(shape), parameter)
        return state

    def _apply(self, part: _Part, norm: float) -> None:
        group = part.group
        size = math.sqrt(part.parameter.numel())
        step = self.state[part.parameter]["step"].item()
        lr = float(group["lr"])
        rate = max(group["eps"][1], part.norm / size) * min(lr, 1 / math.sqrt(step))
        part.weight.mul_(1 - lr * group["weight_decay"])
        part.weight.add_(part.gradient, alpha=-rate / max(1.0, norm / (size * group["d"])))


def factors(shape: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the statistics of rows and of columns of [.., m, n]: [.., m, 1] and [.., 1, n]."""
    *before, rows, columns = shape
    return (*before, rows, 1), (*before, 1, columns)


def _whole(tensor: Tensor, like: nn.Parameter) -> Tensor:
    if not isinstance(like, DTensor):
        return tensor
    everywhere = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(tensor, like.device_mesh, everywhere, run_check=False)
