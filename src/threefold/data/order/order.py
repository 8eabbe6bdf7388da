"""The order of samples: the rows of each step, the place of a run in it, and the batches left out of it.

In: a few numbers (rows, global batch, seed, ...). Out: the rows of any step, the place of any later step, and the state
that samplers, loaders and checkpoints keep. Invariants: nothing here depends on the number of ranks, so the state
is the same on every rank and mesh and for every number of workers; an order made from something else (another seed,
size, data or algorithm) is refused by name instead of being read from a meaningless place.

The loader asks for the rows of its dp rank, which `partition` computes (`Order.rows_of_rank`). The audit asks for the
rows of entire steps (`Order.rows`) and divides them itself, so that a wrong loader cannot agree with it. A sampler
iterates over an epoch in a `Pass`, which counts the samples that the loop received.

`data.skip` leaves batches out, for example after a loss spike. A range [first, last] means the batches that the
steps first to last would have read. They are left out together when the run reaches step `first`, which then reads the
batch that step last + 1 would have read. So step numbers have no gaps, every step trains, and the place in the order
moves by last - first + 1 extra batches. Later ranges count the steps of the run that has left out the earlier ones. The
state keeps the ranges that were left out, so a resume after step `first` does not leave them out again, and a resume
before it does.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from threefold.arrays import Int64
from threefold.data.order.length_buckets import WINDOW, LengthsOf, Windows
from threefold.data.order.mixture import Mixture
from threefold.data.order.partition import Steps, Tail, check_global_batch
from threefold.data.order.permutation import (
    MAX_ROWS,
    ORDER_VERSION,
    Permutation,
    check_order_version,
    seed_of,
)
from threefold.errors import ConfigError, DataError, Problem

Plain = int | float | str | bool | None

_ABSENT = "(not set)"
_REMEDY = {
    "seed": "pass the seed that the run began with (--data.seed {saved}), or start a new run",
    "shuffle": "pass the shuffle that the run began with (--data.shuffle {yaml}), or start a new run",
    "tail": "pass the tail that the run began with (--data.tail {saved}), or start a new run",
    "group_by_length": "pass the group_by_length and global_batch that the run began with, or start a new run",
    "order": "pass order={saved!r}, or start a new run",
    "num_samples": "pass num_samples={saved}, or start a new run",
}
_OTHER_REMEDY = "resume with the data and settings that the run began with, or start a new run"

StepRange = tuple[int, int]
"""First and last step, both included."""


class Place(NamedTuple):
    """Where a step begins: a global position in an epoch."""

    epoch: int
    position: int


@dataclass(frozen=True)
class Order:
    """Which rows a step reads.

    Without a mixture an epoch is every row once. With one, the order is a single epoch without an end, in which each
    source has its own epochs, and `num_rows` counts the rows of all sources: row ids are unique over the sources
    (those of `Mixture.rows_at`), but a small source may give the same row twice within one step.
    """

    num_rows: int
    global_batch: int
    seed: int
    shuffle: bool
    tail: Tail = "drop"
    mixture: Mixture | None = None
    epochs: int | None = None
    """where the order ends; with `carry` the last step before it is short. None: nowhere."""
    lengths: LengthsOf | None = None
    """of rows, which are read in batches of like length (`length_buckets`); None: as they come. Not with a mixture."""

    def __post_init__(self) -> None:
        assert self.mixture is None or self.tail != "carry"
        assert self.mixture is None or self.lengths is None

    @property
    def epoch_size(self) -> int:
        """Positions of an epoch."""
        return self.num_rows if self.mixture is None else MAX_ROWS

    @property
    def steps(self) -> Steps:
        """The steps of an epoch."""
        return Steps(self.epoch_size, self.global_batch, self.tail)

    def begin(self, place: Place) -> Place:
        """Where a step at `place` really begins: there, or at the head of the next epoch."""
        return Place(*self.steps.begin(*place))

    def after(self, place: Place, num_steps: int) -> Place:
        """Where the step begins that follows `num_steps` steps from `place`."""
        after = Place(*self.steps.after(*place, num_steps))
        return (
            min(after, Place(self.epochs, 0))
            if self.tail == "carry" and self.epochs is not None
            else after
        )

    def before(self, place: Place) -> Place | None:
        """Where the step before the one at `place` began; None at the very beginning."""
        epoch, position = self.begin(place)
        if position >= self.global_batch:
            return Place(epoch, position - self.global_batch)
        if self.tail == "carry":
            back = Place(*self.steps.begin(epoch, position - self.global_batch))
            return back if back.epoch >= 0 else None
        return (
            Place(epoch - 1, (self.steps.per_epoch - 1) * self.global_batch) if epoch else None
        )

    def num_read(self, place: Place, num_steps: int = 1) -> int:
        """Rows of some steps over all dp ranks: `num_steps` x global_batch, or up to where the order ends."""
        wanted = num_steps * self.global_batch
        if self.tail == "carry" and self.epochs is not None:
            wanted = max(
                0, min(wanted, (self.epochs - place.epoch) * self.num_rows - place.position)
            )
        return (
            min(wanted, self.num_rows - place.position)
            if self.tail == "exact" and num_steps == 1
            else wanted
        )

    def steps_left(self, place: Place) -> int:
        """Steps from `place` to the end of the last epoch."""
        assert self.epochs is not None, "an endless order"
        epoch, position = self.begin(place)
        ahead = self.epochs - epoch
        if self.tail == "carry":
            return max(0, -(-(ahead * self.num_rows - position) // self.global_batch))
        return (
            self.steps.left(position) + (ahead - 1) * self.steps.per_epoch if ahead > 0 else 0
        )

    def stretches(self, place: Place, num_steps: int) -> Iterator[tuple[Place, int, int]]:
        """(place, positions, positions before it) of each part of some steps that is within one epoch."""
        before, place = 0, self.begin(place)
        wanted = (
            self.num_read(place, num_steps)
            if self.tail == "carry"
            else num_steps * self.global_batch
        )
        while before < wanted:
            left = self.num_rows - place.position
            if self.tail != "carry":
                left = self.steps.left(place.position) * self.global_batch
            count = min(wanted - before, left)
            yield place, count, before
            before, place = (
                before + count,
                self.begin(Place(place.epoch, place.position + count)),
            )

    def rows(self, place: Place, num_steps: int) -> Int64:
        """Row indices of some steps, [num_steps, global_batch]: dp rank d of D reads [:, d::D]; -1 is no sample."""
        indices, read = np.full(num_steps * self.global_batch, -1, np.int64), 0
        for (epoch, position), count, read in self.stretches(place, num_steps):
            positions = np.arange(position, position + count, dtype=np.int64)
            rows = self.rows_at(epoch, positions % self.epoch_size)
            if self.tail == "exact":
                rows[positions >= self.epoch_size] = -1
            indices[read : read + count] = rows
        return indices.reshape(num_steps, self.global_batch)

    def rows_of_rank(self, place: Place, *, dp_rank: int, dp_size: int) -> tuple[Int64, int]:
        """(row indices [rows] that one dp rank reads in the step at `place`, ignored rows to add)."""
        if self.tail != "carry":
            step = self.steps.of_rank(place.position, dp_rank=dp_rank, dp_size=dp_size)
            return self.rows_at(place.epoch, step.positions), step.num_ignored
        check_global_batch(self.global_batch, dp_size=dp_size)
        mine = place.position + np.arange(
            dp_rank, self.num_read(place), dp_size, dtype=np.int64
        )
        epochs, positions = np.divmod(mine, self.num_rows)
        for epoch in np.unique(epochs):
            mine[epochs == epoch] = self.rows_at(
                place.epoch + int(epoch), positions[epochs == epoch]
            )
        return mine, self.global_batch // dp_size - len(mine)

    def rows_at(self, epoch: int, positions: Int64) -> Int64:
        """Row indices at some positions of an epoch, each in [0, epoch_size)."""
        if self.mixture is not None:
            return self.mixture.rows_at(positions, shuffle=self.shuffle)
        if self.lengths is not None:
            positions = _windows(self, epoch).places(positions)
        return self._rows_in(epoch, positions)

    def _rows_in(self, epoch: int, places: Int64) -> Int64:
        """Row indices at places of an epoch's own order, before batches of like length are made."""
        return self.permutation(epoch).at(places) if self.shuffle else places.copy()

    def position_of(self, epoch: int, row: int) -> int:
        """Where in an epoch a row is read; without a mixture."""
        place = self.permutation(epoch).inverse(row) if self.shuffle else row
        return place if self.lengths is None else _windows(self, epoch).position(place)

    def longest(self, place: Place) -> int | None:
        """Tokens of the longest row of the step at `place`; None if lengths play no part."""
        rows = self.rows(place, 1)[0]
        return (
            int(self.lengths(rows[rows >= 0]).max(initial=1))
            if self.lengths is not None
            else None
        )

    @property
    def grouping(self) -> dict[str, str]:
        """The part of the order's fingerprint about grouping by length; empty if rows are not grouped."""
        return (
            {"group_by_length": f"{WINDOW} batches of {self.global_batch} rows"}
            if self.lengths is not None
            else {}
        )

    def permutation(self, epoch: int) -> Permutation:
        """The shuffle of one epoch; without a mixture."""
        return _permutation(self.num_rows, seed=self.seed, epoch=epoch)


# Cached, because a small one is a table.
_permutation = lru_cache(maxsize=4)(Permutation)


@lru_cache(maxsize=2)  # a step may span two epochs
def _windows(order: Order, epoch: int) -> Windows:
    assert order.lengths is not None
    lengths, head = (
        order.lengths,
        -epoch * order.num_rows % order.global_batch if order.tail == "carry" else 0,
    )
    return Windows(
        order.num_rows,
        order.global_batch,
        head,
        seed_of("batches of like length", order.seed, epoch),
        lambda places: lengths(order._rows_in(epoch, places)),
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 80


@dataclass(frozen=True)
class Cursor:
    """The next sample to read: position `position` of epoch `epoch`, in the order that `fingerprint` describes."""

    epoch: int
    position: int
    """global position in the epoch: samples of this epoch already read, over all dp ranks."""
    fingerprint: Mapping[str, Plain]
    """what the order was made from (seed, number of rows, ...), never the number of ranks or workers."""

    @property
    def place(self) -> Place:
        return Place(self.epoch, self.position)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON or a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order_version": ORDER_VERSION,
            "fingerprint": dict(self.fingerprint),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Cursor":
        """The inverse of `state_dict`; a DataError for anything else, or an unknown order version."""
        state = state if isinstance(state, Mapping) else {}
        for name in ("epoch", "position", "order_version", "fingerprint"):
            value, wanted = (
                state.get(name),
                "a mapping" if name == "fingerprint" else "an integer >= 0",
            )
            if not (isinstance(value, Mapping) if name == "fingerprint" else _is_count(value)):
                fault = f"{name} = {value!r}" if name in state else f"no {name}"
                raise DataError(
                    f"this is not a saved order of samples: it has {fault}",
                    expected=f"a state_dict() of threefold's sampler or loader, with {wanted} under {name!r}",
                    fix="load the state that the same sampler or loader saved, or start a new run",
                )
        check_order_version(state["order_version"])
        return cls(state["epoch"], state["position"], dict(state["fingerprint"]))

    def check(self, fingerprint: Mapping[str, Plain], *, end: float = math.inf) -> None:
        """Refuse to resume in another order, or after the `end` of an epoch: a DataError that names what differs."""
        pairs = {
            name: (self.fingerprint.get(name, _ABSENT), fingerprint.get(name, _ABSENT))
            for name in {**self.fingerprint, **fingerprint}
        }
        DataError.raise_for(
            Problem(
                f"the saved state has {name} = {saved}, but here {name} = {current}",
                f"the same {name}: in another order the saved position would repeat some samples and never read others",
                _REMEDY.get(name, _OTHER_REMEDY).format(saved=saved, yaml=str(saved).lower()),
            )
            for name, (saved, current) in pairs.items()
            if saved != current
        )
        if self.position > end:
            raise DataError(
                f"the saved state is at position {self.position:,} of epoch {self.epoch:,}",
                expected=f"a position among the {end:,} rows of an epoch",
                fix="load the state that the same sampler or loader saved, or start a new run",
            )


def skips_ahead(
    skip: Sequence[StepRange], *, first_step: int, left_out: Sequence[StepRange]
) -> dict[int, StepRange]:
    """The ranges still to be left out, each by the step before whose batch that happens.

    Args:
        skip: the value of `data.skip`.
        first_step: the next step of the run.
        left_out: ranges that the run has left out already; they are ignored.

    Raises:
        ConfigError: a range begins with a step that is done.
    """
    ahead = [(first, last) for first, last in skip if (first, last) not in set(left_out)]
    ConfigError.raise_for(
        Problem(
            f"data.skip has [{first}, {last}], but step {first} is done: the run resumes with step {first_step}",
            "ranges of future steps: batches that were trained on cannot be left out afterwards",
            f"--checkpoint.resume RUN/checkpoints/step-...   (one before step {first}; or leave the range out)",
        )
        for first, last in ahead
        if first < first_step
    )
    return {first: (first, last) for first, last in ahead}


def last_step(order: Order, place: Place, *, done: int, skip: Iterable[StepRange] = ()) -> int:
    """The last step of a run that has done `done` steps, is at `place` and leaves out ranges of later steps.

    It depends on rows, not on the steps done, which may have had another global batch.
    """
    for first, last in sorted(skip):
        if done < first <= done + order.steps_left(place):
            place = order.after(place, first - 1 - done + num_batches([(first, last)]))
            done = first - 1
    return done + order.steps_left(place)


def num_batches(ranges: Iterable[StepRange]) -> int:
    """How many batches the ranges leave out."""
    return sum(last - first + 1 for first, last in ranges)
