"""What tools/ci.py is told of a pytest process: a line of JSON for each test that starts, reports or ends.

A file that grows, unlike one that is written at the end, also tells which tests a process was in that never came back.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

# As the C library and Python's faulthandler write them, to standard error and from the start of a line.
_CRASH = re.compile(
    r"^(malloc_consolidate|Fatal Python error: |Segmentation fault).*", re.MULTILINE
)


class Journal:
    """A plugin of the process that collects the reports of all workers."""

    def __init__(self, folder: Path) -> None:
        # Some stages run pytest more than once.
        self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115
            "w", buffering=1, dir=folder, prefix="tests-", suffix=".jsonl", delete=False
        )
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: str, test: str, **fields: str) -> None:
        self._file.write(json.dumps({"event": event, "test": test, **fields}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("start", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write("finish", nodeid, seconds=f"{self._seconds.pop(nodeid, 0.0):.2f}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        # A set-up or an end says nothing by passing.
        if report.when == "call" or report.outcome != "passed":
            self._write("report", report.nodeid, outcome=report.outcome, reason=_reason(report))
        # The end's report has what was printed in all of the test.
        if report.when == "teardown" and (crash := _CRASH.search(report.capstderr)):
            self._write("crash", report.nodeid, line=crash.group())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write("report", report.nodeid, outcome=report.outcome, reason=_reason(report))


# Of why a test failed this much is kept from each end: an assertion's message may be all that a program printed.
_ENDS = 300


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, or in a line why it failed; empty for one that passed."""
    place = report.longrepr
    if report.outcome == "skipped" and isinstance(place, tuple):
        return str(place[2]).removeprefix("Skipped: ")
    if report.outcome not in ("failed", "rerun"):
        return ""
    crash = getattr(place, "reprcrash", None)
    line = " | ".join((crash.message if crash else str(place)).split("\n"))
    return line if len(line) <= 2 * _ENDS else f"{line[:_ENDS]} [...] {line[-_ENDS:]}"
