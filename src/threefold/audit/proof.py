"""The proof afterwards: a run's record shows that every sample was read exactly once per epoch, or which were not.

In: the valid history (`record`) and, for contents, the source. Out: the coverage, or the first wrong step.
The order is recomputed from the numbers that the run recorded. The proof goes step by step over all restarts and
meshes: each step begins where the one before it ended, every dp rank's digest is that of its share of the step, and
each share's tokens are the source's (if the source is read again). A position is then read by exactly one dp rank in
exactly one step, and a position is a row: the order is a bijection.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from threefold.arrays import Int64
from threefold.audit.digest import fold_contents, predicted_samples
from threefold.audit.record import Line, Segment, SegmentLine, StepsLine
from threefold.data.order.order import Order, Place
from threefold.data.rows.concat import Rows
from threefold.errors import Problem, RunError, rows_text
from threefold.mesh.topology import Topology

_LOST_LINES = "restore the file if lines were lost; what was not recorded cannot be proved"
_ORDER_FIELDS = (
    "data",
    "num_rows",
    "seed",
    "shuffle",
    "tail",
    "order_version",
    "mixture",
    "grouped",
)


class Stretch(NamedTuple):
    """Consecutive positions of one epoch that steps have read, or that were left out (`first_step` is then 0).

    `ahead`: how many rows the first of these steps has read before, in another epoch.
    """

    epoch: int
    start: int
    stop: int
    first_step: int
    segment: SegmentLine
    ahead: int = 0


def prove(segments: Sequence[Segment], rows: Rows | None = None) -> list[Stretch]:
    """What the run has read and left out, in its order, once that is proved; with `rows`, the source, every token too.

    Raises:
        RunError: the first step at which the record and the order differ, or a step without a record.
    """
    first = segments[0].start
    next_step = first.first_step
    place = first.place
    digests = dict[str, str]()
    for segment in segments:
        start, order = segment.start, segment.start.order
        _check_same_order(first, start)
        _check_same_bytes(digests, start)
        _check_step(start.first_step, next_step)
        _check_place(start.place, place, step=next_step, order=order)
        for line in segment.lines:
            _check_step(line.step, next_step)
            _check_place(line.place, place, step=line.step, order=order)
            place = order.after(place, segment.valid_batches(line))
            if isinstance(line, StepsLine):
                _check_digests(line, start, rows)
                next_step += segment.valid_batches(line)
        if segment.last_step is not None:
            _check_step(segment.last_step + 1, next_step)
    return stretches_of(segments)


def stretches_of(segments: Sequence[Segment]) -> list[Stretch]:
    """What a run has read and left out according to its record, in its order."""
    stretches = []
    for segment in segments:
        order = segment.start.order
        for line in segment.lines:
            step = line.first if isinstance(line, StepsLine) else 0
            for (epoch, position), count, before in order.stretches(
                line.place, segment.valid_batches(line)
            ):
                steps, ahead = divmod(before, order.global_batch)
                first = step + steps if step else 0
                stop = position + count
                if order.tail == "exact":  # places past the rows are no reads
                    stop = min(stop, order.num_rows)
                stretches.append(Stretch(epoch, position, stop, first, segment.start, ahead))
    return stretches


class SavedPlace(NamedTuple):
    """A checkpoint according to its manifest: the step and place after which it was saved, and its start's checksum."""

    path: Path
    step: int
    place: Place
    link: str | None


def check_chain(lines: Sequence[Line], starts: Sequence[tuple[str, int]]) -> None:
    """Refuses a record with a start that is none of the run's `starts`, (checksum, last step done), in their order.

    And one that begins after them: rows without a record would be reported as not read yet.
    """
    numbers = {link: number for number, (link, _) in enumerate(starts, 1)}
    before = 0
    for line in lines:
        if not isinstance(line, SegmentLine):
            continue
        number = numbers.get(line.link or "", 0)
        if number <= before or starts[number - 1][1] != line.first_step - 1:
            raise RunError(
                f"the start in audit.jsonl at step {line.first_step} (segment {line.segment}) is not one of the run's "
                f"{len(starts)} starts" + (f" after start {before}" if before else ""),
                expected="a record of the starts in run.json, each of which holds the checksum of the one before",
                fix="restore the file: it belongs to another run, or to a copy of this one that has diverged",
            )
        before = number
    begins = (line.first_step for line in lines if isinstance(line, SegmentLine))
    _check_step(min(begins), starts[0][1] + 1)


def check_saved(lines: Sequence[Line], saved: Iterable[SavedPlace]) -> None:
    """Refuses a checkpoint whose step its start has no record of, or which ended elsewhere (RunError).

    A checkpoint of steps that were read again later stays until it is pruned, so any reading by its start counts.
    """
    first_step = lines[0].first_step if isinstance(lines[0], SegmentLine) else 1
    for path, step, place, link in saved:
        readings = _places_after(lines, step, link)
        if step < first_step or any(
            order.begin(place) == order.begin(reading) for order, reading in readings
        ):
            continue
        if not readings:
            raise RunError(
                f"step {step} has no record, but {path} was saved after it",
                expected="every saved step in audit.jsonl",
                fix=_LOST_LINES,
            )
        raise RunError(
            f"{path} was saved at position {place.position} of epoch {place.epoch}, but by audit.jsonl step "
            f"{step} ended at position {readings[-1][1].position} of epoch {readings[-1][1].epoch}",
            expected="one position after each step",
            fix="restore the file that was changed",
        )


def check_logged(segments: Sequence[Segment], logged: int) -> None:
    """Refuses a record that ends before the last audit that must have followed, given the last step `logged`.

    A run that was killed has logged steps after its last audit, but fewer than there are between two.
    """
    start = segments[-1].start
    recorded = max((line.last for segment in segments for line in segment.steps), default=0)
    due = (logged - 1) // start.every * start.every if start.every else 0
    if due > max(recorded, start.first_step - 1):
        raise RunError(
            f"the record ends with step {recorded}, but metrics.jsonl has step {logged} of the same start",
            expected=f"an audit at least every {start.every} steps: one up to step {due} was lost",
            fix=_LOST_LINES,
        )


def _places_after(
    lines: Sequence[Line], step: int, link: str | None
) -> list[tuple[Order, Place]]:
    places: list[tuple[Order, Place]] = []
    for line in lines:
        if isinstance(line, SegmentLine):
            order, by = line.order, line.link
        elif isinstance(line, StepsLine) and by == link and line.first <= step <= line.last:
            places.append((order, order.after(line.place, step - line.first + 1)))
    return places


def _check_same_order(first: SegmentLine, start: SegmentLine) -> None:
    for name in (*_ORDER_FIELDS, *(("global_batch",) if first.grouped is not None else ())):
        then = getattr(first, name)
        now = getattr(start, name)
        if then != now:
            raise RunError(
                f"step {start.first_step} continues in another order: {name} = {now}, before it {then}",
                expected="one order from the first step on; otherwise samples are repeated and others never read",
                fix="resume from a checkpoint before that step, with the data and the seed of the run",
            )


def _check_same_bytes(digests: dict[str, str], start: SegmentLine) -> None:
    for name, digest in start.digests.items():
        if digests.setdefault(name, digest) != digest:
            raise RunError(
                f"step {start.first_step} continues with other bytes: the blocks of {name} have the digest {digest}, "
                f"before it {digests[name]}",
                expected="one store from the first step on",
                fix="resume from a checkpoint before that step, with the data that the run began with",
            )


def _check_step(step: int, expected: int) -> None:
    if step > expected:
        text = (
            f"step {expected} has"
            if step == expected + 1
            else f"steps {expected} to {step - 1} have"
        )
        raise RunError(
            f"{text} no record",
            expected="every step in audit.jsonl, as a run writes it with audit.every > 0",
            fix=_LOST_LINES,
        )
    if step < expected:
        raise RunError(
            f"step {step} is recorded twice within one start of the run",
            expected="each step once, or a start of kind segment before it is recorded again",
            fix="restore the file; a line was copied, or a segment's line was lost",
        )


def _check_place(place: Place, expected: Place, *, step: int, order: Order) -> None:
    place = order.begin(place)
    expected = order.begin(expected)
    if place == expected:
        return
    if place > expected:
        lost = f"{rows_text(order.rows(expected, 1)[0])} and all up to there were left out"
    else:
        lost = f"{rows_text(order.rows(place, 1)[0])} were read again"
    raise RunError(
        f"step {step} begins at position {place.position} of epoch {place.epoch}, but the steps before it ended at "
        f"position {expected.position} of epoch {expected.epoch}: {lost}",
        expected="each step to begin where the one before it ended",
        fix=f"resume from a checkpoint before step {step}; if the file was changed by hand, restore it",
    )


def _check_digests(line: StepsLine, start: SegmentLine, rows: Rows | None) -> None:
    dp = start.topology.dp
    steps = (
        f"step {line.first}"
        if line.first == line.last
        else f"steps {line.first} to {line.last}"
    )
    RunError.raise_for(
        Problem(
            f"{steps}: the run itself found: {fault}",
            "a run that reads what its order says",
            f"resume from a checkpoint before step {line.first}: the last reading of a step counts",
        )
        for fault in line.faults
    )
    indices = start.order.rows(line.place, line.last - line.first + 1)
    predicted = predicted_samples(indices, first_step=line.first, dp_size=dp)
    for dp_rank in range(max(dp, len(line.samples))):
        recorded = line.samples[dp_rank] if dp_rank < len(line.samples) else None
        if dp_rank >= dp or recorded != predicted[dp_rank]:
            raise _other_samples(
                steps, dp_rank, start.topology, indices[:, dp_rank::dp].ravel()
            )
        if (
            rows is not None
            and contents_of(rows, indices[:, dp_rank::dp], start.tensors)
            != line.contents[dp_rank]
        ):
            raise RunError(
                f"{steps}: the tokens that dp rank {dp_rank} read are not those that the source has now",
                expected=f"the tokens of {rows_text(indices[:, dp_rank::dp].ravel())}, as the source has them",
                fix="compare the source with a copy of it; if it was changed on purpose, prepare it in a new folder",
            )


def _other_samples(steps: str, dp_rank: int, topology: Topology, rows: Int64) -> RunError:
    return RunError(
        f"{steps}: dp rank {dp_rank} did not read its samples, according to its digest",
        expected=f"dp rank {dp_rank} of {topology} to read {rows_text(rows)}"
        if dp_rank < topology.dp
        else f"one digest for each of {topology.dp} dp ranks",
        fix=f"resume from a checkpoint before {steps}; if the file was changed by hand, restore it",
    )


def contents_of(rows: Rows, indices: Int64, tensors: Sequence[str]) -> int:
    """The `contents` digest, made of some tensors, of one dp rank's steps, whose row indices are [num_steps, rows]."""
    digest, none = 0, np.empty(0, np.int64)
    for step in indices:
        read = step[step >= 0]
        batch = rows.rows(read) if len(read) else dict.fromkeys(tensors, none)
        digest = fold_contents(digest, *(batch[name] for name in tensors))
    return digest
