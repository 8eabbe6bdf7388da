"""A trace of a few steps of this rank: RUN/profile/rank-0003.json.gz, for chrome://tracing, and what it shows.

Every rank traces the same steps; what the trace costs and the time to write it are part of the run's time, but not of
the steps in the trace.
"""

from __future__ import annotations

import gzip
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from threefold.config.paths import PROFILE_FOLDER
from threefold.training.progress import Progress
from threefold.training.trace_summary import PHASE, summary_of


class Profiled(Progress):
    """Progress that traces the steps [first, last] while the loop reports its place."""

    def __init__(self, folder: Path, rank: int, steps: tuple[int, int]) -> None:
        super().__init__()
        self._to = folder / PROFILE_FOLDER / f"rank-{rank:04}"
        self._first, self._last = steps
        self._profiler: Any = None
        self._phase = ExitStack()

    def enter(self, phase: str, *, step: int | None = None) -> None:
        super().enter(phase, step=step)
        if step is not None and self._profiler is None and self._first <= step <= self._last:
            self._start()
        elif step is not None and step > self._last:
            self.close()
        if self._profiler is not None:
            self._mark(phase)

    def close(self) -> None:
        """Writes the trace and its summary, if one is being made."""
        if self._profiler is None:
            return
        self._mark(None)
        profiler, self._profiler = self._profiler, None
        profiler.__exit__(None, None, None)
        self._to.parent.mkdir(exist_ok=True)
        trace = self._to.with_suffix(".json.gz")
        profiler.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        self._to.with_suffix(".summary.json").write_text(
            json.dumps(asdict(summary_of(events))), encoding="utf-8"
        )

    def _start(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds)
        self._profiler.__enter__()

    def _mark(self, phase: str | None) -> None:
        self._phase.close()
        if phase is not None:
            self._phase.enter_context(torch.profiler.record_function(f"{PHASE}{phase}"))
