"""A run's metrics.jsonl as it stands: what a later start superseded is left out, what is damaged is named. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
# More than any run has: a larger number is damage.
_MOST_STEPS = 1 << 53


@dataclass
class LoggedSteps:
    """The lines of a run's metrics that stand.

    Attributes:
        steps: of the logged training steps, by step, ascending.
        skipped: the reason of each step without an update, by step.
        damaged: what could not be read, in words, with its line.
        torn: the same of a last line that is not whole, as a run that was killed, or is writing, leaves it.
    """

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)

    def add(self, line: Any) -> str | None:
        """Takes the next line; returns what is wrong with it, if it is left out."""
        step = line.get("step") if isinstance(line, dict) else None
        if type(step) is not int or not 0 <= step < _MOST_STEPS:
            return "has no step"
        if "loss" in line and self.steps and step <= next(reversed(self.steps)):
            # The run was rewound: what it had logged from here on was trained again, or not at all.
            self.steps = {earlier: kept for earlier, kept in self.steps.items() if earlier < step}
            self.skipped = {earlier: kept for earlier, kept in self.skipped.items() if earlier < step}
        if "skipped" in line:
            self.skipped[step] = str(line["skipped"])
        elif "loss" in line:
            self.steps[step] = line
        return None


def read(run: Path) -> LoggedSteps:
    """The logged steps of the run in this folder; none where it has no file."""
    logged, path = LoggedSteps(), run / FILE
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError:
        return logged
    if last:
        logged.torn.append(f"{path}, line {len(lines) + 1}: is not whole, and is left out")
    for number, line in enumerate(lines, start=1):
        if line.strip() and (wrong := _take(line, logged)):
            logged.damaged.append(f"{path}, line {number}: {wrong}, and is left out")
    return logged


def _take(line: bytes, logged: LoggedSteps) -> str | None:
    try:
        return logged.add(json.loads(line))
    except (ValueError, RecursionError):
        return "is not what a run writes"
