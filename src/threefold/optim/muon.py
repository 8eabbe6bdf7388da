"""Muon over parameters of any mesh, with AdamW for those that are not hidden matrices.

The arithmetic is torch.optim.Muon's: bit for bit in bfloat16. There, a rounding that another order of sums moves grows
a hundredfold in small singular values, so a run in float32 orthogonalises in float32, and follows one process. It needs
the whole matrix, which all ranks gather; they take turns to orthogonalise one and to send the result to the others. So
the work is divided among all ranks, and all of them have the same bits.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from threefold.checkpoint.state import boxes_held
from threefold.jsonl import Values
from threefold.mesh.mesh import Mesh
from threefold.model.collectives import local_part, whole_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7


def is_hidden_matrix(model: nn.Module) -> dict[str, bool]:
    """For each parameter whether Muon updates it: the matrices between the embeddings and the head.

    A parameter [experts, m, n] holds a matrix for each expert. Kernels of convolutions are none.
    """
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    other = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | _ConvNd) or module is head
        for parameter in module.parameters(recurse=False)
    }
    return {
        name: each.ndim in (2, 3) and id(each) not in other
        for name, each in model.named_parameters()
    }


class Muon(torch.optim.AdamW):
    """Muon for the groups that are `orthogonal`, AdamW for the others.

    Every rank of the mesh calls `step`. A matrix without a gradient counts as one whose gradient is zero,
    unless it is frozen.

    Args:
        mesh: whose ranks all hold these parameters, whole or in part; None: this process alone.
        dtype: of the orthogonalisation.
        momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: as torch.optim.Muon's, but that the rate is
            adjusted to AdamW's unless asked otherwise, so that one rate serves both.
    """

    def __init__(
        self,
        params: Iterable[Values],
        lr: float,
        *,
        mesh: Mesh | None = None,
        dtype: torch.dtype = torch.bfloat16,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = "match_rms_adamw",
    ) -> None:
        self._mesh, self._dtype = mesh, dtype
        self._momentum, self._nesterov, self._adjust = momentum, nesterov, adjust_lr_fn
        # Torch's own class reports their problems, in its constructor or in its step.
        matrix = nn.Parameter(torch.zeros(1, 1))
        matrix.grad = torch.zeros(1, 1)
        torch.optim.Muon(
            [matrix],
            ns_coefficients=tuple(ns_coefficients),
            ns_steps=ns_steps,
            momentum=momentum,
            nesterov=nesterov,
            adjust_lr_fn=adjust_lr_fn,
        ).step()
        a, b, c = ns_coefficients
        self._iteration = (float(a), float(b), float(c)), ns_steps
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
        for group in self.param_groups:
            group.setdefault("orthogonal", True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all parameters; gradients of matrices are used up."""
        matrices = [
            (matrix, group)
            for group in self.param_groups
            if group["orthogonal"]
            for matrix in group["params"]
            if matrix.requires_grad or matrix.grad is not None
        ]
        # Ranks that take turns in the order of the work have about as much each.
        matrices.sort(key=lambda pair: -pair[0].numel() * min(pair[0].shape[-2:]))
        ranks = self._mesh.world_size if self._mesh is not None else 1
        for first in range(0, len(matrices), ranks):
            self._update(matrices[first : first + ranks])
        for matrix, _ in matrices:
            matrix.grad = None
        super().step(closure)

    def _update(self, turn: list[tuple[nn.Parameter, Values]]) -> None:
        """Updates as many matrices as there are ranks, of which each rank orthogonalises one."""
        rank = self._mesh.rank if self._mesh is not None else 0
        own: Tensor | None = None
        for owner, (matrix, _) in enumerate(turn):
            whole = whole_of(self._direction(matrix))
            if owner == rank:
                own = orthogonalised(whole, *self._iteration)
        for owner, (matrix, group) in enumerate(turn):
            if owner == rank:
                assert own is not None
                update = own
            else:
                update = torch.empty(
                    matrix.shape, dtype=self._dtype, device=local_part(matrix).device
                )
            self._broadcast(update, owner)
            self._apply(matrix, update, group)

    def _direction(self, matrix: nn.Parameter) -> Tensor:
        """The momentum of a matrix after this step's gradient, placed as the matrix is."""
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(
                matrix, memory_format=torch.preserve_format
            )
        gradient = matrix.grad if matrix.grad is not None else torch.zeros_like(matrix)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - self._momentum)
        return (gradient.lerp(buffer, self._momentum) if self._nesterov else buffer).to(
            self._dtype
        )

    def _broadcast(self, update: Tensor, owner: int) -> None:
        if self._mesh is None or self._mesh.world_size == 1:
            return
        dist.broadcast(update, src=owner)

    def _apply(self, matrix: nn.Parameter, update: Tensor, group: Values) -> None:
        local, lr = local_part(matrix), float(group["lr"])
        rows, columns = matrix.shape[-2:]
        ratio = 1.0
        if self._adjust in (None, "original"):
            ratio = math.sqrt(max(1, rows / columns))
        elif self._adjust == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        local.mul_(1 - lr * group["weight_decay"])
        for box, inside in boxes_held(matrix):
            local[inside].add_(update[box.slices], alpha=-lr * ratio)


def orthogonalised(
    whole: Tensor, coefficients: tuple[float, float, float], steps: int
) -> Tensor:
    """Each matrix of [.., m, n] with its singular values brought near 1, by torch.optim.Muon's iteration.

    That is X <- aX + (bA + cA^2)X with A = XX^T, of matrices that are not taller than wide and have the norm 1.
    """
    a, b, c = coefficients
    matrices = []
    for matrix in whole.reshape(-1, *whole.shape[-2:]):
        tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.T if tall else matrix
        x = x / x.norm().clamp(min=_SMALLEST_NORM)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        matrices.append(x.T if tall else x)
    return torch.stack(matrices).view(whole.shape)
