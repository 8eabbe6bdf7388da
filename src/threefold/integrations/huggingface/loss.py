"""The mean over all target tokens of a step or an evaluation, for any number of ranks and micro-batches.

A transformers model returns the mean over the targets of one micro-batch. Means of unequal parts cannot be averaged
unless they are weighted by their numbers of targets. So everything here is a sum and a count: a micro-batch contributes
its mean times its targets, divided by all targets of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import find_batch_size
from torch import Tensor

from threefold.data.rows.concat import IGNORED


def targets_in(batch: Any, *, shifts_labels: bool) -> Tensor | int:
    """Number of targets that the loss of a batch is the mean of.

    Labels of -100 are not counted; of labels that are not integers (regression, multi-label) every number counts; a
    batch without labels counts its rows.

    Args:
        shifts_labels: the model predicts the next token, so the first place of a row is not a target.
    """
    labels = batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        return find_batch_size(batch) or 0
    if labels.is_floating_point():
        return labels.numel()
    if shifts_labels and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


def part_of_mean(loss: Tensor, outputs: Any, *, targets: int, all_targets: Tensor | int, ranks: int) -> Tensor:
    """What one micro-batch contributes to the mean over all targets, so that the average over ranks is that mean.

    Args:
        loss: mean over the `targets` of this micro-batch; any value if there are none.
        outputs: of the model; without targets the path through them keeps the collectives of the backward pass in step.
        ranks: number of ranks that gradients are averaged over.
    """
    return loss * (targets * ranks / all_targets) if targets else nothing_of(outputs, loss)


def nothing_of(outputs: Any, loss: Tensor) -> Tensor:
    """Zero, with zero gradients for everything that `outputs` was computed from."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, (tuple, list)) else ()
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad and value is not loss]
    zeros = [tensor.float().nan_to_num(0.0, 0.0, 0.0).sum() * 0 for tensor in tensors if tensor.ndim]
    return torch.stack(zeros).sum() if zeros else loss.nan_to_num(0.0, 0.0, 0.0) * 0


@contextlib.contextmanager
def counting_for_nothing(trainer: Any) -> Iterator[None]:
    """Makes the trainer's loss zero, whatever computes it: this rank takes part with a stand-in."""
    compute = trainer.compute_loss

    def of_nothing(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = compute(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        loss = nothing_of(outputs, loss)
        return (loss, outputs) if return_outputs else loss

    trainer.compute_loss = of_nothing
    try:
        yield
    finally:
        del trainer.compute_loss


class RunningMean:
    """The mean over all targets of an evaluation, from means over batches; on the device, so nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        # Apple's devices have no float64; only one process uses them.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._totals = torch.zeros(2, dtype=dtype, device=device)
        self._batches = 0

    def add(self, loss: Tensor, targets: Tensor | int) -> None:
        """Takes the mean `loss` over the `targets` of a batch; without targets it may be any value."""
        count = torch.as_tensor(targets, device=self._totals.device).to(self._totals.dtype)
        weighed = torch.where(count > 0, loss.detach().to(self._totals) * count, torch.zeros_like(count))
        self._totals += torch.stack([weighed, count])
        self._batches += 1

    def over_ranks(self, accelerator: Accelerator) -> float | None:
        """The mean over all ranks; None if no batch had a loss. Every rank calls it."""
        if not self._batches:
            return None
        total, count = accelerator.reduce(self._totals, reduction="sum").tolist()
        return total / count if count else float("nan")


def count_targets(accelerator: Accelerator, labels: Iterable[Tensor]) -> Tensor:
    """Targets of a step over all ranks and micro-batches: labels other than -100.

    Args:
        labels: of every micro-batch of the step on this rank, as the loss sees them (`batch["labels"][:, 1:]` if the
            model predicts next tokens from labels that are not shifted yet).
    """
    zero = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    own = sum((part.ne(IGNORED).sum().to(zero) for part in labels), start=zero)
    return accelerator.reduce(own, reduction="sum") // sharers_of(accelerator)


def exact_loss(accelerator: Accelerator, loss_sum: Tensor, targets: Tensor) -> Tensor:
    """What to pass to `accelerator.backward`, so that the step's gradient is that of the mean over all its targets.

    Args:
        loss_sum: over the targets of one micro-batch on this rank (`reduction="sum"`).
        targets: of the whole step, from `count_targets`.
    """
    ranks = accelerator.num_processes // sharers_of(accelerator)
    # accelerate averages gradients over ranks and divides by the micro-batches: undone here.
    return loss_sum * (ranks * accelerator.gradient_accumulation_steps) / targets.clamp(min=1)


def exact_mean(accelerator: Accelerator, loss_sums: Sequence[Tensor], counts: Sequence[Tensor | int]) -> float:
    """Mean over all targets of an evaluation, from the sums and counts of each rank's batches."""
    mean = RunningMean(accelerator.device)
    for loss_sum, count in zip(loss_sums, counts, strict=True):
        mean.add(loss_sum / max(int(count), 1), count)
    found = mean.over_ranks(accelerator)
    return float("nan") if found is None else found


def sharers_of(accelerator: Accelerator) -> int:
    """Ranks that read the same rows."""
    config = getattr(accelerator, "parallelism_config", None)
    return config.tp_size * config.cp_size * config.sp_size if config is not None else 1
