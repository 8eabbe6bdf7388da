"""What a run's record shows about a step, a row and an epoch.

In: the valid history and what was proved of it. Out: the rows of a step and the ranks that read them, the steps
and ranks that read a row, and how much of each epoch was read. Omitted rows and those dropped at an epoch's end are
reported as such.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from threefold.arrays import Int64
from threefold.audit.proof import Stretch
from threefold.audit.record import Segment, SkipLine
from threefold.data.order.order import Order, Place
from threefold.errors import ranks_text, rows_text
from threefold.mesh.topology import Topology

_NUM_NAMED = 8


@dataclass(frozen=True)
class StepRead:
    """What a step read: where in each epoch, one with the tail `drop`, and the rows of all dp ranks, [global_batch]."""

    step: int
    places: list[Place]
    rows: Int64
    topology: Topology


def find_step(segments: Sequence[Segment], step: int) -> StepRead | None:
    """What a step read, in the valid history; None if the record does not have it."""
    return _read_at(_audited(segments, step), step)


def ordered_step(segments: Sequence[Segment], step: int) -> StepRead | None:
    """What the order has for a step, audited or not yet; None before the record begins."""
    return _read_at(_placed(segments, step), step)


def ordered_rows(segments: Sequence[Segment], first: int, most: int) -> Int64 | None:
    """The rows of up to `most` steps from `first` on, [steps, global batch], as far as they follow one another.

    None before the record begins.
    """
    if (placed := _placed(segments, first)) is None:
        return None
    segment, place = placed
    ends = [
        line.step for line in segment.lines if isinstance(line, SkipLine) and line.step > first
    ]
    ends += [segment.last_step + 1] if segment.last_step is not None else []
    order = segment.start.order
    return order.rows(order.begin(place), min([most, *(end - first for end in ends)]))


def _placed(segments: Sequence[Segment], step: int) -> tuple[Segment, Place] | None:
    """The start that a step belongs to, and where the step begins."""
    for segment in segments:
        start = segment.start
        if start.first_step <= step and (
            segment.last_step is None or step <= segment.last_step
        ):
            at = bisect_right(segment.lines, step, key=lambda line: line.step)
            if not at:
                return segment, start.order.after(start.place, step - start.first_step)
            line = segment.lines[at - 1]
            left_out = line.batches if isinstance(line, SkipLine) else 0
            return segment, start.order.after(line.place, step - line.step + left_out)
    return None


def _audited(segments: Sequence[Segment], step: int) -> tuple[Segment, Place] | None:
    """The segment that has an audited step, and where the step begins."""
    for segment in segments:
        if (line := segment.line_of(step)) is not None:
            return segment, segment.start.order.after(line.place, step - line.first)
    return None


def _read_at(placed: tuple[Segment, Place] | None, step: int) -> StepRead | None:
    if placed is None:
        return None
    segment, place = placed
    order = segment.start.order
    places = [each for each, *_ in order.stretches(place, 1)]
    return StepRead(step, places, order.rows(order.begin(place), 1)[0], segment.start.topology)


def place_after(segments: Sequence[Segment], step: int) -> Place | None:
    """The place in the order after `step`; None if the history does not have the step."""
    if (audited := _audited(segments, step)) is None:
        return None
    segment, place = audited
    return segment.start.order.after(place, 1)


@dataclass(frozen=True)
class SampleRead:
    """A row's place in an epoch, and the rank that read it; `step` is 0 if it was left out, None if not read."""

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
    """The reads of a row in each epoch that the run has touched, in their order."""
    order = stretches[0].segment.order
    samples = []
    for epoch in sorted({stretch.epoch for stretch in stretches}):
        own = [stretch for stretch in stretches if stretch.epoch == epoch]
        for position in _positions_of(
            order, row, epoch=epoch, stop=max(stretch.stop for stretch in own)
        ):
            # With the tail `pad` positions past the rows repeat the epoch's head.
            reads = [
                _sample_read(stretch, at)
                for stretch in own
                for at in range(position, stretch.stop, order.epoch_size)
                if stretch.start <= at
            ]
            samples += reads or [SampleRead(epoch, position, None)]
    return samples


def _positions_of(order: Order, row: int, *, epoch: int, stop: int) -> Iterator[int]:
    """The positions of a row in an epoch: one; with a mixture one in each epoch of its source, up to `stop`."""
    if order.mixture is None:
        yield order.position_of(epoch, row)
        return
    mixture = order.mixture
    ends = np.cumsum(mixture.sizes)
    source = int(np.searchsorted(ends, row, side="right"))
    index = row - (int(ends[source]) - mixture.sizes[source])
    for epoch_of_source in itertools.count():
        # Later epochs of the source come after this one.
        if mixture.position_of(source, epoch_of_source, 0) >= stop:
            return
        place = (
            mixture.order_of(source, epoch_of_source).inverse(index) if order.shuffle else index
        )
        position = mixture.position_of(source, epoch_of_source, place)
        if position < stop:
            yield position


def _sample_read(stretch: Stretch, position: int) -> SampleRead:
    if not stretch.first_step:
        return SampleRead(stretch.epoch, position, 0)
    step, place = divmod(stretch.ahead + position - stretch.start, stretch.segment.global_batch)
    topology = stretch.segment.topology
    return SampleRead(
        stretch.epoch, position, stretch.first_step + step, place % topology.dp, topology
    )


@dataclass(frozen=True)
class Coverage:
    """How much of an epoch the run has read."""

    epoch: int
    num_rows: int
    read: int
    left_out: int
    named: list[int] | None
    """the first of the unread rows; None in an epoch that may still read them."""

    @property
    def unread(self) -> int:
        return self.num_rows - self.read - self.left_out


def coverage(stretches: Sequence[Stretch]) -> list[Coverage]:
    """Each epoch that the run has touched, in order; `prove` proves that it has read no row twice.

    Not for a mixture, whose sources have their own epochs (`turns`).
    """
    order = stretches[0].segment.order
    epochs = sorted({stretch.epoch for stretch in stretches})
    coverages, over = [], is_over(stretches)
    for epoch in epochs:
        own = [stretch for stretch in stretches if stretch.epoch == epoch]
        # Positions past the rows are repeats (`pad`) or ignored rows (`exact`).
        sizes = {True: 0, False: 0}
        for stretch in own:
            sizes[stretch.first_step > 0] += min(stretch.stop, order.num_rows) - stretch.start
        named = _unread_rows(own, epoch) if over or epoch < epochs[-1] else None
        coverages.append(Coverage(epoch, order.num_rows, sizes[True], sizes[False], named))
    return coverages


def is_over(stretches: Sequence[Stretch]) -> bool:
    """Whether the run has read all requested epochs."""
    last = stretches[-1]
    order = last.segment.order
    return order.epochs is not None and not order.steps_left(Place(last.epoch, last.stop))


def _unread_rows(stretches: Sequence[Stretch], epoch: int) -> list[int]:
    """The first rows, by position, that are in no range of an epoch."""
    order = stretches[0].segment.order
    positions: list[int] = []
    reached = 0
    for start, stop in [
        *sorted((stretch.start, stretch.stop) for stretch in stretches),
        (order.num_rows,) * 2,
    ]:
        positions += range(reached, min(start, reached + _NUM_NAMED))
        reached = max(reached, stop)
    return order.rows_at(epoch, np.array(positions[:_NUM_NAMED], np.int64)).tolist()


def turns(stretches: Sequence[Stretch]) -> list[tuple[str, int, int]]:
    """(name, rows, rows read) of each source of a mixture."""
    mixture = stretches[0].segment.order.mixture
    assert mixture is not None
    read = np.zeros(len(mixture.names), np.int64)
    for stretch in stretches:
        if stretch.first_step:
            read += mixture.read_before(stretch.stop) - mixture.read_before(stretch.start)
    return [
        (name, size, int(count))
        for name, size, count in zip(mixture.names, mixture.sizes, read, strict=True)
    ]


def coverage_lines(stretches: Sequence[Stretch]) -> Iterator[str]:
    """How much of each epoch (of each source in a mixture) was read, and what data.skip left out, as text."""
    if stretches[0].segment.mixture is not None:
        for name, size, read in turns(stretches):
            yield f"  {name}: {read:,} reads of {size:,} rows ({read / size:.2f} epochs of its own)"
    else:
        epochs = coverage(stretches)
        for epoch in epochs:
            first = stretches[0]
            begun = epoch.epoch != first.epoch or first.start == 0
            why = "they do not fill a batch at the end"
            why = why if begun else f"read before this record, or {why}"
            line = f"  epoch {epoch.epoch}: {epoch.read:,} of {epoch.num_rows:,} rows, each exactly once"
            if epoch.named is None:
                yield f"{line}; {epoch.unread:,} not yet" if epoch.unread else line
            elif epoch.unread:
                named = ", ".join(map(str, epoch.named)) + (
                    ", ..." if epoch.unread > len(epoch.named) else ""
                )
                yield f"{line}; {epoch.unread:,} not: {why} (rows {named})"
            else:
                yield line
        yield from _of_all_epochs(stretches, epochs)
    for stretch in stretches:
        if not stretch.first_step:
            rows = stretch.segment.order.rows_at(
                stretch.epoch, np.arange(stretch.start, stretch.stop)
            )
            yield (
                f"  left out by data.skip: positions {stretch.start:,} to {stretch.stop - 1:,} of epoch "
                f"{stretch.epoch} ({rows_text(rows)})"
            )


def _of_all_epochs(stretches: Sequence[Stretch], epochs: Sequence[Coverage]) -> Iterator[str]:
    """How far a run is in the requested epochs, in rows: its steps may have had several global batches."""
    last = stretches[-1]
    order = last.segment.order
    if order.epochs is None:
        return
    num_epochs = order.epochs
    read = sum(epoch.read for epoch in epochs)
    line = f"  train.epochs {num_epochs}: {read:,} of {num_epochs * order.num_rows:,} reads"
    if not is_over(stretches):
        yield f"{line}; {num_epochs * order.num_rows - last.epoch * order.num_rows - last.stop:,} rows left"
    elif read == num_epochs * order.num_rows:
        yield (
            f"{line}: every sample exactly {num_epochs} times"
            if num_epochs > 1
            else f"{line}: every sample exactly once"
        )
    else:
        yield f"{line}, no batch left"
