"""Rows to batches of tensors for one dp rank, prefetched by workers, resumable at any step.

What the loader hands out is the dp rank's part of one global batch. Workers are given whole steps, named by where they
begin (epoch, position), and keep no state of their own; so the state counts what the loop consumed, whatever was
prefetched, and a run may stop with four workers and go on with none.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from threefold.data.cursor import Cursor
from threefold.data.mixture import Mixture
from threefold.data.partition import (
    StepRows,
    Tail,
    after_step,
    after_steps,
    check_global_batch,
    rows_for_step,
    step_begin,
    steps_per_epoch,
)
from threefold.data.permutation import MAX_ROWS, ORDER_VERSION, Permutation
from threefold.data.rows.concat import IGNORED, Rows
from threefold.data.skip import StepRange, num_batches, skips_ahead

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Order:
    """Which rows a step reads: everything the order depends on, and the dp rank's place, on which it does not.

    Without a mixture an epoch is every row once. With one, the order is a single epoch without an end, in which each
    source goes through epochs of its own, and `num_rows` counts the rows of all sources: row ids are unique over the
    sources (those of `Mixture.rows_at`), but a small source may give the same row twice within one step.
    """

    num_rows: int
    global_batch: int
    seed: int
    shuffle: bool
    tail: Tail
    dp_rank: int
    dp_size: int
    version: int = ORDER_VERSION
    mixture: Mixture | None = None

    @property
    def epoch_size(self) -> int:
        """Positions of an epoch."""
        return self.num_rows if self.mixture is None else MAX_ROWS

    def rows_at(self, epoch: int, position: int) -> tuple[np.ndarray[Any, Any], int]:
        """(row indices [rows] that this dp rank reads in the step at (epoch, position), ignored rows to add)."""
        step: StepRows = rows_for_step(
            position,
            num_rows=self.epoch_size,
            global_batch=self.global_batch,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            tail=self.tail,
        )
        if self.mixture is not None:
            return self.mixture.rows_at(step.positions, shuffle=self.shuffle), step.num_ignored
        if not self.shuffle:
            return step.positions, step.num_ignored
        permutation = Permutation(self.num_rows, seed=self.seed, epoch=epoch, version=self.version)
        return permutation.at(step.positions), step.num_ignored


class _StepDataset(Dataset[Batch]):
    """(epoch, position) -> the dp rank's batch of that step; picklable, so that workers can have it."""

    def __init__(self, rows: Rows, order: Order, *, document_mask: bool) -> None:
        self._rows = rows
        self._order = order
        self._document_mask = document_mask

    def __getitem__(self, begin: tuple[int, int]) -> Batch:
        indices, num_ignored = self._order.rows_at(*begin)
        return read_batch(self._rows, indices, num_ignored, document_mask=self._document_mask)


def read_batch(rows: Rows, indices: np.ndarray[Any, Any], num_ignored: int, *, document_mask: bool) -> Batch:
    """Rows as int64 tensors [rows, seq_len], with `num_ignored` more whose labels are all ignored.

    Besides the rows' own keys there is `indices` [rows], -1 for an ignored one: a row's number in `rows`, so that it is
    unique over the sources of a mixture too. `document_ids` are left out where attention does not stop at documents.
    """
    taken = indices if len(indices) else np.zeros(1, dtype=np.int64)
    batch = {name: torch.from_numpy(values) for name, values in rows.rows(taken).items()}
    if not document_mask:
        batch.pop("document_ids", None)
    batch = {name: values[: len(indices)] for name, values in batch.items()} if num_ignored == 0 else batch
    if num_ignored:
        # An ignored row repeats a row's tokens, so that the model computes with real ones.
        kept = {name: values[: len(indices)] for name, values in batch.items()}
        extra = {name: values[:1].expand(num_ignored, -1).clone() for name, values in batch.items()}
        extra["labels"].fill_(IGNORED)
        batch = {name: torch.cat([kept[name], extra[name]]) for name in batch}
    batch["indices"] = torch.cat([torch.from_numpy(indices), torch.full((num_ignored,), -1)])
    return batch


class TokenLoader:
    """Endless batches of one dp rank: epoch after epoch, each in its own order.

    Iterating yields dictionaries of [rows, seq_len] int64 tensors, rows = global_batch / dp_size.
    """

    def __init__(
        self, rows: Rows, order: Order, *, document_mask: bool = False, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        check_global_batch(order.global_batch, dp_size=order.dp_size)
        self.steps_per_epoch = steps_per_epoch(order.epoch_size, global_batch=order.global_batch, tail=order.tail)
        self.rows = rows
        self.order = order
        self._dataset = _StepDataset(rows, order, document_mask=document_mask)
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._epoch, self._position = 0, 0
        self._step = 1
        self._planned: dict[int, StepRange] = {}
        self._left_out: list[StepRange] = []
        self._rows_read = 0

    @property
    def epoch(self) -> int:
        """Epoch of the next step."""
        return self._begin()[0]

    def __iter__(self) -> Iterator[Batch]:
        loader = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self._begins(),  # type: ignore[arg-type]
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            # A fork of a process with live communication threads can hang; the server has none.
            multiprocessing_context=multiprocessing.get_context("forkserver") if self._num_workers else None,
            # torch draws a seed here; from the global generator a resumed run would be a random number ahead.
            generator=torch.Generator(),
        )
        for batch in loader:
            self._epoch, self._position = self._after(*self._begin())
            if (step_range := self._planned.get(self._step)) is not None:
                self._left_out.append(step_range)
            self._step += 1
            self._rows_read += self.order.global_batch
            yield batch

    def advance(self, steps: int) -> None:
        """Moves on by `steps` steps without reading them."""
        self._epoch, self._position = after_steps(self._epoch, self._position, steps, **self._sizes())
        self._rows_read += steps * self.order.global_batch

    def leave_out(self, skip: Sequence[StepRange], *, first_step: int) -> None:
        """Leaves the batches of some steps out when the run comes to them (see `skip`).

        Args:
            skip: ranges of steps; those that the loaded state has left out already are passed over.
            first_step: number of the step that reads the next batch.

        Raises:
            ConfigError: a range begins with a step that is done.
        """
        self._planned = skips_ahead(skip, first_step=first_step, left_out=self._left_out)
        self._step = first_step

    @property
    def rows_read(self) -> int:
        """Rows of the steps so far, over all dp ranks; those of `data.skip` were in no step."""
        return self._rows_read

    @property
    def left_out(self) -> list[StepRange]:
        """Ranges of steps whose batches were left out so far."""
        return list(self._left_out)

    @property
    def planned(self) -> dict[int, StepRange]:
        """Ranges that are still to be left out, by the step before whose batch that happens."""
        return {step: step_range for step, step_range in self._planned.items() if step >= self._step}

    def cursor(self) -> Cursor:
        """Where the next step begins, the same on every rank and mesh."""
        return Cursor(self._epoch, self._position, self.fingerprint(), self.order.version)

    def fingerprint(self) -> dict[str, Any]:
        """What the order was made from."""
        order = self.order
        mixture = {} if order.mixture is None else {"mixture": order.mixture.fingerprint()["mixture"]}
        return {
            "data": self.rows.fingerprint,
            "num_rows": order.num_rows,
            "seed": order.seed,
            "shuffle": order.shuffle,
            **mixture,
        }

    def state_dict(self) -> dict[str, Any]:
        """The cursor as plain values, and what was left out: counts the batches handed out, not those prefetched."""
        left_out = [list(step_range) for step_range in self._left_out]
        return {**self.cursor().state_dict(), "left_out": left_out, "rows_read": self._rows_read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, on any mesh and with any number of workers.

        Raises:
            DataError: the state belongs to other data, another seed or another order.
        """
        cursor = Cursor.from_state_dict(state)
        cursor.check(self.fingerprint())
        self._epoch, self._position = cursor.epoch, cursor.position
        self._left_out = [(first, last) for first, last in state.get("left_out", [])]
        self._rows_read = state.get("rows_read", cursor.epoch * self.order.epoch_size + cursor.position)

    def _begins(self) -> Iterator[tuple[int, int]]:
        step, (epoch, position) = self._step, self._begin()
        while True:
            yield epoch, position
            step, (epoch, position) = step + 1, self._at(step + 1, *self._after(epoch, position))

    def _begin(self) -> tuple[int, int]:
        return self._at(self._step, self._epoch, self._position)

    def _at(self, step: int, epoch: int, position: int) -> tuple[int, int]:
        """Where `step` really begins: at the place given, or behind what is left out before it."""
        if (step_range := self._planned.get(step)) is not None:
            return after_steps(epoch, position, num_batches([step_range]), **self._sizes())
        return step_begin(epoch, position, **self._sizes())

    def _after(self, epoch: int, position: int) -> tuple[int, int]:
        return after_step(epoch, position, **self._sizes())

    def _sizes(self) -> dict[str, Any]:
        return {"num_rows": self.order.epoch_size, "global_batch": self.order.global_batch, "tail": self.order.tail}


def evaluation_batches(
    rows: Rows, *, rows_per_rank: int, dp_rank: int, dp_size: int, document_mask: bool = False
) -> Iterator[Batch]:
    """Every row once over all dp ranks, in order; each rank gives the same number of equally large batches."""
    order = Order(rows.num_rows, rows_per_rank * dp_size, 0, False, "exact", dp_rank, dp_size)
    for position in range(0, rows.num_rows, order.global_batch):
        indices, num_ignored = order.rows_at(0, position)
        yield read_batch(rows, indices, num_ignored, document_mask=document_mask)
