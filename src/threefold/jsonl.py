"""JSON lines that a run appends to, and the protocol of its trackers.

A resumed run appends; a torn last line, left by a killed run, is cut before the first append. Floats read back to the
same value.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
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
    """Appends to a run's metrics.jsonl.

    Args:
        continue_on_error: a line that cannot be written, on a full disk say, is left out, and that is printed once.
        timed: each line ends with its time (UTC).
    """

    def __init__(self, path: Path, *, continue_on_error: bool = False, timed: bool = False) -> None:
        cut_torn_line(path)
        self._timed = timed
        self._file = path.open("ab", buffering=0)
        self._continue_on_error = continue_on_error
        self._said = False

    def log(self, metrics: Metrics) -> None:
        with self._attempt():
            time = {"time": utc_now()} if self._timed else {}
            line = json.dumps({**metrics, **time}).encode() + b"\n"
            start = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) != len(line):
                self._file.truncate(start)  # no torn line between whole ones
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        with self._attempt():
            os.fsync(self._file.fileno())
        self._file.close()

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._continue_on_error:
                raise
            if not self._said:
                self._said = True
                print(
                    f"{self._file.name} cannot be written ({error.strerror}): lines are missing from it",
                    file=sys.stderr,
                )


def utc_now() -> str:
    """This moment in UTC, to the millisecond, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def cut_torn_line(path: Path) -> None:
    """Removes what a killed run left after the last complete line."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
