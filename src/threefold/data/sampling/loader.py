"""Rows to batches of tensors for one dp rank, prefetched by workers, resumable at any step.

Each batch is the dp rank's part of one global batch. Workers receive entire steps, named by where they begin (epoch,
position), and keep no state; so the state counts the batches that the loop consumed, not those prefetched, and a run
may stop with four workers and resume with none.
"""

import multiprocessing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from threefold.data.order.order import Cursor, Order, Place, StepRange, num_batches, skips_ahead
from threefold.data.order.partition import check_global_batch
from threefold.data.rows.concat import IGNORED, PADDING, Rows
from threefold.errors import DataError, RunError
from threefold.mesh.local_ranks import serve_one_rank, signal_name, start_server

if TYPE_CHECKING:
    from threefold.places.prefetch import Ahead

Batch = dict[str, Tensor]
# A worker's connection breaks before its end is known.
_ENDED_WITHIN_S = 2.0


class WorkerError(RunError):
    """A process that reads rows has ended."""

    how = "worker"


@dataclass(frozen=True)
class _StepDataset(Dataset[Batch]):
    """Place -> the batch of one dp rank in the step that begins there; workers receive it pickled.

    Rows are int64 tensors [rows, seq_len]; those that fill up a short step have only ignored labels.
    In addition to the rows' own keys there is `indices` [rows]: a row's number in `rows`, unique over the sources of a
    mixture too, -1 for an ignored row; and `padding`, true where a place belongs to no document, or its row is ignored.
    `document_ids` are left out if attention does not stop at documents.
    """

    rows: Rows
    order: Order
    dp_rank: int
    dp_size: int
    document_mask: bool

    def __getitem__(self, begin: Place) -> Batch:
        indices, num_ignored = self.order.rows_of_rank(
            begin, dp_rank=self.dp_rank, dp_size=self.dp_size
        )
        taken = indices if len(indices) else np.zeros(1, dtype=np.int64)
        batch = {
            name: torch.from_numpy(values) for name, values in self.rows.rows(taken).items()
        }
        batch["padding"] = batch["document_ids"] == PADDING
        if not self.document_mask:
            batch.pop("document_ids")
        if num_ignored:
            # An ignored row repeats a row's tokens, so that the model computes with real ones.
            again = torch.cat(
                [torch.arange(len(indices)), torch.zeros(num_ignored, dtype=torch.int64)]
            )
            batch = {name: values[again] for name, values in batch.items()}
            batch["labels"][len(indices) :] = IGNORED
            batch["padding"][len(indices) :] = True
        batch["indices"] = torch.cat(
            [torch.from_numpy(indices), torch.full((num_ignored,), -1)]
        )
        return batch


class TokenLoader:
    """Endless batches of one dp rank: epoch after epoch, each in its own order.

    Iterating yields dictionaries of [rows, seq_len] int64 tensors, rows = global_batch / dp_size. Where the order ends
    inside a step, and after it, rows have only ignored labels.

    Args:
        dp_rank, dp_size: position in, and size of, the dp axis; the cp and tp ranks of one dp rank share it.
    """

    def __init__(
        self,
        rows: Rows,
        order: Order,
        *,
        dp_rank: int,
        dp_size: int,
        document_mask: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        check_global_batch(order.global_batch, dp_size=dp_size)
        order.begin(Place(0, 0))  # an epoch without a step is refused
        self.rows = rows
        self.order = order
        self._dataset = _StepDataset(rows, order, dp_rank, dp_size, document_mask)
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._place = Place(0, 0)
        self._step = 1
        self._planned: dict[int, StepRange] = {}
        self.ahead: Ahead[Place] | None = None
        """Of rows at addresses: fetches their blocks ahead of the steps."""
        self.left_out: list[StepRange] = []
        """Ranges of steps whose batches were left out so far."""
        self.longest: int | None = None
        """Tokens of the longest row of the global batch handed out last; None if rows are not read by their length."""
        self.rows_read = 0
        """Rows of the steps so far, over all dp ranks; those of `data.skip` were in no step."""

    @property
    def epoch(self) -> int:
        """Epoch of the next step."""
        return self.place.epoch

    @property
    def place(self) -> Place:
        """Where the next step begins, after the batches that are left out before it."""
        return self._begin_of(self._step, self._place)

    def __iter__(self) -> Iterator[Batch]:
        if self._num_workers:
            start_server(["__main__"])
        loader = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self.begins() if self.ahead is None else self.ahead.there(self.begins),  # type: ignore[arg-type]
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            # A fork of a process with live communication threads can hang; the server has none.
            multiprocessing_context=multiprocessing.get_context("forkserver")
            if self._num_workers
            else None,
            # torch's workers look at their parent only, which is that server.
            worker_init_fn=serve_one_rank,
            # torch draws a seed here; drawn from the global generator, it would put a resumed run one number ahead.
            generator=torch.Generator(),
        )
        others = set(multiprocessing.active_children())
        batches = iter(loader)
        workers = set(multiprocessing.active_children()) - others
        try:
            while True:
                with _naming_lost_workers(workers):
                    batch = next(batches)
                place = self.place
                self.rows_read += self.order.num_read(place)
                self.longest = self.order.longest(place)
                self._place = self.order.after(place, 1)
                if (step_range := self._planned.get(self._step)) is not None:
                    self.left_out.append(step_range)
                self._step += 1
                yield batch
        finally:
            if self.ahead is not None:
                self.ahead.close()
            del batches  # torch asks its workers to end, and waits a few seconds for those that do not hear it
            for worker in workers:
                worker.kill()

    def leave_out(self, skip: Sequence[StepRange], *, first_step: int) -> None:
        """Leaves batches out when the run, whose next step is `first_step`, reaches them (see `skips_ahead`)."""
        self._planned = skips_ahead(skip, first_step=first_step, left_out=self.left_out)
        self._step = first_step

    @property
    def planned(self) -> dict[int, StepRange]:
        """Ranges that are still to be left out, by the step before whose batch that happens."""
        return {
            step: step_range for step, step_range in self._planned.items() if step >= self._step
        }

    def cursor(self) -> Cursor:
        """Where the next step begins, the same on every rank and mesh."""
        return Cursor(*self._place, self.fingerprint())

    def fingerprint(self) -> dict[str, Any]:
        """The ingredients of the order."""
        order = self.order
        mixture = (
            {} if order.mixture is None else {"mixture": order.mixture.fingerprint()["mixture"]}
        )
        return {
            "data": self.rows.fingerprint,
            "num_rows": order.num_rows,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "tail": order.tail,
            **order.grouping,
            **mixture,
        }

    def state_dict(self) -> dict[str, Any]:
        """The cursor as plain values, and the ranges left out; counts batches handed out, not those prefetched."""
        left_out = [list(step_range) for step_range in self.left_out]
        return {**self.cursor().state_dict(), "left_out": left_out, "rows_read": self.rows_read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes on any mesh and with any number of workers.

        Raises:
            DataError: it is of other data, another seed or order, or of a version that this release does not know.
        """
        cursor = Cursor.from_state_dict(state)
        cursor.check(self.fingerprint(), end=self.order.epoch_size)
        self._place = cursor.place
        try:
            self.left_out = [
                (int(first), int(last)) for first, last in state.get("left_out", [])
            ]
        except (TypeError, ValueError) as error:
            raise DataError(
                f"this is not a saved order of samples: it has left_out = {str(state['left_out'])[:60]}",
                expected="a state_dict() of this loader, with pairs of steps under 'left_out'",
                fix="load the state that the loader saved, or start a new run",
            ) from error
        before, rows_read = (
            cursor.epoch * self.order.epoch_size + cursor.position,
            state.get("rows_read"),
        )
        self.rows_read = rows_read if type(rows_read) is int and rows_read >= 0 else before

    def begins(self) -> Iterator[Place]:
        """Where each step begins, from the next one on."""
        step, place = self._step, self.place
        while True:
            yield place
            step, place = step + 1, self._begin_of(step + 1, self.order.after(place, 1))

    def _begin_of(self, step: int, place: Place) -> Place:
        """Where `step` really begins: at the given place, or after the batches left out before it."""
        if (step_range := self._planned.get(step)) is not None:
            return self.order.after(place, num_batches([step_range]))
        return self.order.begin(place)


@contextmanager
def _naming_lost_workers(workers: Collection[BaseProcess]) -> Iterator[None]:
    """WorkerError instead of the error of reading from the connection of a worker that has exited."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        if not workers or not wait([worker.sentinel for worker in workers], _ENDED_WITHIN_S):
            raise
        lost = next(worker for worker in workers if worker.exitcode is not None)
        code = lost.exitcode or 0
        how = f"exit code {code}" if code >= 0 else signal_name(-code)
        raise WorkerError(
            f"worker process {lost.pid} of the loader has ended: {how}",
            expected=f"{len(workers)} workers that read rows ahead for this rank (data.num_workers); "
            "the kernel kills one (SIGKILL) where the host's or the container's memory runs out",
            fix=f"--data.num_workers {len(workers) // 2}, or more memory; `dmesg -T | grep -i oom` on this host shows "
            "whether the kernel did it; then start the run again: it resumes from its newest checkpoint",
        ) from error


def evaluation_batches(
    rows: Rows,
    *,
    rows_per_rank: int,
    dp_rank: int,
    dp_size: int,
    document_mask: bool = False,
    alike: bool = False,
) -> Iterator[Batch]:
    """Every row once over all dp ranks, in order; each rank yields the same number of equally large batches.

    Args:
        alike: the same batches on any number of dp ranks, which take turns; some ranks then have one more.
    """
    if alike:
        order = Order(rows.num_rows, rows_per_rank, seed=0, shuffle=False, tail="exact")
        batches = _StepDataset(rows, order, 0, 1, document_mask)
        begins = range(dp_rank * rows_per_rank, rows.num_rows, dp_size * rows_per_rank)
        return (batches[Place(0, position)] for position in begins)
    order = Order(rows.num_rows, rows_per_rank * dp_size, seed=0, shuffle=False, tail="exact")
    batches = _StepDataset(rows, order, dp_rank, dp_size, document_mask)
    return (
        batches[Place(0, position)] for position in range(0, rows.num_rows, order.global_batch)
    )
