"""What the sums of a loss of one's own must be, on all ranks, before anything is updated with them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.errors import ConfigError, RunError
from threefold.mesh.mesh import Mesh
from threefold.model.model import Model
from threefold.training.forward import OwnLoss

# Relative: tp ranks have the same outputs bit for bit, and compute the same of them but for the order of sums.
_SAME = 1e-4


def refuse_unequal(totals: Tensor, count: Tensor, mesh: Mesh) -> None:
    """Compares this rank's [sum, count] with those of its tp ranks, and looks at the count of the global batch.

    Raises:
        RunError: tp ranks differ, or the count is not a number, or negative; on every rank.
    """
    if (group := mesh.group("tp")) is not None:
        both = torch.cat([totals, -totals])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        highest, lowest = both[:2], -both[2:]
        apart = ((highest - lowest) > _SAME * highest.abs().maximum(lowest.abs())).any().float()
        dist.all_reduce(apart, dist.ReduceOp.MAX, group=mesh.group("world"))
        if apart.item():
            found = f"{lowest[0].item():.8g} to {highest[0].item():.8g}"
            raise RunError(
                f"tp ranks compute different losses from the same outputs: {found} here",
                expected="a function of the outputs and the batch alone, the same on all tp ranks; nothing was updated",
                fix="draw what the loss draws at random from a torch.Generator with the same seed on every rank",
            )
    number = count.item()
    if not (math.isfinite(number) and number >= 0):
        raise RunError(
            f"the loss has the count {number} over all ranks",
            expected="how many terms its sum has: a number that is not negative; nothing was updated",
            fix="return losses.sum(), losses.numel()",
        )


def check_settings(model: Model, loss: OwnLoss | None, grad_clip: float, micro_batch: int | None) -> None:
    """ConfigError if a step cannot be made of these."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"TrainStep was given a {type(model).__name__}",
            expected="a model on the mesh",
            fix="step = threefold.TrainStep(threefold.load_model(module, mesh=mesh), ...)",
        )
    if model.context is None and loss is None:
        raise ConfigError(
            f"a {type(model.module).__name__} has no loss of ours",
            expected="for a module of one's own, a function of what it returns and the batch",
            fix="threefold.TrainStep(model, loss=lambda outputs, batch: (losses.sum(), losses.numel()))",
        )
    if not (isinstance(grad_clip, int | float) and 0 <= grad_clip < math.inf):
        raise ConfigError(f"grad_clip = {grad_clip!r}", expected="a norm, or 0 for none", fix="grad_clip=1.0")
    if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
        raise ConfigError(f"micro_batch = {micro_batch!r}", expected="rows in one forward", fix="micro_batch=1")


def checked_rate(name: str, value: object) -> float:
    """A rate that is a number from 0 on; ConfigError for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise ConfigError(f"{name} = {value!r}", expected="a number that is not negative", fix=f"{name}=1e-3")
