"""Reports which rank is late before a collective's time limit ends the run without an explanation.

Each rank has two threads. One writes the rank's place (see `Progress`) to the rendezvous store about once a second,
with the stack of the main thread once that has not moved for most of `stall_s`. On one rank, the judge, it also reads
the other ranks' reports. The other thread judges them, and continues if the store no longer answers: then this host is
cut off. Rank 0 is the first judge; if it gives no sign of life, the rank that sees this first takes its place. Only the
judge's clock counts. The training loop sees only a `with`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from dataclasses import dataclass
from typing import Any

from threefold.errors import EXIT_FAILED, Problem
from threefold.mesh.mesh import FAILURES, Mesh
from threefold.run import stall
from threefold.run.stall import Report, Seen
from threefold.training.progress import Progress

log = logging.getLogger("threefold")

_REPORT_EVERY_S = 1.0
_BEATS_MISSED = 8
_STACK_FROM = 0.6
_HEARD_WITHIN_BEATS = 2
_LOOP = os.path.join("training", "loop.py")
# Each module of a model adds three such frames, which show nothing.
_PASSING_ON = os.path.join("torch", "nn", "modules", "module.py")


@dataclass
class Watchdog:
    """Watches the ranks of a mesh while it is open.

    Attributes:
        progress: the place of this rank in training.
        stall_s: time without progress after which the late rank is named, once per stall.
        timeout_s: time without progress after which the run ends with that report.
    """

    mesh: Mesh
    progress: Progress
    stall_s: float
    timeout_s: float

    def __post_init__(self) -> None:
        self._every_s = min(_REPORT_EVERY_S, self.stall_s / 5)
        self._silent_s = min(self._every_s * _BEATS_MISSED, 0.8 * self.stall_s)
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._seen: dict[int, tuple[Report, float, float]] = {}
        self._printed: object = None
        self._judge = 0
        self._judge_seen: dict[int, tuple[Report, float, float]] = {}

    def __enter__(self) -> Watchdog:
        self._main = threading.get_ident()
        if self.mesh.store is None:
            return self
        self._prefix = f"threefold/watch/{self.mesh.share('watch', lambda: uuid.uuid4().hex)}"
        self._reached_at = time.monotonic()
        # A thread that waits for an answer holds its connection, so the threads need a store of their own.
        store = self.mesh.store.clone()
        for target in (self._report, self._look):
            name = f"watchdog {target.__name__}"
            self._threads.append(threading.Thread(target=target, args=(store,), name=name, daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(self._every_s)

    def _report(self, store: Any) -> None:
        """Reports this rank to the store until the watchdog is closed; as the judge, also reads the other reports."""
        keys = [f"{self._prefix}/{rank}" for rank in range(self.mesh.world_size)]
        host, beat, since, number = socket.gethostname(), 0, time.monotonic(), -1
        unheard = set(range(self.mesh.world_size))
        while not self._stopped.is_set():
            beat += 1
            place, now = self.progress.place, time.monotonic()
            if place.number != number:
                since, number = now, place.number
            still_s = now - since
            stack = self._stack() if still_s > self.stall_s * _STACK_FROM else ""
            report = Report(self.mesh.rank, host, os.getpid(), *place, beat=beat, stack=stack)
            try:
                store.set(keys[self.mesh.rank], report.to_json())
                self._follow(store)
                if self._judge == self.mesh.rank:
                    unheard = {rank for rank in unheard if not store.check([keys[rank]])}
                    heard = [key for rank, key in enumerate(keys) if rank not in unheard]
                    self._hear([Report.from_json(text) for text in store.multi_get(heard)])
                elif still_s > self.stall_s and store.check([f"{self._prefix}/end"]):
                    os._exit(EXIT_FAILED)  # the judge has reported why
                self._reached_at = time.monotonic()
            except Exception as error:
                log.warning("watchdog: %s", error)  # `_look` reports it if it lasts
            self._stopped.wait(self._every_s)

    def _follow(self, store: Any) -> None:
        """Learns who the judge is, and takes its place if its reports have stopped."""
        key, now = f"{self._prefix}/judge", time.monotonic()
        judge = int(store.compare_set(key, "", "0"))
        if judge != self.mesh.rank and store.check([f"{self._prefix}/{judge}"]):
            report = Report.from_json(store.get(f"{self._prefix}/{judge}"))
            before, _, alive_at = self._judge_seen.get(judge, (report, now, now))
            alive_at = now if report.beat != before.beat else alive_at
            self._judge_seen = {judge: (report, alive_at, alive_at)}
            if now - alive_at > self._silent_s:
                judge = int(store.compare_set(key, str(judge), str(self.mesh.rank)))
        self._judge = judge

    def _hear(self, reports: list[Report]) -> None:
        now, seen = time.monotonic(), dict(self._seen or self._judge_seen)
        for report in reports:
            before, moved_at, alive_at = seen.get(report.rank, (report, now, now))
            if report.number != before.number:
                moved_at = now
            if report.beat != before.beat:
                alive_at = now
            seen[report.rank] = (report, moved_at, alive_at)
        self._seen = seen  # one assignment, because the other thread reads it

    def _stack(self) -> str:
        """Returns the main thread's stack, starting at the training loop, innermost last."""
        frame = sys._current_frames().get(self._main)
        calls = traceback.extract_stack(frame) if frame is not None else []
        begin = next((number for number, call in enumerate(calls) if call.filename.endswith(_LOOP)), 0)
        shown = [call for call in calls[begin:] if not call.filename.endswith(_PASSING_ON)]
        return "".join(traceback.format_list(shown)).rstrip()

    def _look(self, store: Any) -> None:
        """Checks for a stall, or for a store that no longer answers, until the watchdog is closed."""
        looked_at = time.monotonic()
        while not self._stopped.wait(self._every_s):
            before, looked_at = looked_at, time.monotonic()
            if looked_at - before > self._silent_s:  # this process itself was stopped: it knows nothing of that time
                self._seen, self._reached_at = {}, looked_at
            away_s = looked_at - self._reached_at
            if self._judge == self.mesh.rank and away_s <= self.stall_s:
                self._name_the_late(store)
            elif away_s > self.stall_s:
                self._cut_off(away_s)

    def _name_the_late(self, store: Any) -> None:
        now = time.monotonic()
        ranks = {rank: Seen(report, now - moved, now - alive) for rank, (report, moved, alive) in self._seen.items()}
        found = stall.find(ranks, world_size=self.mesh.world_size, stall_s=self.stall_s, silent_s=self._silent_s)
        if found is None:
            self._printed = None
            return
        if self._printed != found.key:
            self._printed = found.key
            _print(found.text())
        if found.still_s > self.timeout_s and found.someone_waits and not self._stopped.is_set():
            store.add(FAILURES, 1)  # the other ranks need not report the errors that follow
            _print(str(self._end(found.headline())))
            store.set(f"{self._prefix}/end", b"1")
            time.sleep(_HEARD_WITHIN_BEATS * self._every_s)  # rank 0 may host the store: let the others read this first
            os._exit(EXIT_FAILED)

    def _cut_off(self, away_s: float) -> None:
        speaks = self.mesh.rank == self.mesh.host_leader
        place = Report(self.mesh.rank, socket.gethostname(), os.getpid(), *self.progress.place)
        what = (
            f"rank {place.rank} of host {place.host}, {place.place()}, has not reached the run's store for "
            f"{away_s:.0f} s: this host is cut off, or rank 0's is gone"
        )
        if speaks and self._printed is None:
            self._printed = what
            _print(what)
        if away_s > self.timeout_s and not self._stopped.is_set():
            if speaks:
                _print(str(self._end(what)))
            os._exit(EXIT_FAILED)

    def _end(self, what: str) -> Problem:
        return Problem(
            what,
            f"progress within train.timeout_s = {self.timeout_s:g} s; the run ends here, and its checkpoints are kept",
            "see the stack above for what the late rank is doing; if steps may take longer: "
            f"--train.timeout_s {2 * self.timeout_s:g}, with a larger --mesh.timeout_s; then start the run again: "
            "it resumes from its newest checkpoint",
        )


def _print(text: str) -> None:
    log.error("%s", text)
    print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write, which other ranks cannot split
