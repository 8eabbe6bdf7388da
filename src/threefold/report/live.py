"""A run on a live page: only new data is read, and the page's parts are rebuilt when their files change."""

import math
import threading
import time
from pathlib import Path
from typing import Any

from threefold.config.paths import JOURNAL, METRICS, RUN_CONFIG
from threefold.records.files import SAMPLES
from threefold.records.logs import paths_of, process_of
from threefold.records.metrics import Metrics
from threefold.report.facts import RankPlace, RunFacts, gather
from threefold.report.markup import Html
from threefold.report.reasons import Reasons
from threefold.report.sections import Judged, judged, mesh_part, sections
from threefold.run.watch.pulse import place_of

# Seconds: files are checked no more often, gathered again after so long while the run trains, and proved again.
_LOOK_S, _GATHER_S, _PROVE_S = 0.3, 10.0, 60.0
_MOST_RANKS = 512


class LiveRun:
    """One run, for all pages that show it.

    Attributes:
        facts: as they were last gathered, with the metrics as they are.
        judged: the audit's verdict, and anomalies; None before they are known.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self._name = path, name
        self.judged: Judged | None = None
        self._lock, self._proving = threading.Lock(), threading.Lock()
        self._metrics = Metrics(path / METRICS)
        self._looked_at = self._gathered_at = self._proved_at = -math.inf
        self._proved_in = ""
        self._files: list[Any] = []
        self._processes: dict[int, int] = {}
        self._made_of: Any = None
        self._made: dict[str, Html] = {}
        self.facts = RunFacts(path, path.name)
        self.refresh()

    @property
    def version(self) -> str:
        """Another one whenever the page's charts may be."""
        return f"{self._metrics.version} {len(self.facts.events)} {self.facts.state} {id(self.judged)}"

    def refresh(self) -> None:
        """Reads new data, unless that was done a moment ago; proves in the background."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_at < _LOOK_S:
                return
            self._looked_at = now
            self._metrics.read()
            self._gather(now)
            self.facts.places = dict(self._places()) if self.facts.state == "running" else {}
        if self._is_to_be_proved():
            threading.Thread(target=self.prove, daemon=True).start()

    def _gather(self, now: float) -> None:
        """The other files again, if they have changed, or some seconds have passed while the run goes."""
        files = [_status(self.path / name) for name in (JOURNAL, SAMPLES, RUN_CONFIG)]
        goes = self.facts.state in ("running", "empty") and now - self._gathered_at > _GATHER_S
        if files == self._files and not goes:
            return
        if files != self._files:
            self._processes = {}  # a start may have made others
        self._files, self._gathered_at = files, now
        self.facts = gather(self.path, self._metrics, name=self._name)

    def parts(self) -> dict[str, Html]:
        """The sections of its page; where its ranks are is always new."""
        with self._lock:
            made_of = self._gathered_at, self._metrics.version, self.judged
            if made_of != self._made_of:
                self._made_of, self._made = made_of, sections(self.facts, self.judged)
            return self._made | (
                {"mesh": mesh_part(self.facts)} if "mesh" in self._made else {}
            )

    def _is_to_be_proved(self) -> bool:
        again = self.facts.state == "running" and time.monotonic() >= self._proved_at
        return (self.facts.state != self._proved_in or again) and not self._proving.locked()

    def prove(self) -> None:
        """Asks the audit and looks for reasons; while the run goes for a fiftieth of the time at most."""
        with self._proving:
            began = time.monotonic()
            self._proved_in = self.facts.state
            self.judged = judged(self.path)
            now = time.monotonic()
            self._proved_at = now + max(_PROVE_S, 50 * (now - began))

    def of_step(self, step: int) -> dict[str, Any] | None:
        """The rows of a step; for one newer than the last judgement, everything is searched again."""
        if self.judged is None:
            return None
        read = self.judged.reasons.of_step(step)
        if read is None and step <= int(self._metrics.last.get("step", 0)):
            self.judged = Judged(self.judged.verdict, Reasons(self.path))
            read = self.judged.reasons.of_step(step)
        return read

    def _places(self) -> list[tuple[int, RankPlace]]:
        """Where the ranks of this host are: each names its process in its log, and its place in its memory."""
        places = []
        for rank, path in list(paths_of(self.path))[:_MOST_RANKS]:
            if rank not in self._processes:
                self._processes[rank] = process_of(path)
            place = place_of(self._processes[rank], path) if self._processes[rank] else None
            if place is not None:
                places.append((rank, RankPlace(place.step, place.name)))
        return places


def _status(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
