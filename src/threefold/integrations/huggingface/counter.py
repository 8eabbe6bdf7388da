"""Counts the rows that an epoch has read, for Trainers whose order cannot be predicted.

In: the batches that a loader gives to this rank, as lists of row numbers, and the loop's events that show when one was
used. Out: an error in the step that reads a row for the second time in an epoch, and at the epoch's end
the number of rows left out. Invariants: all ranks exchange their numbers and compute the same, so they raise
together. Two things that transformers does by design are only reported: rows repeated to fill the very last step of
an epoch, and fewer rows left out than a step has. What was read is saved with the checkpoint (`threefold-rows.npz`),
one bit per row, so that an epoch is checked across a resume.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging

from threefold.arrays import Int64
from threefold.errors import RunError, rows_text
from threefold.integrations.huggingface.trainer_checkpoint import all_ranks
from threefold.integrations.huggingface.training_loader import TrainLoader

log = logging.get_logger(__name__)

FILE = "threefold-rows.npz"


class RowCounter:
    """The rows of an epoch that have been read, over all ranks, and what this rank read since the last exchange."""

    def __init__(self, args: Any, state: Any, loader: Any, queue: deque[Any]) -> None:
        """`queue`: of the batches' row numbers (`queue_of`), or of what `TrainLoader.watch` reports about them."""
        self._given = queue
        self._step = state.global_step
        per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
        # The batches that transformers reads and discards when it resumes inside an epoch.
        skips = not args.ignore_data_skip and not isinstance(loader, TrainLoader)
        self._skip = self._step % per_epoch * args.gradient_accumulation_steps if skips else 0
        self._rank = args.process_index
        self._gather = all_ranks().gather
        self._seen = np.zeros(len(loader.dataset), np.bool_)
        self._complete_since_head = self._fresh = True
        self._epoch = self._largest_step = 0
        self._used: list[int] = []
        self._steps: list[list[int]] = []
        if self._step and not args.ignore_data_skip:
            self._load(Path(args.output_dir) / f"checkpoint-{self._step}")

    def epoch_begins(self, epoch: float) -> None:
        """Forgets the rows of the last epoch; an epoch that a resume continues, 1.5 say, keeps what was saved."""
        self._epoch = int(epoch)
        if not self._fresh or epoch == self._epoch:
            self._seen[:] = False
            self._complete_since_head = True
        self._fresh = False

    def micro_batch(self) -> None:
        """The next batch from the sampler has been used."""
        while self._skip and self._given:
            self._given.popleft()
            self._skip -= 1
        if self._given:
            self._used += self._given.popleft()

    def step_done(self) -> None:
        """The batches used since the last step are one step."""
        self._steps.append(self._used)
        self._used = []

    def check(self) -> None:
        """Exchanges what was read since the last call, on every rank; RunError if the epoch has read a row twice."""
        steps, self._steps = self._steps, []
        for offset, of_ranks in enumerate(_of_all_ranks(steps, self._gather), start=1):
            self._take(self._step + offset, of_ranks)
        self._step += len(steps)

    def epoch_done(self, *, whole: bool) -> None:
        """The epoch is over; if it is `whole`, RunError if as many rows as a step has, or more, were never read."""
        self.check()
        missing = np.flatnonzero(~self._seen)
        if not whole or not self._complete_since_head or not len(missing):
            return
        text = f"epoch {self._epoch} left out {rows_text(missing[:7])} ({len(missing):,} of {len(self._seen):,})"
        if len(missing) < self._largest_step:
            log.warning(f"{text}: they fill no step at its end.")
            return
        raise RunError(
            text,
            expected="every row once per epoch, except for fewer than one step's rows",
            fix="threefold.integrations.huggingface.Trainer; or check what the sampler leaves out",
        )

    def save(self, checkpoint: Path) -> None:
        """Saves what this epoch has read with the checkpoint."""
        if self._rank == 0 and checkpoint.is_dir():
            np.savez(
                checkpoint / FILE,
                bits=np.packbits(self._seen),
                rows=len(self._seen),
                whole=self._complete_since_head,
            )

    def _load(self, checkpoint: Path) -> None:
        try:
            with np.load(checkpoint / FILE, allow_pickle=False) as saved:
                same = int(saved["rows"]) == len(self._seen)
                if same:
                    self._seen[:] = np.unpackbits(saved["bits"], count=len(self._seen)).astype(
                        np.bool_
                    )
                    self._complete_since_head = bool(saved["whole"])
        except (OSError, ValueError, KeyError):
            same = False
        if not same:
            self._complete_since_head = False
            log.warning(
                f"{checkpoint} has no record of the rows that its epoch had read: repeats go unnoticed."
            )

    def _take(self, step: int, of_ranks: list[Int64]) -> None:
        rows = np.concatenate(of_ranks)
        self._largest_step = max(self._largest_step, len(rows))
        again = self._seen[rows]
        self._seen[rows] = True
        _, first = np.unique(rows, return_index=True)
        again[np.setdiff1d(np.arange(len(rows)), first)] = True
        if not again.any():
            return
        repeated = rows[again]
        if self._seen.all() and self._complete_since_head and len(repeated) < len(rows):
            log.warning(
                f"epoch {self._epoch} ended with {rows_text(repeated)} read for the second time, to fill step {step}."
            )
            return
        place = int(np.argmax(again))
        rank = int(
            np.searchsorted(np.cumsum([len(part) for part in of_ranks]), place, side="right")
        )
        others = f", and {len(repeated) - 1} more" if len(repeated) > 1 else ""
        raise RunError(
            f"rank {rank} read row {rows[place]} in step {step}{others}: epoch {self._epoch} had read it already",
            expected="every row once per epoch: a row that is read twice counts twice",
            fix="the loader of threefold.integrations.huggingface.Trainer, which resumes at the next sample with any "
            "number of ranks and any batch size; or resume with those of the run",
        )


def _of_all_ranks(
    steps: list[list[int]], gather: Callable[[Int64], Int64]
) -> list[list[Int64]]:
    """The rows that each rank has read in each step, [steps][ranks] of [rows]."""
    sizes = gather(np.array([len(rows) for rows in steps], np.int64))
    padded = np.full(max(int(own.sum()) for own in sizes), -1, np.int64)
    own = np.array([row for rows in steps for row in rows], np.int64)
    padded[: len(own)] = own
    of_ranks = [
        np.split(rows[: own.sum()], own.cumsum()[:-1])
        for rows, own in zip(gather(padded), sizes, strict=True)
    ]
    return [list(of_step) for of_step in zip(*of_ranks, strict=True)] if steps else []


def queue_of(batches: Any) -> deque[tuple[int, ...]]:
    """The batches of a sampler from now on, oldest first; a new iteration empties it."""
    queue: deque[tuple[int, ...]] = deque()
    kind = type(batches)

    def queued(self: Any) -> Iterator[Any]:
        queue.clear()
        for batch in kind.__iter__(self):
            queue.append(tuple(batch))
            yield batch

    # The loop builds its loader around this very object, also when it resumes, so it must remain the same.
    batches.__class__ = type(f"Told{kind.__name__}", (kind,), {"__iter__": queued})
    return queue
