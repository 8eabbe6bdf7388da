"""The results of a step: on the device, and as numbers of the global batch."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from threefold.errors import DataError
from threefold.mesh.mesh import Mesh


class StepNumbers(NamedTuple):
    """Of the global batch, the same on every rank: mean loss over its count, gradient norm before clipping."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class StepResult:
    """The results of one step, still on the device.

    Attributes:
        loss_sum: cross entropy (or a custom loss) of this rank; sum it over the `loss` group for the step's own.
        target_tokens: number of target tokens (or the count of a custom loss) of the global batch.
        grad_norm: norm of the global gradient, before clipping.
        aux_loss: this rank's share of the routers' loss, or None if the model has none.
        micro_losses: what this rank minimised in each micro-batch.
        of_rows: this rank's part of the loss of each row, [rows] for each micro-batch; empty: unknown.
        measured: [measures]: this rank's sums of further measures of a custom loss; None: it has none.
    """

    loss_sum: Tensor
    target_tokens: Tensor
    grad_norm: Tensor
    aux_loss: Tensor | None = None
    micro_losses: tuple[Tensor, ...] = ()
    measured: Tensor | None = None
    of_rows: tuple[Tensor, ...] = ()


def refuse_nothing(what: str, count: float) -> None:
    """DataError if what the ranks have computed together has no target token (for a custom loss: no count)."""
    if not count:
        raise DataError(
            f"{what} has no token that is trained on: all labels of all ranks are -100, or the loss has the count 0",
            expected="at least one on some rank: a mean loss over no tokens is not a number; nothing was updated",
            fix="leave out rows whose labels are all -100, or make them longer, so that they reach an answer",
        )


def mean_loss(result: StepResult, mesh: Mesh) -> float:
    """The step's own loss, NaN without target tokens: one small collective, then a wait for the device."""
    return (over_ranks(result.loss_sum.clone(), mesh) / result.target_tokens).item()


def mean_measures(result: StepResult, mesh: Mesh) -> list[float]:
    """Further measures of a custom loss, as means over the global batch; costs as `mean_loss`."""
    if result.measured is None or not len(result.measured):
        return []
    total: list[float] = (
        over_ranks(result.measured.clone(), mesh) / result.target_tokens
    ).tolist()
    return total


def mean_aux_loss(result: StepResult, mesh: Mesh) -> float | None:
    """The routers' loss of the step, or None if the model has none; costs as `mean_loss`."""
    return None if result.aux_loss is None else over_ranks(result.aux_loss, mesh).item()


def over_ranks(part: Tensor, mesh: Mesh) -> Tensor:
    total = part.double()  # itself, if it is already
    mesh.all_reduce("loss", total)
    return total
