"""The audit as a callback: what every rank read in a training with transformers' loop, compared while it goes.

With threefold's Trainer (which adds it by itself) it knows the order: every `every` steps, before anything is saved and
at the end, each rank's digest of the samples it read is compared with what the order has for it, and `audit.jsonl` in
the output folder proves it again afterwards (`threefold data audit OUTPUT_DIR`). With any other Trainer it knows no
order and keeps count instead (`huggingface_tally`): which samples an epoch has read, so that one read twice is found in
the step that does it, also across a resume.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import TrainerCallback
from transformers.utils import logging

from threefold.audit import record
from threefold.audit.digest import Int64, Message, agree, fold_samples, predicted_samples
from threefold.audit.offences import Evidence, explain
from threefold.audit.record import SegmentLine, StepsLine
from threefold.data.order import Order, Place
from threefold.errors import Problem, RunError, ranks_text, rows_text
from threefold.integrations.huggingface.data import Taken, TrainLoader
from threefold.integrations.huggingface.tally import Tally, gather
from threefold.jsonl import MetricsFile

log = logging.get_logger(__name__)

_GO_ON = "trainer.train(resume_from_checkpoint=True)"


class AuditCallback(TrainerCallback):
    """Compares what all ranks read; raises RunError with the same text on every rank where it is not what it must be.

    Args:
        every: steps between comparisons.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self._audit: OrderAudit | Tally | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._audit = self._audit_of(args, state, kwargs["train_dataloader"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self._audit, Tally):
            self._audit.epoch_begins(int(state.epoch or 0))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._audit is not None:
            self._audit.micro_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._audit is None:
            return
        self._audit.micro_batch()
        self._audit.step_done()
        if state.global_step % self.every == 0:
            self._audit.check()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self._audit, Tally):
            self._audit.epoch_done(whole=not control.should_training_stop or state.epoch == int(state.epoch))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self._audit, Tally):
            self._audit.check()
            self._audit.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.check()
        if isinstance(self._audit, OrderAudit):
            self._audit.close()

    def check(self) -> None:
        """Compares what was read since the last time; every rank calls it, after the same step."""
        if self._audit is not None:
            self._audit.check()

    def _audit_of(self, args: Any, state: Any, loader: Any) -> OrderAudit | Tally | None:
        if not isinstance(loader, TrainLoader):
            return Tally.of(args, state, loader)
        if loader.sampler.weighted:
            log.warning("The audit is off: samples that are drawn with weights come as often as they are drawn.")
            return None
        return OrderAudit(loader, folder=Path(args.output_dir), done=state.global_step, every=self.every, args=args)


class OrderAudit:
    """What one rank read since the last comparison, and the record of all of them."""

    def __init__(self, loader: TrainLoader, *, folder: Path, done: int, every: int, args: Any) -> None:
        self._taken: deque[Taken] = loader.watch()
        self._topology, self._rank, self._device = loader.axis.topology, loader.axis.rank, args.device
        sampler = loader.sampler
        self.order = Order(
            num_rows=sampler.epoch_size,
            global_batch=sampler.global_batch,
            seed=sampler.seed,
            shuffle=sampler.shuffle,
            tail=sampler.tail,
            version=sampler.state_dict()["order_version"],
        )
        place = loader.state_dict()
        self._anew = bool(done and args.ignore_data_skip)
        if self._anew:
            # Asked to skip nothing, transformers begins the epoch again in which the run stood by its steps.
            place["epoch"] = done // math.ceil(len(loader) / args.gradient_accumulation_steps)
        self._begin = self.order.begin(Place(place["epoch"], place["position"]))
        self._first_step, self._resumed_at = done + 1, done + 1 if done else 0
        self._samples, self._contents = 0, 0
        self._batches: list[Taken] = []
        self._steps: list[Int64] = []
        self._record: MetricsFile | None = None
        self._segment = 1
        self._start(folder, every)

    def micro_batch(self) -> None:
        """The next batch that was given out has been used."""
        if self._taken:
            self._batches.append(self._taken.popleft())

    def step_done(self) -> None:
        """The batches used since the last step are one step."""
        numbers = np.array([number for batch in self._batches for number in batch.numbers], np.int64)
        step = self._first_step + len(self._steps)
        self._steps.append(numbers)
        self._samples = fold_samples(self._samples, step, numbers)
        for batch in self._batches:
            self._contents = xxhash.xxh3_64_intdigest(batch.contents.to_bytes(8, "little"), seed=self._contents)
        self._batches = []

    def check(self) -> None:
        """Compares the steps since the last time over all ranks.

        Raises:
            RunError: some rank did not read what the order has for it.
        """
        if not self._steps:
            return
        message = Message(self._last_step, sum(map(len, self._steps)), self._samples, self._contents, 0, 0, 0)
        messages = [Message.unpack(values) for values in self._gather(message.pack())]
        rows = self.order.rows(self._begin, len(self._steps))
        predicted = predicted_samples(rows, first_step=self._first_step, dp_size=self._topology.dp)
        problems: Sequence[Problem] = ()
        if not agree(messages, predicted, self._topology):
            problems = self._explain(messages)
        self._write(messages, problems)
        if problems:
            raise RunError.of(problems)
        self._begin = self.order.after(self._begin, len(self._steps))
        self._first_step = self._last_step + 1
        self._samples, self._contents, self._steps = 0, 0, []

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
            self._record = None

    @property
    def _last_step(self) -> int:
        return self._first_step + len(self._steps) - 1

    def _start(self, folder: Path, every: int) -> None:
        problem = ""
        if self._rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / record.FILE
            if self._anew and path.exists():
                # Rows of that epoch will be read again, as asked: what follows is a record of its own.
                path.replace(folder / f"audit-before-step-{self._first_step}.jsonl")
            self._record = MetricsFile(path)
            before = record.read(path) if path.stat().st_size else []
            known = record.place_after(before, self._first_step - 1) if self._resumed_at else None
            if known is not None and self.order.begin(known) != self._begin:
                problem = f"{self.order.begin(known).epoch} {self.order.begin(known).position}"
            else:
                self._segment = before[-1].start.segment + 1 if before else 1
                self._record.log(self._segment_line(every).to_record())
        known_place = self._gather(np.array([-1, -1] if not problem else [int(n) for n in problem.split()], np.int64))
        if known_place[0, 0] >= 0:
            raise self._one_off(Place(*known_place[0].tolist()))

    def _segment_line(self, every: int) -> SegmentLine:
        order = self.order
        return SegmentLine(
            segment=self._segment,
            first_step=self._first_step,
            epoch=self._begin.epoch,
            position=self._begin.position,
            mesh=self._topology.sizes,
            global_batch=order.global_batch,
            num_rows=order.num_rows,
            seed=order.seed,
            shuffle=order.shuffle,
            tail=order.tail,
            order_version=order.version,
            data="",
            mixture=None,
            every=every,
            checkpoint=None,
        )

    def _one_off(self, known: Place) -> RunError:
        begin = self._begin
        lost = "be left out" if begin > known else "be read again"
        return RunError(
            f"step {self._first_step} would begin at position {begin.position} of epoch {begin.epoch}, but by "
            f"{record.FILE} step {self._first_step - 1} ended at position {known.position} of epoch "
            f"{known.epoch}: {rows_text(self.order.rows(min(begin, known), 1)[0])} would {lost}",
            expected="the checkpoint and the record of the run to agree on what was read",
            fix="resume from an older checkpoint, or begin in another output_dir",
        )

    def _explain(self, messages: list[Message]) -> list[Problem]:
        sharers = self._topology.tp
        other = [
            rank
            for rank, message in enumerate(messages)
            if message.contents != messages[rank - rank % sharers].contents
            and message.samples == messages[rank - rank % sharers].samples
        ]
        if other:
            return [_other_tensors(other, self._first_step, self._last_step)]
        rows_per_step = self.order.global_batch // self._topology.dp
        values = np.full((len(self._steps), rows_per_step), -1, np.int64)
        for row, numbers in zip(values, self._steps, strict=True):
            row[: len(numbers)] = numbers[:rows_per_step]
        evidence = Evidence(
            self._topology,
            self.order,
            messages,
            self._gather(np.concatenate([np.zeros(6, np.int64), values.ravel()])),
            self._first_step,
            self._begin,
            resumed=self._first_step == self._resumed_at,
        )
        return [_in_the_trainers_words(problem) for problem in explain(evidence, go_on=_GO_ON)]

    def _gather(self, values: Int64) -> Int64:
        return gather(values, self._device)

    def _write(self, messages: Sequence[Message], problems: Sequence[Problem]) -> None:
        if self._record is None:
            return
        first_ranks = messages[:: self._topology.tp]
        line = StepsLine(
            segment=self._segment,
            first=self._first_step,
            last=self._last_step,
            epoch=self._begin.epoch,
            position=self._begin.position,
            samples=tuple(message.samples for message in first_ranks),
            contents=tuple(message.contents for message in first_ranks),
            faults=tuple(problem.what for problem in problems),
        )
        self._record.log(line.to_record())


def _in_the_trainers_words(problem: Problem) -> Problem:
    fix = problem.fix.replace("--data.num_workers 0", "dataloader_num_workers=0")
    return Problem(problem.what, problem.expected.replace("data.seed", "data_seed"), fix)


def _other_tensors(ranks: list[int], first: int, last: int) -> Problem:
    return Problem(
        f"{ranks_text(ranks)} trained on other tensors than the first rank of the same dp rank, in steps {first} to "
        f"{last}, though the samples are the same",
        "one content on all ranks that hold parts of one model: each computes its part of the same batch",
        "draw what the data_collator or the dataset draws at random (masks, augmentation) from the sample's number, or "
        "with dataloader_num_workers=1 or more, whose seeds are the same on these ranks",
    )
