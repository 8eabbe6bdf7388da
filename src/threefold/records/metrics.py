"""A run's metrics.jsonl: every logged number that is valid after resumes and rewinds. No torch.

A line whose step is not later than the one before it begins another pass over steps that were trained before. Of these
steps the last pass counts, and the others are kept as replaced. The problem of a line is noted; the rest of it counts.
"""

from __future__ import annotations

import math
from array import array
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from threefold.arrays import Float64, Int64
from threefold.jsonl import Damage, Lines

# More than any run has: a larger number is damage.
_MOST_STEP = 1 << 53
_MOST_NAMES, _LONGEST_NAME, _MOST_SKIPPED = 56, 100, 10_000
# Numbers without which a line of a step, or of an evaluation, is damaged.
_NEEDED = ("loss", "grad_norm", "eval_loss")


class Points(NamedTuple):
    """Steps and values of a number, both [points]; a value may be NaN or infinite."""

    steps: Int64
    values: Float64

    def finite(self) -> Points:
        """Those whose value is finite."""
        kept = np.isfinite(self.values)
        return Points(self.steps[kept], self.values[kept])


class _Series:
    """Numbers in the order of their lines, each with its step and the pass over the steps, from 1."""

    def __init__(self) -> None:
        self.passes = array("q")
        self.steps = array("q")
        self.values = array("d")

    def append(self, number: int, step: int, value: float) -> None:
        self.passes.append(number)
        self.steps.append(step)
        self.values.append(value)


class Metrics:
    """Everything numeric that a run has logged, read up to now; `read` reads new lines.

    Attributes:
        first_steps: the first logged step of each pass.
        last: the last line of a step; empty before there is one.
        left_out: names beyond those that are kept.
    """

    def __init__(self, path: Path) -> None:
        self.lines = Lines(path)
        self._begin()
        self.read()

    def _begin(self) -> None:
        self._series: dict[str, _Series] = {}
        self._skipped: list[tuple[int, int, str]] = []
        self._stands: dict[str, tuple[Points, dict[int, Points]]] = {}
        self.first_steps: list[int] = []
        self.last: dict[str, Any] = {}
        self.left_out: set[str] = set()
        self._clock = _Series()

    def __contains__(self, name: str) -> bool:
        return name in self._series

    @property
    def times(self) -> array[float]:
        """When each step was logged, in seconds since 1970, in the order of the lines."""
        return self._clock.values

    @property
    def names(self) -> list[str]:
        return list(self._series)

    @property
    def version(self) -> tuple[int, int]:
        """Another one whenever something new was read."""
        return self.lines.again, sum(
            len(series.steps) for series in self._series.values()
        ) + len(self._skipped)

    @property
    def damaged(self) -> list[Damage]:
        """Lines that a run does not write so; also a last one that is torn."""
        name, number = self.lines.path.name, self.lines.torn
        torn = [Damage(name, number, "it is incomplete")] if number else []
        return sorted([*self.lines.damaged, *torn], key=lambda damage: damage.line)

    def read(self) -> None:
        """Adds the new lines of the file."""
        again, lines = self.lines.again, self.lines.read()
        if self.lines.again != again:
            self._begin()
        for line in lines:
            if (wrong := self.add(line.values)) is not None:
                self.lines.wrong(line.number, wrong)
        if lines:
            self._stands = {}

    def add(self, line: dict[str, Any]) -> str | None:
        """Adds a line; returns its problem, if any: the rest of it counts."""
        step = line.get("step")
        if type(step) is not int or not 0 <= step < _MOST_STEP:
            return f"step is {str(step)[:40]!r}"
        before = self.last.get("step")
        if "loss" in line:
            # Only such lines: that an update was left out is logged a step late on an accelerator.
            if before is None or step <= before:
                self.first_steps.append(step)
            self.last = line
            if (moment := seconds_of(line.get("time"))) is not None:
                self._clock.append(len(self.first_steps), step, moment)
        if "skipped" in line and len(self._skipped) < _MOST_SKIPPED:
            self._skipped.append((len(self.first_steps), step, str(line["skipped"])))
        wrong = None
        for name, value in line.items():
            if (number := _number(value)) is not None:
                if name != "step":
                    self._append(name, step, number)
            elif name in _NEEDED:
                wrong = f"{name} is {str(value)[:40]!r}"
        return wrong

    def _append(self, name: str, step: int, value: float) -> None:
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= _MOST_NAMES or len(name) > _LONGEST_NAME:
                if len(self.left_out) < _MOST_NAMES:
                    self.left_out.add(name[:_LONGEST_NAME])
                return
            series = self._series[name] = _Series()
        series.append(len(self.first_steps), step, value)

    def points(self, name: str) -> Points:
        """The valid values of a number, by step; of a step with several values the last."""
        return self._split(name)[0]

    def replaced(self, name: str) -> dict[int, Points]:
        """The replaced values of earlier passes, by the number of the pass (from 1)."""
        return self._split(name)[1]

    def number(self, step: int, name: str) -> float | None:
        """A number of a step; None if it is missing, or not finite."""
        steps, values = self.points(name)
        at = int(np.searchsorted(steps, step, side="right")) - 1
        present = at >= 0 and steps[at] == step and np.isfinite(values[at])
        return float(values[at]) if present else None

    @property
    def steps(self) -> list[int]:
        """The logged steps that are valid, ascending."""
        return self.points("loss").steps.tolist()

    @property
    def skipped(self) -> dict[int, str]:
        """Why a step made no update, by step, of the valid steps."""
        limits = self._limits()
        return {step: why for number, step, why in self._skipped if step < limits[number]}

    def clocks(self) -> dict[int, Points]:
        """When each step was logged, in seconds since 1970, by the number of the pass (from 1)."""
        passes = np.array(self._clock.passes, np.int64)
        logged = Points(
            np.array(self._clock.steps, np.int64), np.array(self._clock.values, np.float64)
        )
        return {
            int(number): Points(logged.steps[passes == number], logged.values[passes == number])
            for number in np.unique(passes)
        }

    def _limits(self) -> Int64:
        """One past the last valid step of each pass: the first step of any later one."""
        firsts = np.array([_MOST_STEP, *self.first_steps, _MOST_STEP], np.int64)
        return np.minimum.accumulate(firsts[::-1])[::-1][1:]

    def _split(self, name: str) -> tuple[Points, dict[int, Points]]:
        if name not in self._stands:
            series = self._series.get(name) or _Series()
            steps = np.array(series.steps, np.int64)
            values = np.array(series.values, np.float64)
            passes = np.array(series.passes, np.int64)
            stands = steps < self._limits()[passes]
            gone = {
                int(number): (passes == number) & ~stands
                for number in np.unique(passes[~stands])
            }
            order = np.argsort(steps[stands], kind="stable")
            self._stands[name] = (
                Points(steps[stands][order], values[stands][order]),
                {number: Points(steps[old], values[old]) for number, old in gone.items()},
            )
        return self._stands[name]


def _number(value: Any) -> float | None:
    """A logged number, NaN for the null of what was not finite; None if it is not a number."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def seconds_of(text: Any) -> float | None:
    """A time of a file in seconds since 1970; None if it is not a time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
