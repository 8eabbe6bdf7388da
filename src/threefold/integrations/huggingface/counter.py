"""Counting what an epoch has read, for Trainers whose order nobody can predict.

In: the batches that accelerate's loader hands to this rank, as lists of row numbers, and the loop's own events that say
when one was used. Out: an error in the step that reads a row for the second time in an epoch, and at the epoch's end
how many rows were left out. What stays true: all ranks exchange their numbers and reckon alike, so they raise together.
Two things that transformers does by design are reported and not refused: rows repeated to fill up the very last step
of an epoch, and fewer rows left out than a step has. What was read goes with the checkpoint (`threefold-rows.npz`), one
bit a row, so that an epoch is judged across a resume.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from transformers.utils import logging

from threefold.audit.digest import Int64
from threefold.errors import RunError, rows_text

log = logging.get_logger(__name__)

FILE = "threefold-rows.npz"


class RowCounter:
    """The rows of an epoch that have been read, over all ranks, and what this rank read since the last exchange."""

    def __init__(self, given: deque[tuple[int, ...]], *, num_rows: int, skip: int, step: int, args: Any) -> None:
        self._given = given
        self._skip = skip
        self._step = step
        self._device = args.device
        self._rank = args.process_index
        self._seen = np.zeros(num_rows, np.bool_)
        self._complete_since_head = True
        self._epoch = 0
        self._fresh = True
        self._used: list[int] = []
        self._steps: list[list[int]] = []
        self._largest_step = 0

    @classmethod
    def of(cls, args: Any, state: Any, loader: Any) -> RowCounter | None:
        """The counter of a loader that accelerate has prepared; None, with a warning, for a stream."""
        batches = getattr(loader, "batch_sampler", None)
        if batches is None or not hasattr(loader, "base_dataloader") or type(loader).__name__ == "DataLoaderDispatcher":
            log.warning(f"The audit is off: a {type(loader).__name__} without a sampler of batches has no row numbers.")
            return None
        given = _told(batches)
        per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
        # The batches that transformers will go through and throw away when it resumes inside an epoch.
        skip = 0 if args.ignore_data_skip else state.global_step % per_epoch * args.gradient_accumulation_steps
        counter = cls(given, num_rows=len(loader.dataset), skip=skip, step=state.global_step, args=args)
        if state.global_step:
            counter._load(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        return counter

    def epoch_begins(self, epoch: int) -> None:
        """A new epoch has read nothing; the one that a resume goes on in keeps what was saved."""
        self._epoch = epoch
        if not self._fresh or self._seen.all():
            self._seen[:] = False
            self._complete_since_head = True
        self._fresh = False

    def micro_batch(self) -> None:
        """The next batch that was given out has been used."""
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
        """Exchanges what was read since the last time; every rank calls it, after the same step.

        Raises:
            RunError: a row was read that this epoch had read already.
        """
        steps, self._steps = self._steps, []
        for offset, of_ranks in enumerate(self._exchanged(steps), start=1):
            self._take(self._step + offset, of_ranks)
        self._step += len(steps)

    def epoch_done(self, *, whole: bool) -> None:
        """The epoch is over; `whole`: it was not broken off.

        Raises:
            RunError: as many rows as a step has, or more, were never read.
        """
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
            expected="every row once an epoch, but for fewer than a step has",
            fix="threefold.integrations.huggingface.Trainer; or look what the sampler leaves out",
        )

    def save(self, checkpoint: Path) -> None:
        """Keeps what this epoch has read beside the checkpoint."""
        if self._rank == 0 and checkpoint.is_dir():
            bits = np.packbits(self._seen)
            np.savez(checkpoint / FILE, bits=bits, rows=len(self._seen), whole=self._complete_since_head)

    def _load(self, checkpoint: Path) -> None:
        try:
            with np.load(checkpoint / FILE, allow_pickle=False) as saved:
                same = int(saved["rows"]) == len(self._seen)
                if same:
                    self._seen[:] = np.unpackbits(saved["bits"], count=len(self._seen)).astype(np.bool_)
                    self._complete_since_head = bool(saved["whole"])
        except (OSError, ValueError, KeyError):
            same = False
        if not same:
            self._complete_since_head = False
            log.warning(f"{checkpoint} does not say which rows its epoch had read: they cannot be told from new ones.")

    def _take(self, step: int, of_ranks: list[npt.NDArray[np.int64]]) -> None:
        rows = np.concatenate(of_ranks)
        self._largest_step = max(self._largest_step, len(rows))
        before = self._seen[rows]
        self._seen[rows] = True
        _, first = np.unique(rows, return_index=True)
        again = before.copy()
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
        rank = int(np.searchsorted(np.cumsum([len(part) for part in of_ranks]), place, side="right"))
        others = f", and {len(repeated) - 1} more" if len(repeated) > 1 else ""
        raise RunError(
            f"rank {rank} read row {rows[place]} in step {step}{others}: epoch {self._epoch} had read it already",
            expected="every row once an epoch: what is read twice counts twice",
            fix="threefold.integrations.huggingface.Trainer, which goes on at the next sample with any number of ranks "
            "and any batch size; or resume with those of the run",
        )

    def _exchanged(self, steps: list[list[int]]) -> Iterator[list[npt.NDArray[np.int64]]]:
        """For each step what each rank read."""
        sizes = gather(np.array([len(step) for step in steps], np.int64), self._device)
        width = int(sizes.max()) if sizes.size else 0
        own = np.full((len(steps), width), -1, np.int64)
        for row, step in zip(own, steps, strict=True):
            row[: len(step)] = step
        everybody = gather(own.ravel(), self._device).reshape(-1, len(steps), width) if steps else ()
        for number in range(len(steps)):
            yield [values[number, : sizes[rank, number]] for rank, values in enumerate(everybody)]


def _told(batches: Any) -> deque[tuple[int, ...]]:
    """What a sampler of batches hands out from now on, oldest first; a new iteration begins anew."""
    given: deque[tuple[int, ...]] = deque()
    kind = type(batches)

    def told(self: Any) -> Iterator[Any]:
        given.clear()
        for batch in kind.__iter__(self):
            given.append(tuple(batch))
            yield batch

    # The loop builds its loader around this very object, also when it resumes, so it must remain the same.
    batches.__class__ = type(f"Told{kind.__name__}", (kind,), {"__iter__": told})
    return given


def gather(values: Int64, device: torch.device) -> Int64:
    """What every rank gave, [world, len(values)]."""
    if not (dist.is_available() and dist.is_initialized()):
        return values[None]
    own = torch.from_numpy(values).to(device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).cpu().numpy()
