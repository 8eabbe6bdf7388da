"""The optimizer step for loops of one's own: a batch in, the global batch's loss and gradient norm out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from threefold.config.schema import OptimizerConfig
from threefold.mesh.mesh import Mesh
from threefold.model.build import ParallelModel
from threefold.training.optimizer import adamw
from threefold.training.step import Batch, TrainStep, mean_loss, micro_batches


class StepNumbers(NamedTuple):
    """Of the global batch, the same on every rank: mean loss of its target tokens, gradient norm before clipping."""

    loss: float
    grad_norm: float


def make_step(
    model: ParallelModel,
    mesh: Mesh,
    *,
    lr: float | Literal["auto"] = "auto",
    weight_decay: float = 0.1,
    grad_clip: float = 1.0,
    micro_batch: int | None = None,
) -> Callable[[Batch], StepNumbers]:
    """A function that does one AdamW step with a batch of this dp rank; every rank of the mesh calls it.

    The batch is a dict of `input_ids` and `labels`, each [rows, sequence] on any device, labels shifted already and
    -100 where nothing is to be predicted; `position_ids` count from 0 in each row unless they are given. The cp and tp
    ranks of one dp rank give the same rows. The loss is the mean over the target tokens of all dp ranks together.

    Args:
        lr: learning rate; assign `step.lr` to follow a schedule. auto: 2e-3 for random weights, 2e-5 for pretrained
            ones.
        micro_batch: rows in one forward; default: all.
    """
    rate = model.automatic_rate if lr == "auto" else lr
    return _Step(model, mesh, OptimizerConfig(lr=rate, weight_decay=weight_decay), grad_clip, micro_batch)


class _Step:
    def __init__(
        self, model: ParallelModel, mesh: Mesh, config: OptimizerConfig, grad_clip: float, micro_batch: int | None
    ) -> None:
        self.lr: float = config.lr  # type: ignore[assignment]
        self._mesh, self._micro_batch = mesh, micro_batch
        self._step = TrainStep(model, adamw(model.module, config), mesh, grad_clip=grad_clip)

    def __call__(self, batch: Batch) -> StepNumbers:
        rows, length = batch["input_ids"].shape
        positions = torch.arange(length).expand(rows, length)
        pieces = micro_batches({"position_ids": positions, **batch}, self._micro_batch or rows)
        result = self._step(pieces, lr=self.lr)
        return StepNumbers(mean_loss(result, self._mesh), result.grad_norm.item())
