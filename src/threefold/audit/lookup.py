"""What became of a step, a row and an epoch, by a run's record.

In: the history that stands and what was proved of it. Out: the rows of a step and who read them, the steps and ranks
that read a row, and how much of each epoch was read. What was left out and what an epoch's end drops is said, not
silently missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from threefold.audit.digest import Int64
from threefold.audit.proof import Stretch
from threefold.audit.record import Segment, StepsLine
from threefold.data.mixture import Mixture
from threefold.data.order import Order, Place
from threefold.errors import ranks_text, rows_text
from threefold.mesh.topology import Topology

_NUM_NAMED = 8


@dataclass(frozen=True)
class StepRead:
    """Where a step read: its place, and the rows of the whole step, [global_batch]."""

    step: int
    place: Place
    rows: Int64
    topology: Topology


def find_step(segments: Sequence[Segment], step: int) -> StepRead | None:
    """Where a step read, as it stands; None where the record does not say."""
    for segment in segments:
        for line in segment.lines:
            if isinstance(line, StepsLine) and 0 <= step - line.first < segment.stands(line):
                order = segment.start.order
                place = order.begin(order.after(line.place, step - line.first))
                return StepRead(step, place, order.rows(place, 1)[0], segment.start.topology)
    return None


@dataclass(frozen=True)
class SampleRead:
    """Where a row lies in an epoch, and who read it: `step` 0 where it was left out, None where nobody has."""

    epoch: int
    position: int
    step: int | None
    dp_rank: int = 0
    topology: Topology | None = None

    @property
    def ranks(self) -> list[int]:
        """All ranks that read it: the cp and tp ranks of the dp rank."""
        assert self.topology is not None
        size = self.topology.cp * self.topology.tp
        return list(range(self.dp_rank * size, (self.dp_rank + 1) * size))

    def __str__(self) -> str:
        where = f"epoch {self.epoch}, position {self.position:,}"
        if self.step is None:
            return f"not read in epoch {self.epoch} (it has position {self.position:,})"
        if self.step == 0:
            return f"left out by data.skip ({where})"
        return f"step {self.step:,} ({where}), dp rank {self.dp_rank}: {ranks_text(self.ranks)}"


def find_sample(stretches: Sequence[Stretch], row: int) -> list[SampleRead]:
    """What became of a row in each epoch that the run has touched, in their order."""
    order = stretches[0].segment.order
    found = []
    for epoch in sorted({stretch.epoch for stretch in stretches}):
        own = [stretch for stretch in stretches if stretch.epoch == epoch]
        for position in _positions_of(order, row, epoch=epoch, stop=max(stretch.stop for stretch in own)):
            # With the tail `pad` a position beyond the rows stands for the epoch's head again.
            reads = [
                _sample_read(stretch, at)
                for stretch in own
                for at in range(position, stretch.stop, order.epoch_size)
                if stretch.start <= at
            ]
            found += reads or [SampleRead(epoch, position, None)]
    return found


def _positions_of(order: Order, row: int, *, epoch: int, stop: int) -> Iterator[int]:
    """Where an epoch has a row: once; with a mixture once in each epoch of its source, as far as `stop`."""
    if order.mixture is None:
        keyed = order.permutation(epoch)
        yield keyed.inverse(row) if order.shuffle else row
        return
    mixture = order.mixture
    ends = np.cumsum(mixture.sizes)
    source = int(np.searchsorted(ends, row, side="right"))
    size, turns_per_period = mixture.sizes[source], mixture.quotas[source]
    turns = np.flatnonzero(mixture.locate(np.arange(mixture.period)).source == source)
    index = row - (int(ends[source]) - size)
    for epoch_of_source in itertools.count():
        place = mixture.order_of(source, epoch_of_source).inverse(index) if order.shuffle else index
        period, turn = divmod(epoch_of_source * size + place, turns_per_period)
        position = period * mixture.period + int(turns[turn])
        # A later epoch of the source lies behind all of this one.
        if (epoch_of_source * size // turns_per_period) * mixture.period >= stop:
            return
        if position < stop:
            yield position


def _sample_read(stretch: Stretch, position: int) -> SampleRead:
    if not stretch.first_step:
        return SampleRead(stretch.epoch, position, 0)
    step, place = divmod(position - stretch.start, stretch.segment.global_batch)
    topology = stretch.segment.topology
    return SampleRead(stretch.epoch, position, stretch.first_step + step, place % topology.dp, topology)


@dataclass(frozen=True)
class Coverage:
    """How much of an epoch the run has read.

    Attributes:
        unread: rows that are neither read nor left out; `named` are the first of them.
        finished: a later epoch has begun, so what is unread stays so.
    """

    epoch: int
    num_rows: int
    read: int
    left_out: int
    finished: bool
    named: list[int]

    @property
    def unread(self) -> int:
        """Rows that were neither read nor left out."""
        return self.num_rows - self.read - self.left_out


def coverage(stretches: Sequence[Stretch]) -> list[Coverage]:
    """Each epoch that the run has touched, in order. What it has read it has read once: that is what `prove` proves.

    Not for a mixture, whose sources each have epochs of their own (`turns`).
    """
    order = stretches[0].segment.order
    epochs = sorted({stretch.epoch for stretch in stretches})
    found = []
    for epoch in epochs:
        own = [stretch for stretch in stretches if stretch.epoch == epoch]
        # Beyond the rows lie repeats (`pad`) or ignored rows (`exact`).
        sizes = {kind: 0 for kind in (True, False)}
        for stretch in own:
            sizes[stretch.first_step > 0] += min(stretch.stop, order.num_rows) - stretch.start
        finished = epoch < epochs[-1]
        named = _unread_rows(own, epoch) if finished else []
        found.append(Coverage(epoch, order.num_rows, sizes[True], sizes[False], finished, named))
    return found


def _unread_rows(stretches: Sequence[Stretch], epoch: int) -> list[int]:
    """The first rows, by position, that no stretch of an epoch holds."""
    order = stretches[0].segment.order
    positions: list[int] = []
    reached = 0
    for start, stop in [*sorted((stretch.start, stretch.stop) for stretch in stretches), (order.num_rows,) * 2]:
        positions += range(reached, min(start, reached + _NUM_NAMED))
        reached = max(reached, stop)
    rows = np.array(positions[:_NUM_NAMED], np.int64)
    if order.shuffle:
        rows = order.permutation(epoch).at(rows)
    return [int(row) for row in rows]


def turns(stretches: Sequence[Stretch]) -> list[tuple[str, int, int]]:
    """(name, rows, rows read) of each source of a mixture."""
    mixture = stretches[0].segment.order.mixture
    assert mixture is not None
    read = np.zeros(len(mixture.names), np.int64)
    for stretch in stretches:
        if stretch.first_step:
            read += _turns_before(mixture, stretch.stop) - _turns_before(mixture, stretch.start)
    return [(name, size, int(count)) for name, size, count in zip(mixture.names, mixture.sizes, read, strict=True)]


def _turns_before(mixture: Mixture, position: int) -> Int64:
    """How often each source was read before a position, [sources]."""
    periods, rest = divmod(position, mixture.period)
    begun = np.bincount(mixture.locate(np.arange(rest)).source, minlength=len(mixture.names))
    return periods * np.array(mixture.quotas, np.int64) + begun


def coverage_lines(stretches: Sequence[Stretch]) -> Iterator[str]:
    """How much of each epoch was read, by source in a mixture, and what data.skip left out: as lines for people."""
    if stretches[0].segment.mixture is not None:
        for name, size, read in turns(stretches):
            yield f"  {name}: {read:,} reads of {size:,} rows ({read / size:.2f} epochs of its own)"
    else:
        for epoch in coverage(stretches):
            first = stretches[0]
            begun = epoch.epoch != first.epoch or first.start == 0
            why = "they fill no batch at the end" if begun else "read before this record, or in no batch at the end"
            line = f"  epoch {epoch.epoch}: {epoch.read:,} of {epoch.num_rows:,} rows, each exactly once"
            if not epoch.finished:
                yield f"{line}; {epoch.unread:,} not yet" if epoch.unread else line
            elif epoch.unread:
                more = ", ..." if epoch.unread > len(epoch.named) else ""
                named = ", ".join(map(str, epoch.named)) + more
                yield f"{line}; {epoch.unread:,} not: {why} (rows {named})"
            else:
                yield line
    for stretch in stretches:
        if not stretch.first_step:
            rows = stretch.segment.order.rows_at(stretch.epoch, np.arange(stretch.start, stretch.stop))
            yield (
                f"  left out by data.skip: positions {stretch.start:,} to {stretch.stop - 1:,} of epoch "
                f"{stretch.epoch} ({rows_text(rows)})"
            )
