"""The mean over all target tokens of a step or an evaluation, for any number of ranks and micro-batches.

A transformers model returns the mean over the targets of one micro-batch. Means of unequal parts cannot be averaged
unless they are weighted by their numbers of targets. So everything here is a sum and a count: a micro-batch contributes
its mean times its targets, divided by all targets of all ranks.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size

from threefold.data.rows.concat import IGNORED
from threefold.training.numbers import refuse_nothing


def targets_in(batch: Any, *, shifts_labels: bool) -> Tensor | int:
    """Number of targets that the loss of a batch is the mean of.

    Labels of -100 are not counted; of labels that are not integers (regression, multi-label) every number counts; a
    batch without labels counts its rows.

    Args:
        shifts_labels: the model predicts the next token, so the first place of a row is not a target.
    """
    labels = (
        batch.get("shift_labels", batch.get("labels")) if isinstance(batch, Mapping) else None
    )
    if not isinstance(labels, Tensor):
        return find_batch_size(batch) or 0
    if labels.is_floating_point():
        return labels.numel()
    if shifts_labels and "shift_labels" not in batch:
        labels = labels[..., 1:]
    return labels.ne(IGNORED).sum()


def part_of_mean(
    loss: Tensor, outputs: Any, *, targets: int, all_targets: int, ranks: float
) -> Tensor:
    """What one micro-batch contributes to the mean over all targets, so that the average over ranks is that mean.

    Args:
        loss: mean over the `targets` of this micro-batch; any value if there are none.
        outputs: of the model; without targets the path through them keeps the collectives of the backward pass in step.
        ranks: number of ranks that gradients are averaged over; divided by what the loss is multiplied by afterwards.
    """
    return loss * (targets * ranks / all_targets) if targets else nothing_of(outputs, loss)


def nothing_of(outputs: Any, loss: Tensor) -> Tensor:
    """Zero, with zero gradients for everything that `outputs` was computed from."""
    values = (
        outputs.values()
        if isinstance(outputs, Mapping)
        else outputs
        if isinstance(outputs, (tuple, list))
        else ()
    )
    tensors = [
        value
        for value in values
        if isinstance(value, Tensor) and value.requires_grad and value is not loss
    ]
    zeros = [
        tensor.float().nan_to_num(0.0, 0.0, 0.0).sum() * 0 for tensor in tensors if tensor.ndim
    ]
    return torch.stack(zeros).sum() if zeros else loss.nan_to_num(0.0, 0.0, 0.0) * 0


class StepPart(NamedTuple):
    """What a rank computes at once in a step: a micro-batch, or the part of it before or in an epoch's last round.

    `targets` and `rows` are the real ones: a stand-in has neither. `share` is that of the micro-batch's rows. `alone`
    is the same on all ranks: some of them may have a stand-in.
    """

    targets: int
    rows: int
    share: float = 1.0
    alone: bool = False
    batch: Any = None

    def counted(self, inputs: Any) -> Any:
        """`inputs`, or none of their rows for a stand-in."""
        if self.rows or not isinstance(inputs, Mapping):
            return inputs
        return {
            name: value[:0] if isinstance(value, Tensor) and value.ndim else value
            for name, value in inputs.items()
        }


@contextlib.contextmanager
def weighing(trainer: Any, part: StepPart, step: StepPart) -> Iterator[None]:
    """Weighs the trainer's loss by the share of `part` in `step`, whatever computes it; a stand-in's is zero.

    A loss that transformers would divide by the micro-batches is a mean over rows. Any other is treated as normalised
    with num_items_in_batch: of a micro-batch in two parts, each has a share of the number and of the loss, so that a
    loss that ignores the number is still the mean over the micro-batch. Our own `compute_loss` knows its targets, and
    undoes `loss_weight`, which then holds for what an overridden one adds to it.
    """
    compute = trainer.compute_loss
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)

    def weighed(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        is_mean = declared is False or (declared is None and num_items_in_batch is None)
        if num_items_in_batch is not None and 0 < part.share < 1:
            num_items_in_batch = num_items_in_batch * part.share
        trainer.loss_weight = (
            part.rows * trainer.axis.dp_size / step.rows if is_mean else part.share
        )
        # The same on all ranks: TRL's losses compute outputs in their own forward pass.
        with_outputs = return_outputs or part.alone or not part.rows
        computed = compute(
            model, inputs, return_outputs=with_outputs, num_items_in_batch=num_items_in_batch
        )
        loss, outputs = computed if with_outputs else (computed, None)
        if not step.targets:
            refuse_nothing("the global batch", bool(loss.isfinite() and loss))
        loss = loss * trainer.loss_weight if part.rows else nothing_of(outputs, loss)
        trainer.loss_is_scaled_for_ga = True
        return (loss, outputs) if return_outputs else loss

    try:
        with _in_place_of(trainer, "compute_loss", weighed):
            yield
    finally:
        trainer.loss_is_scaled_for_ga = declared


@contextlib.contextmanager
def measuring(trainer: Any, mean: "RunningMean", loader: Any) -> Iterator[None]:
    """Adds the loss of every prediction step to `mean`, whichever class of the trainer computes it."""
    predict = trainer.prediction_step

    def measured(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        targets = targets_in(inputs, shifts_labels=trainer._loss_shifts_labels)
        loss, logits, labels = predict(model, inputs, *args, **kwargs)
        if loss is not None:
            rows = getattr(loader, "rows", find_batch_size(inputs) or 0)
            mean.add(loss, targets * (rows > 0), rows)
        return loss, logits, labels

    with _in_place_of(trainer, "prediction_step", measured):
        yield


@contextlib.contextmanager
def _in_place_of(trainer: Any, name: str, function: Any) -> Iterator[None]:
    """The trainer's method is `function`; afterwards it is its class's again, or the one that a user has set."""
    set_by_user = vars(trainer).get(name)
    setattr(trainer, name, function)
    try:
        yield
    finally:
        delattr(trainer, name)
        if set_by_user is not None:
            setattr(trainer, name, set_by_user)


class RunningMean:
    """The mean over all targets of an evaluation, from means over batches; on the device, so nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        # Apple's devices have no float64; only one process uses them.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._totals = torch.zeros(2, 2, dtype=dtype, device=device)

    def add(self, loss: Tensor, targets: Tensor | int, rows: int = 1) -> None:
        """Takes the mean `loss` over the `targets` of a batch; without targets it may be any value."""
        # totals: (loss and count, by targets and by rows)
        counts = self._totals.new_zeros(2)
        counts[0], counts[1] = targets, rows
        weighed = torch.where(counts > 0, loss.detach().to(counts) * counts, 0.0)
        self._totals += torch.stack([weighed, counts])

    def over_ranks(self, accelerator: Accelerator) -> float | None:
        """The mean over all ranks; None if no batch had a loss. Every rank calls it.

        Without a target, rows count, for a loss that has no use for labels; NaN if that is 0.
        """
        totals, counts = accelerator.reduce(self._totals, reduction="sum").tolist()
        if not any(counts):
            return None
        means = [total / max(count, 1) for total, count in zip(totals, counts, strict=True)]
        return means[0] if counts[0] else means[1] or float("nan")


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


def exact_mean(
    accelerator: Accelerator, loss_sums: Sequence[Tensor], counts: Sequence[Tensor | int]
) -> float:
    """Mean over all targets of an evaluation, from the sums and counts of each rank's batches."""
    mean = RunningMean(accelerator.device)
    for loss_sum, count in zip(loss_sums, counts, strict=True):
        mean.add(loss_sum / max(int(count), 1), count)
    overall = mean.over_ranks(accelerator)
    return float("nan") if overall is None else overall


def sharers_of(accelerator: Accelerator) -> int:
    """Ranks that read the same rows."""
    config = getattr(accelerator, "parallelism_config", None)
    return config.tp_size * config.cp_size * config.sp_size if config is not None else 1
