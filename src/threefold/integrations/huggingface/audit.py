"""The audit as a callback: the rows that every rank reads in transformers' loop, compared during training.

With threefold's Trainer (which adds it automatically) the order is known: every `every` steps, before anything is saved
and at the end, each rank's digest of the samples it read is compared with the order's, and `audit.jsonl` in the output
folder proves it again afterwards (`threefold data audit OUTPUT_DIR`). With any other Trainer the order is unknown, and
it counts the samples that an epoch has read (`counter`), so that one read twice is found in the step that does it, also
across a resume. So it does for an order that only the lengths of the rows determine.
"""

import math
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback
from transformers.utils import logging

from threefold.audit import record
from threefold.audit.compare import Audit, begin
from threefold.audit.offences import Evidence, explain
from threefold.audit.record import SegmentLine
from threefold.data.order.order import Order, Place
from threefold.errors import Problem
from threefold.integrations.huggingface.counter import RowCounter, queue_of
from threefold.integrations.huggingface.loaders import GroupedSampler
from threefold.integrations.huggingface.trainer_checkpoint import (
    all_ranks,
    in_trainer_words,
    refuse_other_copies,
)
from threefold.integrations.huggingface.training_loader import TrainLoader
from threefold.jsonl import MetricsFile

log = logging.get_logger(__name__)

_RESUME = "trainer.train(resume_from_checkpoint=True)"


class AuditCallback(TrainerCallback):
    """Compares what all ranks read; if that is wrong, raises RunError with the same text on every rank.

    Args:
        every: steps between comparisons.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self._audit: OrderAudit | RowCounter | None = None
        self._steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps = 0
        self._audit = self._audit_of(args, state, kwargs["train_dataloader"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self._audit, RowCounter):
            self._audit.epoch_begins(state.epoch or 0)

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        if self._audit is not None:
            self._audit.micro_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._steps += 1
        if self._steps == 1 or state.global_step % self.every == 0:
            refuse_other_copies(
                args, kwargs["model"], kwargs["optimizer"], step=state.global_step
            )
        if self._audit is None:
            return
        self._audit.micro_batch()
        self._audit.step_done()
        if state.global_step % self.every == 0:
            self._audit.check()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self._audit, RowCounter):
            self._audit.epoch_done(
                whole=not control.should_training_stop or state.epoch == int(state.epoch)
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self._audit, RowCounter):
            self._audit.check()
            self._audit.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.check()
        if isinstance(self._audit, OrderAudit):
            self._audit.close()

    def check(self) -> None:
        """Compares what was read since the last call; every rank calls it, after the same step."""
        if self._audit is not None:
            self._audit.check()

    def _audit_of(self, args: Any, state: Any, loader: Any) -> "OrderAudit | RowCounter | None":
        kind = type(loader).__name__
        if isinstance(loader, TrainLoader):
            if loader.sampler.replacement:
                log.warning(
                    "The audit is off: samples drawn with weights may come more than once per epoch."
                )
                return None
            if (
                isinstance(loader.sampler, GroupedSampler)
                or loader.sampler.order != "threefold"
            ):
                return RowCounter(args, state, loader, loader.watch())
            return OrderAudit(
                loader,
                folder=Path(args.output_dir),
                done=state.global_step,
                every=self.every,
                args=args,
            )
        batches = getattr(loader, "batch_sampler", None)
        if (
            batches is None
            or not hasattr(loader, "base_dataloader")
            or kind == "DataLoaderDispatcher"
        ):
            log.warning(
                f"The audit is off: a {kind} without a batch sampler has no row numbers."
            )
        elif (repeats := _not_each_row_once(batches, loader.dataset)) is not None:
            log.warning(
                f"The audit is off: a {repeats} does not draw every row once per epoch."
            )
        else:
            return RowCounter(args, state, loader, queue_of(batches))
        return None


class OrderAudit:
    """Compares all ranks' steps with the order; `micro_batch` and `step_done` say what the loop has used."""

    def __init__(
        self, loader: TrainLoader, *, folder: Path, done: int, every: int, args: Any
    ) -> None:
        self._taken: deque[tuple[int, ...]] = loader.watch()
        self._used: list[int] = []
        self._step = done
        place = loader.state_dict()
        again = bool(done and (args.ignore_data_skip or not loader.continues))
        if again and args.ignore_data_skip:
            # With ignore_data_skip, transformers restarts the epoch that the number of steps falls into.
            place["epoch"] = done // math.ceil(len(loader) / args.gradient_accumulation_steps)
        sampler = loader.sampler
        order = Order(
            sampler.epoch_size,
            sampler.global_batch,
            sampler.seed,
            sampler.shuffle,
            sampler.tail,
        )
        at = Place(place["epoch"], place["position"])
        start = SegmentLine.of(
            order, at, first_step=done + 1, topology=loader.axis.topology, every=every
        )
        path = folder / record.FILE
        file = (
            _open_record(path, again=again, first_step=start.first_step)
            if loader.axis.rank == 0
            else None
        )
        older = "resume from an older checkpoint, or begin in another output_dir"
        mesh = all_ranks()
        begun = mesh.share("audit", partial(begin, start, path, file, fix=older))
        self._audit = Audit(
            replace(start, **begun), gather=mesh.gather, explain=_explain, record=file
        )

    def micro_batch(self) -> None:
        if self._taken:
            self._used += self._taken.popleft()

    def step_done(self) -> None:
        self._step += 1
        self._audit.observe(self._step, np.array(self._used, np.int64))
        self._used = []

    def check(self) -> None:
        self._audit.check()

    def close(self) -> None:
        self._audit.close()


def _open_record(path: Path, *, again: bool, first_step: int) -> MetricsFile:
    path.parent.mkdir(parents=True, exist_ok=True)
    if again and path.exists():
        # Rows of that epoch will be read again, as requested, or the data have grown: a new record begins.
        path.replace(path.with_name(f"audit-before-step-{first_step}.jsonl"))
    return MetricsFile(path)


def _not_each_row_once(batches: Any, rows: Any) -> str | None:
    """The name of a sampler that by design repeats rows or leaves some out."""
    sampler = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
    if sampler is None or (
        not getattr(sampler, "replacement", False) and len(sampler) == len(rows)
    ):
        return None
    return type(sampler).__name__


def _explain(evidence: Evidence) -> list[Problem]:
    """The problems, in terms of the Trainer's arguments."""
    return [in_trainer_words(problem) for problem in explain(evidence, resume=_RESUME)]
