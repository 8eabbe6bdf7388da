"""The curves of a run: its logged numbers as they stand after resumes and rewinds, in as few points as a page can show.

In: the lines of metrics.jsonl, in their order. Out: for each number (step, value) pairs. A line whose step is not later
than the one before it begins another pass over steps that were trained before; of these, the last pass stands, and the
others are kept as what was replaced. Thinning keeps of each bucket of steps the first and the last point, the smallest,
the largest, and a point that is not finite, so that no extreme and no gap is lost.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from threefold.report.tail import Line, Tail

# Said elsewhere, or the same in every line.
_NOT_CURVES = {"step", "epoch", "tokens", "samples", "slowest_rank", "time", "estimated_memory_bytes"}
_NOT_CURVES |= {"eval_tokens", "eval_count", "eval_pairs"}
_MOST_CURVES, _LONGEST_NAME, _MOST_STEP = 48, 100, 1 << 53
_KEPT_OF_A_BUCKET = 5
_DIGITS = 7
_MOST_SKIPPED = 200


class Points(NamedTuple):
    """Steps and values of a curve, both [points]; a value may be NaN or infinite."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


class _Series:
    """Numbers as they were logged, each with its step and the pass over the steps, from 1."""

    def __init__(self) -> None:
        self.passes, self.steps, self.values = array("q"), array("q"), array("d")

    def append(self, number: int, step: int, value: float) -> None:
        self.passes.append(number)
        self.steps.append(step)
        self.values.append(value)

    def some(self, most: int, *, begin: float = 0.0) -> dict[str, Any]:
        """Some of the points, each less `begin`; of a step that was trained again the last."""
        latest = dict(zip(self.steps, self.values, strict=True))
        steps = sorted(latest)
        chosen = np.unique(np.linspace(0, max(0, len(steps) - 1), min(most, len(steps))).astype(np.int64)).tolist()
        kept = [steps[at] for at in chosen]
        return {"x": kept, "y": [short(latest[step] - begin) for step in kept]}


@dataclass
class _Late:
    steps: int = 0
    total: float = 0.0
    most: float = 0.0
    most_at: int = 0


class Curves:
    """Everything numeric that a run has logged.

    Attributes:
        first_steps: the first logged step of each pass.
        last: the last line of a step; empty before there is one.
        late: by rank: logged steps in which it was the slowest, its shares summed, the largest and its step.
        skipped: (step, why) of the first updates that were left out.
        left_out: names beyond those that a page can show.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._series: dict[str, _Series] = {}
        self.first_steps: list[int] = []
        self.last: dict[str, Any] = {}
        self.late: dict[int, _Late] = {}
        self.skipped: list[tuple[int, str]] = []
        self.left_out: set[str] = set()
        self._times, self._tokens = _Series(), _Series()

    def __contains__(self, name: str) -> bool:
        return name in self._series

    @property
    def names(self) -> list[str]:
        return list(self._series)

    def read(self, tail: Tail) -> list[Line]:
        """Adds what is new in a file, which notes wrong lines; returns it."""
        again, lines = tail.again, tail.read()
        if tail.again != again:
            self._begin()
        for line in lines:
            if (wrong := self.add(line.values)) is not None:
                tail.wrong(line.number, wrong)
        return lines

    def add(self, line: dict[str, Any]) -> str | None:
        """Adds a line; what is wrong with it, if something is: the rest of it counts."""
        step = line.get("step")
        if type(step) is not int or not 0 <= step < _MOST_STEP:
            return f"step is {str(step)[:40]!r}"
        if "loss" in line:
            before = self.last.get("step")
            if before is None or step <= before:
                self.first_steps.append(step)
            self.last = line
            self._time(step, line.get("time"))
            if isinstance(tokens := line.get("tokens"), int) and 0 <= tokens < _MOST_STEP:
                self._tokens.append(0, step, tokens)
            self._lag(step, line)
        if "skipped" in line and len(self.skipped) < _MOST_SKIPPED:
            self.skipped.append((step, str(line["skipped"])))
        wrong = None
        for name, value in line.items():
            if name in _NOT_CURVES or isinstance(value, bool | str) or value is None:
                wrong = f"{name} is {str(value)[:40]!r}" if name in ("loss", "grad_norm", "eval_loss") else wrong
            elif isinstance(value, int | float):
                self._append(name, step, value)
        return wrong

    def _append(self, name: str, step: int, value: float) -> None:
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= _MOST_CURVES or len(name) > _LONGEST_NAME:
                if len(self.left_out) < _MOST_CURVES:
                    self.left_out.add(name[:_LONGEST_NAME])
                return
            series = self._series[name] = _Series()
        try:
            series.append(len(self.first_steps), step, float(value))
        except OverflowError:
            series.append(len(self.first_steps), step, math.inf)

    def _time(self, step: int, text: Any) -> None:
        if (at := seconds_of(text)) is not None:
            self._times.append(0, step, at)

    def elapsed(self, text: Any) -> float | None:
        """A time of a line as seconds since the first one."""
        at = seconds_of(text)
        return round(at - self.times[0], 3) if at is not None and self.times else None

    @property
    def times(self) -> array[float]:
        """When each step was logged, in seconds, in the order of the lines."""
        return self._times.values

    def _lag(self, step: int, line: dict[str, Any]) -> None:
        rank, share = line.get("slowest_rank"), line.get("slowest_share")
        if type(rank) is not int or not isinstance(share, int | float) or not math.isfinite(share):
            return
        late = self.late.setdefault(rank, _Late())
        late.steps, late.total = late.steps + 1, late.total + share
        if share > late.most:
            late.most, late.most_at = float(share), step

    def _split(self, name: str) -> tuple[Points, list[Points]]:
        """What stands of a curve, and what was replaced of each earlier pass."""
        series = self._series[name]
        steps, values = np.array(series.steps, np.int64), np.array(series.values, np.float64)
        passes = np.array(series.passes, np.int64)
        # A pass stands before the first step of every later one.
        limits, limit = np.empty(len(self.first_steps) + 1, np.int64), _MOST_STEP
        for number in range(len(self.first_steps), -1, -1):
            limits[number] = limit
            limit = min(limit, self.first_steps[number - 1] if number else limit)
        stands = steps < limits[passes]
        old = [
            Points(steps[one], values[one]) for each in np.unique(passes) if (one := ~stands & (passes == each)).any()
        ]
        order = np.argsort(steps[stands], kind="stable")
        return Points(steps[stands][order], values[stands][order]), old

    def points(self, name: str) -> Points:
        """What stands of a curve, by step."""
        return self._split(name)[0]

    def summary(self, name: str) -> dict[str, Any]:
        """How many points stand, the first and the last, the finite smallest and largest, each (step, value)."""
        steps, values = self.points(name)
        finite = np.flatnonzero(np.isfinite(values))
        told: dict[str, Any] = {"count": len(steps), "not_finite": len(steps) - len(finite)}
        if len(steps):
            told |= {"first": _pair(steps, values, 0), "last": _pair(steps, values, len(steps) - 1)}
        if len(finite):
            low, high = finite[np.argmin(values[finite])], finite[np.argmax(values[finite])]
            told |= {"smallest": _pair(steps, values, low), "largest": _pair(steps, values, high)}
        return told

    def to_values(self, name: str, *, most: int, inside: range | None = None) -> dict[str, Any]:
        """A curve for JSON in about `most` points.

        `x` and `y` (null: not finite), the replaced ones as `old`; if there are more points, the `mean` of those in a
        bucket: a curve is not smoothed from its extremes. Only of the steps `inside`, if they are given.
        """
        now, old = self._split(name)
        if inside is not None:
            now, *old = (_within(points, inside) for points in (now, *old))
        room = max(20, most // 4 // max(1, len(old)))
        told = {**_plain(thinned(now, most)), "old": [_plain(thinned(each, room)) for each in old[-20:]]}
        return {**told, "mean": _plain(means(now, most))} if len(now.steps) > most else told

    def clock(self, *, most: int) -> dict[str, Any]:
        """Seconds since the first logged step, at some steps."""
        return self._times.some(most, begin=self.times[0] if self.times else 0.0)

    def read_tokens(self, *, most: int) -> dict[str, Any]:
        """Tokens read, at some steps."""
        return self._tokens.some(most)


def _within(points: Points, inside: range) -> Points:
    """The points of some steps, and the next one on each side, so that lines go on to the edges."""
    kept = np.flatnonzero((points.steps >= inside.start) & (points.steps < inside.stop))
    if not len(kept):
        return Points(points.steps[:0], points.values[:0])
    around = slice(max(0, int(kept[0]) - 1), int(kept[-1]) + 2)
    return Points(points.steps[around], points.values[around])


def thinned(points: Points, most: int) -> Points:
    """At most about `most` of the points, none of the extremes and gaps lost."""
    number = len(points.steps)
    if number <= most:
        return points
    kept: list[int] = []
    for begin, end in _buckets(number, most):
        values = points.values[begin:end]
        finite = np.isfinite(values)
        found = {begin, end - 1}
        if not finite.all():
            found.add(begin + int(np.argmin(finite)))
        if finite.any():
            found.add(begin + int(np.argmin(np.where(finite, values, np.inf))))
            found.add(begin + int(np.argmax(np.where(finite, values, -np.inf))))
        kept += sorted(found)
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
    edges = np.linspace(0, number, max(1, most // _KEPT_OF_A_BUCKET) + 1).astype(np.int64).tolist()
    return pairwise(edges)


def not_finite(points: Points, *, most: int = 100) -> list[tuple[int, int]]:
    """The stretches (first step, last step) of logged steps whose value is not finite."""
    return _stretches(points.steps.tolist(), np.isfinite(points.values).tolist(), most)


def _stretches(steps: Sequence[int], finite: Iterable[bool], most: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    goes_on = False
    for step, good in zip(steps, finite, strict=True):
        if not good:
            if goes_on:
                found[-1] = (found[-1][0], step)
            elif len(found) < most:
                found.append((step, step))
            else:
                break
        goes_on = not good
    return found


def _pair(steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64], at: int) -> tuple[int, float]:
    return int(steps[at]), float(values[at])


def _plain(points: Points) -> dict[str, Any]:
    values = points.values.tolist()
    return {"x": points.steps.tolist(), "y": [short(value) for value in values]}


def seconds_of(text: Any) -> float | None:
    """A time of a file in seconds; None if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def short(value: float) -> float | int | None:
    """The value in few digits; None if it is not finite, which JSON cannot say."""
    if abs(value) >= 1 << 1023:
        return None
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < _MOST_STEP else rounded
