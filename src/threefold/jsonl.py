"""JSON lines that a run appends to, and the protocol by which others hear what it logs.

A resumed run appends; a torn last line, which a killed run left, is cut before the first append. Floats are written so
that they read back to the same value.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

Metrics = dict[str, Any]


class Tracker(Protocol):
    """Hears what a run logs, on rank 0 only."""

    def log(self, metrics: Metrics) -> None:
        """One logged step or one evaluation."""

    def close(self) -> None:
        """The run is over, whole or not."""


class MetricsFile:
    """Appends to a run's metrics.jsonl; a torn last line is cut before the first append."""

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
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end != len(content):
            file.truncate(end)


def read_metrics(path: Path) -> list[Metrics]:
    """The lines of a metrics file, without a torn last one."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
