"""The records in a run's folder, each file read when it is first needed. Read only; no torch."""

import socket
from functools import cached_property
from pathlib import Path
from typing import Any

from threefold.audit import record, row_losses
from threefold.audit.record import Segment
from threefold.audit.row_losses import RowLosses
from threefold.checkpoint.lineage import Ending, Journal
from threefold.config.paths import METRICS
from threefold.records.metrics import Metrics
from threefold.records.state import STILL_S, ending_of, last_end, state_of


class RunRecord:
    """The records of one run: lines that a later start superseded are left out, and what is damaged is named."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def metrics(self) -> Metrics:
        return Metrics(self.path / METRICS)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The lines of its journal, oldest first; before it was a run, its endings."""
        return Journal(self.path).lines() or Journal(self.path).endings()

    @property
    def ending(self) -> Ending | None:
        """How its last start ended other than by its last step or a request; `vanished`: none was left to note it."""
        if (start := last_end(self.events)).get("event") != "start":
            return ending_of(self.events)
        here = start.get("host") == socket.gethostname()
        if state_of(self.path, self.events, still_s=0 if here else STILL_S)[0] != "ended":
            return None
        step, error = self.last_logged, "no process of the run is left, and none recorded why"
        return Ending(
            "vanished",
            (),
            str(start.get("host", "")),
            0,
            "training",
            step + bool(step),
            error=error,
        )

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "start"]

    @cached_property
    def segments(self) -> list[Segment]:
        """Its valid audited history; empty without a record. RunError: audit.jsonl is damaged."""
        path = self.path / record.FILE
        return record.read(path) if path.exists() else []

    @cached_property
    def rows(self) -> RowLosses:
        """The losses of its rows."""
        return row_losses.read(self.path, self.segments)

    @property
    def last_logged(self) -> int:
        """The last step that its last start has logged; 0 if there is none."""
        started = max((str(start.get("time", "")) for start in self.starts), default="")
        last = self.metrics.last
        return int(last["step"]) if str(last.get("time", "")) > started else 0

    @property
    def damaged(self) -> list[str]:
        """The parts that could not be read, in words."""
        lines = (
            f"{self.path / file}, line {line}: {what}"
            for file, line, what in self.metrics.damaged
        )
        return [*self.rows.damaged, *(f"{line}, and is left out" for line in lines)]
