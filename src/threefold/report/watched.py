"""A run that is followed while it goes: only what is new is read, and its page's parts are made again when they change.

Several readers share one; each comes back with the cursor that it was given last, and gets the lines since then. If
they cannot be appended (a rewind, a file that was replaced, too many), it gets all values again.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from threefold.report.curves import Curves, short
from threefold.report.gathered import Facts, Place, gather
from threefold.report.markup import Html
from threefold.report.opened import opened
from threefold.report.reasons import Reasons
from threefold.report.sections import Judged, judged, mesh_part, sections
from threefold.report.standing import METRICS
from threefold.report.tail import Line, Tail
from threefold.run.pulse import place_of

_AGAIN_S, _GATHERED_S, _PROVED_S = 0.3, 10.0, 60.0
_KEPT = 5000
_MOST_RANKS = 512
_PROCESS = re.compile(rb" INFO threefold: process (\d+)$", re.MULTILINE)
_BEGINNING = 1 << 16


class WatchedRun:
    """One run, for all who look at it.

    Attributes:
        facts: as they were last gathered, with the curves as they are.
        judged: what the audit says, and what stands out; None before it is known.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self._name = path, name
        self.lock = threading.RLock()
        self.judged: Judged | None = None
        self._tail, self._curves = Tail(path / METRICS), Curves()
        self._new: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._seen = self._epoch = 0
        self._read_at = self._gathered_at = self._proved_at = -math.inf
        self._proved_in = ""
        self._made_of: tuple[float, Judged | None] | None = None
        self._made: dict[str, Html] = {}
        self._signs: tuple[Any, ...] = ()
        self._processes: dict[int, int] = {}
        self.facts = Facts(path, path.name)
        self.refresh()

    @property
    def cursor(self) -> list[int]:
        """What a reader that knows all values by now has seen."""
        return [self._epoch, self._seen]

    @property
    def version(self) -> tuple[Any, ...]:
        """Another one whenever something of its page may be."""
        return (*self.cursor, self._gathered_at, self.judged, tuple(self.facts.places.items()))

    def refresh(self) -> None:
        """Reads what is new, unless that was done a moment ago."""
        with self.lock:
            now = time.monotonic()
            if now - self._read_at < _AGAIN_S:
                return
            self._read_at = now
            again, passes = self._tail.again, len(self._curves.first_steps)
            lines = self._curves.read(self._tail)
            if self._tail.again != again or (passes and len(self._curves.first_steps) > passes):
                self._epoch += 1
            for line in lines:
                self._seen += 1
                self._new.append(_short(line, self._curves))
            self._gather(now)
            self.facts.places = dict(self._places()) if self.facts.state == "running" else {}

    def _gather(self, now: float) -> None:
        """The other files again, if their times have changed or some seconds have passed while the run goes."""
        signs = tuple(_sign(self.path / name) for name in ("journal.jsonl", "samples.jsonl", "config.yaml"))
        since = now - self._gathered_at
        if since < _GATHERED_S / 5 or (signs == self._signs and not self._goes_on(since)):
            return
        changed = signs != self._signs
        self._signs, self._gathered_at = signs, now
        self.facts = gather(self.path, self._curves, name=self._name)
        self.facts.damaged[:0] = self._tail.damaged
        self.facts.num_damaged += self._tail.num_damaged
        if changed:
            self._processes = {}

    def _goes_on(self, since_s: float) -> bool:
        return since_s > _GATHERED_S and self.facts.state in ("running", "empty")

    def since(self, cursor: list[int]) -> list[dict[str, Any]] | None:
        """The lines after a reader's cursor; None: it needs all values again."""
        with self.lock:
            behind = self._seen - cursor[1]
            if cursor[0] != self._epoch or not 0 <= behind <= len(self._new):
                return None
            return list(self._new)[len(self._new) - behind :]

    def parts(self) -> dict[str, Html]:
        """The sections of its page: made again when its files were gathered again, but where its ranks are always."""
        with self.lock:
            made_of = (self._gathered_at, self.judged)
            if made_of != self._made_of:
                self._made_of, self._made = made_of, sections(self.facts, self.judged)
            return {name: mesh_part(self.facts) if name == "mesh" else each for name, each in self._made.items()}

    def prove(self) -> None:
        """Asks the audit and looks for reasons: once a state, and while it goes for a fiftieth of the time at most."""
        began = time.monotonic()
        if self.facts.state == self._proved_in and (began < self._proved_at or self.facts.state != "running"):
            return
        self._proved_in = self.facts.state
        self.judged = judged(self.path)
        now = time.monotonic()
        self._proved_at = now + max(_PROVED_S, 50 * (now - began))

    def of_step(self, step: int) -> dict[str, Any] | None:
        """What a step read; of one that is newer than what was judged, everything is looked for again."""
        found = self.judged.reasons.of_step(step) if self.judged is not None else None
        if found is None and step <= int(self._curves.last.get("step", 0)) and self.judged is not None:
            self.judged = Judged(self.judged.verdict, Reasons(self.path))
            found = self.judged.reasons.of_step(step)
        return found

    def _places(self) -> list[tuple[int, Place]]:
        """Where the ranks of this host are: each has told its process in its log, and its place in its memory."""
        found = []
        for path in sorted((self.path / "logs").glob("rank-*.log"))[:_MOST_RANKS]:
            rank = int("0" + "".join(filter(str.isdecimal, path.stem)))
            if rank not in self._processes:
                self._processes[rank] = _process_of(path)
            place = place_of(self._processes[rank], path) if self._processes[rank] else None
            if place is not None:
                found.append((rank, Place(place.step, place.name)))
        return found


def _process_of(path: Path) -> int:
    """The process that a rank's log names last; 0: none. Looks at the log from its end."""
    try:
        with opened(path) as file:
            end = file.seek(0, os.SEEK_END)
            after = b""
            while end > 0:
                begin = max(0, end - _BEGINNING)
                file.seek(begin)
                block = file.read(end - begin) + after
                if named := _PROCESS.findall(block):
                    return int(named[-1])
                end, after = begin, block[:200]
    except (OSError, ValueError):
        pass
    return 0


def _sign(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _short(line: Line, curves: Curves) -> dict[str, Any]:
    """A line as the page's script appends it: numbers, null for what is not finite, and where it stands in time."""
    values = {}
    for name in curves.names:
        value = line.values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            values[name] = short(value)
    step = line.values.get("step")
    told: dict[str, Any] = {"step": step if type(step) is int and 0 <= step < 1 << 53 else None, "values": values}
    if "loss" in line.values:
        tokens = line.values.get("tokens")
        told["tokens"] = tokens if type(tokens) is int and abs(tokens) < 1 << 53 else None
        told["seconds"] = curves.elapsed(line.values.get("time"))
    return told
