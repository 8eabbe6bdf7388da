"""JSON lines that a run appends to, and the protocol of its trackers.

A resumed run appends; a torn last line, left by a killed run, is cut before the first append. Floats read back to the
same value.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

Metrics = dict[str, Any]


class Tracker(Protocol):
    """Receives what a run logs, on rank 0 only."""

    def log(self, metrics: Metrics) -> None:
        """Receives one logged step or one evaluation."""

    def close(self) -> None:
        """Ends the tracker: the run is over, complete or not."""


class MetricsFile:
    """Appends to a run's metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Metrics) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def cut_torn_line(path: Path) -> None:
    """Removes what a killed run left after the last complete line."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def read_metrics(path: Path) -> list[Metrics]:
    """Returns the lines of a metrics file, without a torn last one."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
