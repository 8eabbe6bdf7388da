"""Anomalies in a run, each with the facts that show it: the most telling first.

    spike        a step whose loss, or gradient norm, is far above those before it
    not finite   a step whose loss or gradient was not a number
    row          a row whose loss is an outlier among comparable rows
    drift        a source of a mixture whose loss rises again while the others fall
    slow         a rank that the others waited for, or steps that waited for data
    changed      keys that a later start has changed
    ended        the last start ended by an error, or was killed

Each kind has a threshold; anything below it is noise.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from threefold.arrays import Float64, Int64
from threefold.errors import ConfigError
from threefold.jsonl import Values
from threefold.records.state import ended_text
from threefold.why.batch_rows import BatchRow, StepBatches
from threefold.why.lookback import Lookback
from threefold.why.scores import rises, scores_of_rows, scores_of_steps

# In robust standard deviations: of steps, of logarithms of norms, of rows. Those that are named in a step anyway.
SPIKE, NORM, ROW, NAMED = 6.0, 6.0, 10.0, 4.0
# Least rise of a loss as a share of it, and factor of a norm: smaller ones are no news. A norm that is several times as
# large for one step is common in healthy runs; without a rise of the loss it is reported if it is far more than that.
_LEAST_RISE, _LEAST_FACTOR, _ALONE = 0.02, 3.0, 10.0
# Steps after which a change is no longer reported as preceding a spike.
_BEFORE = 20
# Rows that are named of a step, and findings of rows at most.
_NAMED_ROWS, _MOST_ROWS = 5, 100
# Share of a step that waits for data; lines that say it.
_WAITS, _FEWEST = 0.2, 5
# A slow step: this many times as long as usual, and its excess this share of all steps' time.
_LONG, _LOST = 3.0, 0.05


@dataclass
class Anomaly:
    """An anomaly.

    Attributes:
        kind: one of those above.
        steps: where, ascending; [] if it is the whole run.
        score: how telling it is, comparable between kinds.
        what: one line about it.
        facts: the evidence.
        rows: of its step, the most telling first.
    """

    kind: str
    steps: list[int]
    score: float
    what: str
    facts: list[str] = field(default_factory=list)
    rows: list[BatchRow] = field(default_factory=list)

    def to_values(self) -> Values:
        """Plain values, ready for JSON."""
        values = {
            "kind": self.kind,
            "steps": self.steps,
            "score": self.score if np.isfinite(self.score) else str(self.score),
            "what": self.what,
            "facts": self.facts,
        }
        return {**values, "rows": [row.to_values() for row in self.rows]}


def findings(batches: StepBatches, *, step: int | None = None) -> list[Anomaly]:
    """The anomalies of a run, the most telling first; with a step, only those that concern it."""
    run = batches.run
    anomalies = [*_not_finite(batches), *_spikes(batches), *_norms(batches)]
    reported = {(row.step, row.place) for finding in anomalies for row in finding.rows}
    anomalies += _far_rows(batches, reported)
    anomalies += [
        *_drifts(run),
        *_late_ranks(run),
        *_waits(run),
        *_long_steps(run),
        *_changes(run),
    ]
    if (ending := run.ending) is not None:
        anomalies.append(
            Anomaly(
                "ended",
                [ending.step] * bool(ending.step),
                np.inf,
                ended_text(ending),
                ending.error.splitlines(),
            )
        )
    if step is not None:
        anomalies = [each for each in anomalies if step in each.steps]
    return sorted(anomalies, key=lambda each: -each.score)


def telling(rows: list[BatchRow]) -> list[BatchRow]:
    """Rows by how far they are from comparable ones, those that are not finite first.

    Below counts half: a row that is easy has done less to a step than one that is hard.
    """

    def strangeness(row: BatchRow) -> float:
        if row.loss is not None and np.isnan(row.loss):
            return float(np.inf)
        return max(row.score, -row.score / 2)

    return sorted(rows, key=strangeness, reverse=True)


def _rows_at(batches: StepBatches, step: int) -> list[BatchRow]:
    try:
        rows = telling(batches.rows_of(step))
    except ConfigError:
        return []
    far = [
        row
        for row in rows
        if abs(row.score) >= NAMED or (row.loss is not None and np.isnan(row.loss))
    ]
    return far[:_NAMED_ROWS]


def row_text(row: BatchRow) -> str:
    """A row and its loss in one line."""
    name = row_name(row)
    if row.loss is None:
        return (
            f"{name}: its loss was not kept"
            if not row.targets
            else f"{name}: {row.targets} targets"
        )
    if np.isnan(row.loss):
        return f"{name}: its loss is not finite, over {row.targets:,} targets"
    like = "" if row.like is None else f", others {row.like:.4f} ({row.score:+.1f} deviations)"
    return f"{name}: loss {row.loss:.4f}{like}, over {row.targets:,} targets"


def row_name(row: BatchRow) -> str:
    name = f"row {row.row}" if row.row is not None else f"the row at place {row.place}"
    return name + (f" of {row.source}" if row.source != "source" else "")


def _losses(run: Lookback) -> tuple[Int64, Float64]:
    """The loss of each step by its rows; by the logged steps, where none were kept."""
    return run.table.losses() if run.table.whole.any() else run.series("loss")


def _spikes(batches: StepBatches) -> Iterator[Anomaly]:
    run = batches.run
    steps, losses = _losses(run)
    scores, risen = scores_of_steps(losses), rises(losses)
    high = np.flatnonzero((scores >= SPIKE) & (risen >= _LEAST_RISE * np.abs(losses)))
    for group in _groups(high.tolist()):
        peak, first = max(group, key=lambda each: float(scores[each])), int(steps[group[0]])
        step = int(steps[peak])
        what = f"the loss rose to {losses[peak]:.4f}, {risen[peak]:.4f} above the steps before"
        facts = [f"{scores[peak]:.1f} deviations above the median of the 7 steps before it"]
        if len(group) > 1:
            facts.append(
                f"high from step {first} to {int(steps[group[-1]])}, highest in step {step}"
            )
        facts += _who(batches, step, float(risen[peak]), _rows_at(batches, step))
        rows = telling([row for each in group for row in _rows_at(batches, int(steps[each]))])
        facts += _before(run, first)
        yield Anomaly(
            "spike",
            [int(steps[each]) for each in group],
            float(scores[peak]),
            what,
            facts,
            rows,
        )


def _who(batches: StepBatches, step: int, risen: float, rows: list[BatchRow]) -> Iterator[str]:
    """Which rows made the rise of a step's loss, or that all did."""
    try:
        every = [
            row
            for row in batches.rows_of(step)
            if row.loss is not None and row.like is not None
        ]
    except ConfigError:
        return
    total = sum(row.targets for row in every)
    high = [row for row in rows if row.score > 0]
    share = sum(row.targets * ((row.loss or 0.0) - (row.like or 0.0)) for row in high) / max(
        total, 1
    )
    if high and share > 0.3 * risen:
        names = ", ".join(str(row.row if row.row is not None else row.place) for row in high)
        yield f"{min(1.0, share / risen):.0%} of the rise comes from {'rows' if len(high) > 1 else 'row'} {names}"
    elif every:
        yield "no single row caused it: all rows rose, so look at the model: its learning rate, and the steps before"


def _before(run: Lookback, step: int) -> Iterator[str]:
    """What came shortly before a step: starts, changed keys, a norm that was high."""
    for event in run.events:
        at = event.get("step")
        if (
            event.get("event") == "start"
            and isinstance(at, int)
            and at
            and 0 <= step - at - 1 <= _BEFORE
        ):
            changed = _changed_text(event)
            yield f"the run was resumed after step {at}" + (
                f", with {changed}" if changed else ""
            )
    steps, norms, scores, risen = _norms_of(run)
    high = (scores >= NORM) & (risen >= np.log(_LEAST_FACTOR))
    for each in np.flatnonzero((steps < step) & (steps >= step - 3) & high).tolist():
        yield f"step {int(steps[each])} had a gradient norm of {norms[each]:.3g}: the update after it was unusual"


def _norms_of(run: Lookback) -> tuple[Int64, Float64, Float64, Float64]:
    """(steps, their gradient norms, how far each is above those before, by how much the logarithms rose)."""
    steps, norms = run.series("grad_norm")
    logs = np.log(np.maximum(norms, 1e-30))
    return steps, norms, scores_of_steps(logs, floor=0.0), rises(logs)


def _norms(batches: StepBatches) -> Iterator[Anomaly]:
    run = batches.run
    steps, norms, scores, risen = _norms_of(run)
    steps_of_loss, losses = _losses(run)
    spikes = set(steps_of_loss[scores_of_steps(losses) >= SPIKE].tolist())
    for group in _groups(
        np.flatnonzero((scores >= _ALONE) & (risen >= np.log(_ALONE))).tolist()
    ):
        peak = max(group, key=lambda each: float(scores[each]))
        step = int(steps[peak])
        if step in spikes:
            continue  # reported with its loss
        what = f"the gradient norm rose to {norms[peak]:.3g}, {np.exp(risen[peak]):.1f} times that of the steps before"
        facts = [
            f"{scores[peak]:.1f} deviations above the median of the 7 logged steps before it"
        ]
        rows = _rows_at(batches, step)
        facts += _before(run, step)
        yield Anomaly(
            "spike",
            [int(steps[each]) for each in group],
            float(scores[peak]),
            what,
            facts,
            rows,
        )


def _groups(places: list[int]) -> list[list[int]]:
    """Places that follow one another."""
    groups: list[list[int]] = []
    for place in places:
        if groups and place == groups[-1][-1] + 1:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _not_finite(batches: StepBatches) -> Iterator[Anomaly]:
    run = batches.run
    wrong = {step for step in run.logged if run.number(step, "loss") is None}
    wrong |= {step for step, _ in run.table.broken} | set(run.skipped)
    for step in sorted(wrong):
        rows = [
            row
            for row in _rows_at(batches, step)
            if row.loss is not None and np.isnan(row.loss)
        ]
        facts = [run.skipped[step]] if step in run.skipped else []
        if not rows and not facts:
            facts.append(
                "no row's recorded loss is non-finite: the gradient, or another row, was"
            )
        yield Anomaly(
            "not finite", [step], np.inf, "the loss or the gradient was not finite", facts, rows
        )


def _far_rows(batches: StepBatches, reported: set[tuple[int, int]]) -> Iterator[Anomaly]:
    """Rows whose loss is far from that of comparable rows, without those of `reported`, (step, place)."""
    table = batches.run.table
    if not table.means.size:
        return
    scores, _ = scores_of_rows(table.means, table.counts, table.sources)
    far = np.argwhere(np.abs(scores) >= ROW)
    far = far[np.argsort(-np.abs(scores[far[:, 0], far[:, 1]]))][:_MOST_ROWS]
    read: dict[Any, list[BatchRow]] = defaultdict(list)
    for number, place in far.tolist():
        step = int(table.steps[number])
        row = next(each for each in batches.rows_of(step) if each.place == place)
        if (step, place) in reported:
            continue
        read[(step, place) if row.row is None else row.row].append(row)
    for rows in read.values():
        first = rows[0]
        way = "above" if first.score > 0 else "below"
        again = sorted(rows[1:], key=lambda row: row.step)
        facts = [f"in step {row.step} too: {row_text(row)}" for row in again]
        if first.score < 0:
            facts.append(
                batches.contents.seen(first.row) or "typical of memorised or trivial text"
            )
        yield Anomaly(
            "row",
            sorted({row.step for row in rows}),
            abs(first.score) / 2,
            f"the loss of {row_name(first)} is far {way} that of comparable rows",
            facts,
            [first],
        )


def _drifts(run: Lookback) -> Iterator[Anomaly]:
    table, (names, _) = run.table, run.sources
    parts = np.array_split(np.arange(len(table.steps)), 10)
    if len(names) < 2 or len(parts[-1]) < 2:
        return
    # Mean loss of each source in each tenth of the run, and its standard error: [sources, tenths].
    means, errors = np.full((2, len(names), 10), np.nan)
    for tenth, lines in enumerate(parts):
        for source in range(len(names)):
            own = table.means[lines][
                (table.sources[lines] == source) & (table.counts[lines] > 0)
            ]
            own = own[np.isfinite(own)]
            if len(own) >= 4:
                means[source, tenth], errors[source, tenth] = (
                    own.mean(),
                    own.std(ddof=1) / np.sqrt(len(own)),
                )
    for source, name in enumerate(names):
        if not np.isfinite(means[source]).all():
            continue
        low = int(means[source].argmin())
        risen = means[source, -1] - means[source, low]
        error = np.hypot(errors[source, -1], errors[source, low])
        others = np.delete(means, source, 0)
        fell = float(np.nanmean(others[:, -1] - others[:, low]))
        score = risen / max(error, 1e-12)
        if low < 9 and score >= ROW and risen > _LEAST_RISE * means[source, low] and fell < 0:
            first = int(table.steps[parts[low][0]])
            last = int(table.steps[-1])
            what = f"the loss of {name} rises again, from {means[source, low]:.4f} to {means[source, -1]:.4f}"
            facts = [
                f"lowest around step {first}; the other sources have changed by {fell:+.4f} since"
            ]
            facts += [f"{score:.1f} standard errors of the mean over its rows, to step {last}"]
            yield Anomaly("drift", [], float(score) / 2, what, facts)


def _changes(run: Lookback) -> Iterator[Anomaly]:
    # Of several starts from one step, the last one has made the steps that count.
    starts = {
        event["step"]: event
        for event in run.events
        if event.get("event") == "start" and isinstance(event.get("step"), int)
    }
    for step, event in starts.items():
        if changed := _changed_text(event):
            yield Anomaly(
                "changed",
                [step + 1],
                1.0,
                f"step {step + 1} began with {changed}",
                ["journal.jsonl"],
            )


def _changed_text(event: Values) -> str:
    changed = event.get("changed")
    pairs = changed.items() if isinstance(changed, dict) else ()
    return ", ".join(
        f"{key} {each[0]} -> {each[1]}"
        for key, each in pairs
        if isinstance(each, list) and len(each) == 2
    )


def _late_ranks(run: Lookback) -> Iterator[Anomaly]:
    for event in run.events:
        if (
            event["event"] == "lag"
            and isinstance(share := event.get("share"), float)
            and share > 0
        ):
            what = f"rank {event.get('rank')} was the slowest from step {event.get('since')} on"
            facts = [str(event.get("text")), "journal.jsonl"]
            yield Anomaly("slow", [], 10 * share, what, facts)


def _waits(run: Lookback) -> Iterator[Anomaly]:
    pairs = [
        (run.number(step, "data_wait_s"), run.number(step, "step_time_s"))
        for step in run.logged
    ]
    shares = [wait / time for wait, time in pairs if wait is not None and time]
    if len(shares) >= _FEWEST and (share := float(np.median(shares))) >= _WAITS:
        what = f"steps waited for data for {share:.0%} of their time"
        fact = "the median of data_wait_s / step_time_s; --data.num_workers 2 reads ahead"
        yield Anomaly("slow", [], 10 * share, what, [fact])


def _long_steps(run: Lookback) -> Iterator[Anomaly]:
    steps, times = run.series("step_time_s")
    # The first line after a start has what a start costs.
    begun = {
        event["step"]
        for event in run.events
        if event.get("event") == "start" and isinstance(event.get("step"), int)
    }
    firsts = {
        next((step for step in steps.tolist() if step > begin), -1) for begin in begun | {0}
    }
    if len(steps) < _FEWEST:
        return
    usual = float(np.median(times))
    long = [
        (float(time), int(step))
        for step, time in zip(steps, times, strict=True)
        if step not in firsts
    ]
    for time, step in sorted(long, reverse=True)[:3]:
        if time < _LONG * usual or time - usual < _LOST * times.sum():
            return
        wait = run.number(step, "data_wait_s")
        rank = run.number(step, "slowest_rank")
        facts = [f"{time / usual:.1f} times the median, {usual:.3g} s"]
        if wait is not None and wait > _WAITS * time:
            facts.append(f"{wait:.3g} s of it waiting for data")
        if rank is not None:
            share = run.number(step, "slowest_share") or 0
            facts.append(f"rank {int(rank)} was the slowest, by {share:.0%}")
        score = min(5.0, time / usual / 2)
        yield Anomaly("slow", [step], score, f"steps took {time:.3g} s", facts)
