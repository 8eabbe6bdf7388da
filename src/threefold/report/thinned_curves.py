"""The curves of a run, in as few points as a page can show.

In: the numbers of its metrics as they are. Out: for each, (step, value) pairs. Thinning keeps of each bucket of steps
the first and the last point, the smallest, the largest, and a point that is not finite, so that no extreme and no gap
is lost.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from threefold.jsonl import Values
from threefold.records.metrics import Metrics, Points

# Shown elsewhere, or the same in every line.
_NOT_CURVES = {
    "epoch",
    "tokens",
    "samples",
    "slowest_rank",
    "lagging_rank",
    "estimated_memory_bytes",
    "eval_tokens",
    "eval_count",
    "eval_pairs",
}
_MOST_CURVES, _MOST_STEP = 48, 1 << 53
_KEPT_OF_A_BUCKET = 5
_MOST_REPLACED = 20
# Between the loss of a step as it was logged and as its rows give it: float32 sums in another order.
_SAME_LOSS = 1e-3
_MOST_HOLES = 100
_DIGITS = 7


def curve_names(metrics: Metrics) -> list[str]:
    """The numbers of a run that have a curve."""
    return [name for name in metrics.names if name not in _NOT_CURVES][:_MOST_CURVES]


def left_out(metrics: Metrics) -> set[str]:
    """The numbers for which there is no room."""
    shown = {*curve_names(metrics), *_NOT_CURVES}
    return metrics.left_out | {name for name in metrics.names if name not in shown}


def summary(points: Points) -> Values:
    """How many points there are, the first and the last, the finite smallest and largest, each (step, value)."""
    steps, values = points
    finite = np.flatnonzero(np.isfinite(values))
    stats: dict[str, Any] = {"count": len(steps), "not_finite": len(steps) - len(finite)}
    if len(steps):
        stats |= {"first": _pair(points, 0), "last": _pair(points, len(steps) - 1)}
    if len(finite):
        low = finite[np.argmin(values[finite])]
        high = finite[np.argmax(values[finite])]
        stats |= {"smallest": _pair(points, low), "largest": _pair(points, high)}
    return stats


def drawn(now: Points, replaced: Mapping[int, Points], *, most: int) -> Values:
    """A curve for JSON in about `most` points.

    `x` and `y` (null: not finite), the replaced ones as `old`, each with the number of its pass; if there are more
    points, the `mean` of those in a bucket: a curve is not smoothed from its extremes.
    """
    curve = _plain(thinned(now, most))
    room = max(20, most // 4 // max(1, len(replaced)))
    curve["old"] = [
        {"pass": number, **_plain(thinned(points, room))}
        for number, points in list(replaced.items())[-_MOST_REPLACED:]
    ]  # fmt: skip
    if len(now.steps) > most:
        curve["mean"] = _plain(means(now, most))
    return curve


def with_rows(logged: Points, of_rows: Points) -> Points:
    """The loss of every step: as it was logged, and of the steps between from the losses of their rows.

    A loss of which rows know only a part (that of routers, say, is no row's) stays as it was logged.
    """
    # Places in both of the steps that both have.
    _, at, at_rows = np.intersect1d(logged.steps, of_rows.steps, return_indices=True)
    if not len(at):
        return logged
    agree = np.allclose(
        logged.values[at],
        of_rows.values[at_rows],
        rtol=_SAME_LOSS,
        atol=_SAME_LOSS,
        equal_nan=True,
    )
    if not agree:
        return logged
    between = ~np.isin(of_rows.steps, logged.steps)
    steps = np.concatenate((logged.steps, of_rows.steps[between]))
    values = np.concatenate((logged.values, of_rows.values[between]))
    order = np.argsort(steps, kind="stable")
    return Points(steps[order], values[order])


def clocks(
    metrics: Metrics, starts: Sequence[tuple[int, float]], *, most: int
) -> Sequence[Values]:
    """For each pass over the steps its number, its `first` step, and seconds since the first logged step as a curve.

    Args:
        starts: of each start of the run the last step before it, and its time in seconds since 1970: a pass begins at
            its start, not at its first logged step.
    """
    passes = metrics.clocks()
    zero = metrics.times[0] if passes else 0.0
    described = []
    room = max(2, most // len(passes)) if passes else 0
    for number, (steps, moments) in passes.items():
        first = metrics.first_steps[number - 1]
        begin = _start_of(starts, first, moments[0]) if number > 1 else None
        if begin is not None:
            step, moment = begin
            first = step + 1
            steps = np.append(step, steps)
            moments = np.append(moment, moments)
        curve = _plain(some(Points(steps, moments - zero), room))
        described.append({"pass": number, "first": first, **curve})
    return described


def _start_of(
    starts: Sequence[tuple[int, float]], first: int, moment: float
) -> tuple[int, float] | None:
    """The last start before a pass whose first logged step is `first`, logged at `moment`."""
    before = [
        (step, began)
        for step, began in starts
        if step < first and began <= moment
    ]  # fmt: skip
    return max(before, key=lambda start: start[1], default=None)


def read_tokens(metrics: Metrics, *, most: int) -> Values:
    """Tokens read, at some steps."""
    return _plain(some(metrics.points("tokens"), most))


def some(points: Points, most: int) -> Points:
    """At most so many of the points, evenly, with the first and the last."""
    number = len(points.steps)
    chosen = np.unique(np.linspace(0, max(0, number - 1), min(most, number)).astype(np.int64))
    return Points(points.steps[chosen], points.values[chosen])


def thinned(points: Points, most: int) -> Points:
    """At most about `most` of the points, none of the extremes and gaps lost."""
    number = len(points.steps)
    if number <= most:
        return points
    kept: list[int] = []
    for begin, end in _buckets(number, most):
        values = points.values[begin:end]
        finite = np.isfinite(values)
        picked = {begin, end - 1}
        if not finite.all():
            picked.add(begin + int(np.argmin(finite)))
        if finite.any():
            picked.add(begin + int(np.argmin(np.where(finite, values, np.inf))))
            picked.add(begin + int(np.argmax(np.where(finite, values, -np.inf))))
        kept += sorted(picked)
    return Points(points.steps[kept], points.values[kept])


def means(points: Points, most: int) -> Points:
    """The mean of the finite values in each bucket of `thinned`, at its middle step; NaN where there is none."""
    steps, values = [], []
    for begin, end in _buckets(len(points.steps), most):
        inside = points.values[begin:end]
        finite = inside[np.isfinite(inside)]
        steps.append(int(points.steps[(begin + end) // 2]))
        values.append(float(finite.mean()) if len(finite) else math.nan)
    return Points(np.array(steps, np.int64), np.array(values))


def _buckets(number: int, most: int) -> Iterable[tuple[int, int]]:
    edges = (
        np.linspace(0, number, max(1, most // _KEPT_OF_A_BUCKET) + 1).astype(np.int64).tolist()
    )
    return pairwise(edges)


def not_finite(points: Points) -> list[tuple[int, int]]:
    """The first stretches (first step, last step) of logged steps whose value is not finite."""
    bad = np.concatenate(([False], ~np.isfinite(points.values), [False]))
    # Where it changes: [stretches, 2], the first place of each and the one after it.
    changes = np.flatnonzero(bad[1:] != bad[:-1]).reshape(-1, 2)
    return [
        (int(points.steps[begin]), int(points.steps[end - 1]))
        for begin, end in changes[:_MOST_HOLES]
    ]


def _pair(points: Points, at: int | np.int64) -> tuple[int, float]:
    return int(points.steps[at]), float(points.values[at])


def _plain(points: Points) -> dict[str, Any]:
    return {"x": points.steps.tolist(), "y": [short(value) for value in points.values.tolist()]}


def short(value: float) -> float | int | None:
    """The value in few digits; None if it is not finite, which JSON cannot say."""
    if abs(value) >= 1 << 1023:
        return None
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < _MOST_STEP else rounded
