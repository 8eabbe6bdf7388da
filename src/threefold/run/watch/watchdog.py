"""Reports which rank is late, from the rendezvous to the end of the processes.

Each rank has two threads. One writes the rank's place (see `Progress`) to the rendezvous store about once a second,
with what its main thread does once that has not moved for most of `stall_s`; and it reports in the place of a rank of
its host that is silent (see `pulse`). On one rank, the judge, it also reads the other ranks' reports. The other thread
judges them, and continues if the store no longer answers: then this host is cut off, or the store's keeper is silent.
Rank 0 is the first judge; if it gives no sign of life, the rank that sees this first takes its place. Only the judge's
clock counts. At the end, the ranks leave together: one whose end hangs is named like any.
"""

import contextlib
import json
import logging
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

from threefold.checkpoint.lineage import Ending, Journal
from threefold.errors import EXIT_FAILED, Problem
from threefold.mesh.exchange import collectives_begun
from threefold.mesh.mesh import FAILURES, Mesh
from threefold.run.watch import main_thread, stall
from threefold.run.watch.main_thread import MainThread, counters
from threefold.run.watch.pulse import Peer, Pulse
from threefold.run.watch.stall import Report, Seen
from threefold.training.progress import Phase, Progress, core_wait_s

log = logging.getLogger("threefold")

_REPORT_EVERY_S = 1.0
_BEATS_MISSED = 8
_STACK_FROM = 0.6
_HEARD_WITHIN_BEATS = 2
# Observations by a rank's host arrive before the judge finds it silent.
_EARLIER = 0.5
# How often, and for how long, the main thread is looked at in a step.
_SAMPLE_EVERY_S, _SAMPLE_S = 0.05, 0.002
# Own time is counted by the main thread's clocks in these, too; in data, by the clock alone.
_IN_STEPS = ("exchange", "forward", "backward", "reduce", "optimizer", "the program")
# A process that was stopped in one of those may be here when that is noticed.
_AT_STEPS = (*_IN_STEPS, "log", "audit")
# A thread that asks for no core gets one within this time where cores are free; later, its process stood still.
_LATE_S = 0.02
# How often a rank reports a new place between two beats, and how many of them the store is to take from all ranks.
_PLACE_EVERY_S, _PLACES_A_SECOND = 0.25, 2000
_MEET_WITHIN_S = 2.0
_PREFIX = "threefold/watch"


class Watchdog:
    """Watches the ranks while it is open, from `begin` on.

    Attributes:
        progress: the place of this rank.
        mesh: once it is made.
        store: one of the ranks', once they have met.
        folder: of the run, where the last collectives are written if they stall, and how it ended; None: nowhere.
        pulse: as given.
        overdue: whether the run was asked to stop so long ago that what does not move ends it, data too.
    """

    def __init__(
        self,
        rank: int,
        *,
        stall_s: float,
        timeout_s: float,
        program: bool = False,
        pulse: str | None = None,
    ) -> None:
        """Args:
        stall_s: time without progress after which the late rank is named, once per stall.
        timeout_s: time without progress after which the run ends with that report.
        program: the run is of a program with its own loop, which sets these times.
        pulse: where the process that has started this rank sees its place.
        """
        longer = f"--train.timeout_s {2 * timeout_s:g}, with a larger --mesh.timeout_s"
        if program:
            longer = f"config={{'train.timeout_s': {2 * timeout_s:g}}}, with a larger init_mesh(timeout_s=...)"
        self._longer = longer
        self._rank, self._stall_s, self._timeout_s = rank, stall_s, timeout_s
        self.progress, self.pulse = Progress(), pulse
        self.mesh: Mesh | None = None
        self.folder: Path | None = None
        self._every_s = min(_REPORT_EVERY_S, stall_s / 5)
        self._silent_s = min(self._every_s * _BEATS_MISSED, 0.8 * stall_s)
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.store: Any = None
        self.overdue: Callable[[], bool] = lambda: False
        self._pulse: Pulse | None = None
        self._peers: dict[int, Peer] = {}
        self._seen: dict[int, tuple[Report, float, float]] = {}
        self._judge, self._beat, self._told_alone = 0, 0, False
        self._judge_seen: dict[int, tuple[Report, float, float]] = {}
        self._found: str | None = None

    def __enter__(self) -> Self:
        self._main = MainThread()
        self.progress.enter("rendezvous")
        return self

    def begin(self, store: Any, hosts: Sequence[str]) -> None:
        """Begins to watch; each rank calls it when all have met, with their store and the host of each."""
        # A thread that waits for an answer holds its connection, so the threads need stores of their own.
        self.store, self._hosts, self._reached_at = store.clone(), hosts, time.monotonic()
        self._pulse = Pulse.begin(self.pulse)
        if self._pulse is not None:
            self._pulse.tell(self.progress.place)
            self._pulse.beat(self._beat)
            self.progress.mirror = self._pulse.tell
        self._meet(store)
        for work in (
            partial(self._report, store.clone()),
            partial(self._look, store.clone()),
            self._sample,
        ):
            self._threads.append(threading.Thread(target=work, name="watchdog", daemon=True))
            self._threads[-1].start()

    def follow(self, progress: Progress) -> None:
        """Takes the place of this rank from another object from now on; the one before gets nothing any more."""
        before, self.progress = self.progress, progress
        progress.place, progress.ticks = before.place, before.ticks
        progress.mirror = before.mirror

    def leave(self) -> None:
        """Returns when every rank has called it, or cannot any more; the last phase, which is watched too."""
        self.progress.enter("left")
        if self.store is None:
            return
        pause, key = 0.001, f"{_PREFIX}/left"
        # Rank 0 kept the store, and has left because all others had.
        with contextlib.suppress(RuntimeError):
            self.store.add(key, 1)
            while self.store.add(key, 0) < len(self._hosts):
                time.sleep(pause)
                pause = min(0.05, 1.5 * pause)

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(self._every_s)
        if self._pulse is not None:
            self.progress.mirror = None
            if not any(thread.is_alive() for thread in self._threads):
                self._pulse.close()

    def speaks_for_its_host(self, after: float = 1.0) -> bool:
        """Whether no lower rank of this host lives (`after`: so many times `_silent_s`), or has reported a reason."""
        return not self.told_by_another() and all(
            peer.silenced_by(after * self._silent_s) for peer in self._lower()
        )

    def told_by_another(self) -> bool:
        """Whether a lower rank of this host has failed with a reason, which it has reported."""
        return any(peer.place.name == "failure" for peer in self._lower())

    def note(self, ending: Ending) -> None:
        """Writes in the run's journal how it ends, unless another rank has."""
        try:
            first = self.store is None or self.store.add(f"{_PREFIX}/ended", 1) == 1
        except RuntimeError:  # it is gone with its keeper
            first = self.speaks_for_its_host()
        if first:
            self._note(ending)

    def _note(self, ending: Ending) -> None:
        if self.folder is not None:
            Journal(self.folder).end(ending)

    def gone(self) -> dict[int, Phase]:
        """The last places of this host's ranks whose process is gone without a report."""
        gone = {
            rank: peer.place
            for rank, peer in self._peers.items()
            if peer.silenced_by(math.inf) == stall.GONE
        }
        return {
            rank: place for rank, place in gone.items() if place.name not in ("failure", "left")
        }

    def _lower(self) -> list[Peer]:
        return [peer for rank, peer in self._peers.items() if rank < self._rank]

    def _report(self, store: Any) -> None:
        """Reports this rank to the store until the watchdog is closed; as the judge, also reads the other reports."""
        keys = [f"{_PREFIX}/{rank}" for rank in range(len(self._hosts))]
        since, moved, kept = time.monotonic(), (-1, 0), -1
        unheard = set(range(len(self._hosts)))
        while not self._stopped.is_set():
            self._beat += 1
            place, ticks = self.progress.place, self._signs()
            now = time.monotonic()
            if (place.number, ticks) != moved:
                since, moved = now, (place.number, ticks)
            still_s = now - since
            idle = self._main.was_idle()
            report = replace(self._at(place), beat=self._beat, ticks=ticks)
            if still_s > self._stall_s * _STACK_FROM:
                report = self._with_stack(report, idle=idle)
            if still_s > self._stall_s and place.number != kept and self.folder is not None:
                kept = place.number
                main_thread.keep_collectives(self.folder, self._rank)
            try:
                store.set(keys[self._rank], report.to_json())
                self._report_for_the_silent(store)
                self._follow(store)
                if self._judge == self._rank:
                    unheard = {rank for rank in unheard if not store.check([keys[rank]])}
                    heard = [key for rank, key in enumerate(keys) if rank not in unheard]
                    self._hear(
                        [Report.from_json(text) for text in store.multi_get(heard)], store
                    )
                elif still_s > self._stall_s and store.check([f"{_PREFIX}/end"]):
                    os._exit(EXIT_FAILED)  # the judge has reported why
                self._reached_at = time.monotonic()
            except Exception as error:
                log.warning("watchdog: %s", error)  # `_look` reports it if it lasts
            self._keep_current(store, report)

    def _keep_current(self, store: Any, report: Report) -> None:
        """Until the next beat, reports now and then where this rank is: it may not come to another."""
        until = time.monotonic() + self._every_s
        pause = max(_PLACE_EVERY_S, len(self._hosts) / _PLACES_A_SECOND)
        while (left := until - time.monotonic()) > 0 and not self._stopped.wait(
            min(left, pause)
        ):
            if left > pause and (place := self.progress.place).number != report.number:
                report = replace(self._at(place), beat=self._beat, ticks=report.ticks)
                with contextlib.suppress(RuntimeError):
                    store.set(f"{_PREFIX}/{self._rank}", report.to_json())

    def _at(self, place: Phase) -> Report:
        return Report(self._rank, self._hosts[self._rank], os.getpid(), *place)

    def _signs(self) -> int:
        """Changes as this rank progresses within a phase: by its own ticks, or from one collective to the next."""
        exchanges = self.mesh.exchange.passed if self.mesh is not None else 0
        return self.progress.ticks + exchanges + sum(collectives_begun().values())

    def _with_stack(self, report: Report, *, idle: bool) -> Report:
        """Adds the activity of this rank's main thread."""
        compiles = " (compiling)" * self._main.compiles()
        return replace(
            report,
            phase=f"{report.phase}{compiles}",
            stack=self._main.stack(),
            waits=self._main.waits(idle=idle),
            begun=collectives_begun(),
            kernel=self._main.stuck(),
        )

    def _meet(self, store: Any) -> None:
        """Shares the place of this rank's pulse with the other ranks of this host, and finds theirs."""
        here = [
            rank for rank, host in enumerate(self._hosts) if host == self._hosts[self._rank]
        ]
        keys = {rank: f"{_PREFIX}/pulse/{rank}" for rank in here}
        store.set(
            keys.pop(self._rank),
            json.dumps(self._pulse.address if self._pulse is not None else None),
        )
        with contextlib.suppress(RuntimeError):  # one of them is frozen already
            store.wait(list(keys.values()), timedelta(seconds=_MEET_WITHIN_S))
        for rank, key in keys.items():
            if store.check([key]) and (peer := Peer.at(json.loads(store.get(key)))) is not None:
                self._peers[rank] = peer

    def _report_for_the_silent(self, store: Any) -> None:
        """Reports in the place of ranks of this host that cannot."""
        for rank, peer in self._peers.items():
            state = peer.silenced_by(_EARLIER * self._silent_s)
            if state and self.speaks_for_its_host(_EARLIER):
                store.set(
                    f"{_PREFIX}/instead/{rank}", self._seen_here(rank, peer, state).to_json()
                )

    def _seen_here(self, rank: int, peer: Peer, state: str) -> Report:
        report = Report(
            rank,
            self._hosts[rank],
            peer.process,
            *peer.place,
            beat=peer.last_beat[1],
            state=state,
        )
        stack = peer.stack() if state == stall.HELD else ""
        return replace(report, stack=stack, kernel=peer.where_in_the_kernel() or "the kernel")

    def _sample(self) -> None:
        """Beats, looks at the next rank of this host, and notes how long this one's main thread cannot go on in steps.

        Of the latter nothing on a CUDA device: there it waits for the device, whose own time is measured on it.
        """
        main, read_at = self._main, -math.inf
        beside = sorted(self._peers, key=lambda rank: (rank < self._rank, rank))[:1]
        looks = {f"{name}/{rank}": 0.0 for rank in beside for name in ("looks", "stopped")}
        # A separate generator, because a program may have seeded Python's.
        uneven = random.Random()
        pause_s = _SAMPLE_EVERY_S
        now = (time.monotonic(), main.ready_s(), core_wait_s())
        while not self._stopped.wait(pause_s):
            before = now
            now = (time.monotonic(), main.ready_s(), core_wait_s())
            passed_s, ready_s, waited_s = (
                new - old for new, old in zip(now, before, strict=True)
            )
            progress = self.progress
            if self._pulse is not None:
                self._pulse.beat(self._beat)
            if progress.device is None and (place := progress.place.name) in _AT_STEPS:
                if passed_s - pause_s - waited_s > _LATE_S:
                    progress.still_s += max(0.0, passed_s - ready_s)
                elif place in _IN_STEPS and main.is_blocked(_SAMPLE_S):
                    progress.blocked_s += passed_s
            for rank in beside:
                looks[f"looks/{rank}"] += 1
                looks[f"stopped/{rank}"] += (
                    self._peers[rank].silenced_by(math.inf) == stall.STOPPED
                )
            if now[0] - read_at >= _REPORT_EVERY_S:
                read_at, progress.counted = now[0], counters() | looks
            # At uneven times: what stops a process may do it as often as it is looked at.
            pause_s = _SAMPLE_EVERY_S * uneven.uniform(0.5, 1.5)
            progress.note_by = now[0] + pause_s + 2 * _LATE_S

    def _follow(self, store: Any) -> None:
        """Learns who the judge is, and takes its place if its reports have stopped."""
        key, now = f"{_PREFIX}/judge", time.monotonic()
        judge = int(store.compare_set(key, "", "0"))
        if judge != self._rank and store.check([f"{_PREFIX}/{judge}"]):
            report = Report.from_json(store.get(f"{_PREFIX}/{judge}"))
            before, _, alive_at = self._judge_seen.get(judge, (report, now, now))
            alive_at = now if report.beat != before.beat else alive_at
            self._judge_seen = {judge: (report, alive_at, alive_at)}
            if now - alive_at > self._silent_s:
                judge = int(store.compare_set(key, str(judge), str(self._rank)))
        self._judge = judge

    def _hear(self, reports: Sequence[Report], store: Any) -> None:
        now = time.monotonic()
        seen = dict(self._seen or self._judge_seen)
        for report in reports:
            before, moved_at, alive_at = seen.get(report.rank, (report, now, now))
            if report.beat != before.beat:
                # It was frozen, and has hardly had the time to move.
                back = now - alive_at > self._silent_s
                moved = (report.number, report.ticks) != (before.number, before.ticks)
                alive_at = now
                moved_at = now if back or moved else moved_at
            if now - alive_at > self._silent_s and store.check(
                [key := f"{_PREFIX}/instead/{report.rank}"]
            ):
                instead = Report.from_json(store.get(key))
                # The last beat may have reached one of both only; of an older one it has recovered.
                if abs(instead.beat - report.beat) <= 1:
                    report = replace(instead, beat=report.beat, ticks=report.ticks)
            seen[report.rank] = (report, moved_at, alive_at)
        self._seen = seen  # one assignment, because the other thread reads it

    def _look(self, store: Any) -> None:
        """Checks for a stall, or for a store that no longer answers, until the watchdog is closed."""
        looked_at = time.monotonic()
        while not self._stopped.wait(self._every_s):
            before, looked_at = looked_at, time.monotonic()
            # This process itself was stopped: it knows nothing of that time.
            if looked_at - before > self._silent_s:
                self._seen, self._reached_at, self._found = {}, looked_at, None
                continue
            away_s = looked_at - self._reached_at
            try:
                if away_s > self._stall_s:
                    self._cut_off(away_s)
                elif self._judge == self._rank and away_s <= self._silent_s:
                    # A store that is gone may not answer.
                    self._name_the_late(store)
            except RuntimeError as error:
                log.warning("watchdog: %s", error)

    def _name_the_late(self, store: Any) -> None:
        now = time.monotonic()
        ranks = {
            rank: Seen(report, now - moved, now - alive)
            for rank, (report, moved, alive) in self._seen.items()
        }
        verdict = stall.find(
            ranks, world_size=len(self._hosts), stall_s=self._stall_s, silent_s=self._silent_s
        )
        # A report may be as old as the time between two looks: another rank has moved on, and so has this one.
        before = self._found
        self._found = verdict.key if verdict is not None else None
        if verdict is None or verdict.key != before or self._stopped.is_set():
            return
        if store.check([f"{_PREFIX}/end"]):
            os._exit(EXIT_FAILED)
        if store.add(f"{_PREFIX}/told/{verdict.key}", 1) == 1:  # no judge has reported it
            _print(verdict.text())
        if (verdict.still_s > self._timeout_s and verdict.ends) or self.overdue():
            store.add(FAILURES, 1)  # the other ranks need not report the errors that follow
            if store.add(f"{_PREFIX}/told/end", 1) == 1:
                _print(text := str(self._end(verdict.headline(), verdict.what_to_look_at())))
                self.note(verdict.ending(text))
            store.set(f"{_PREFIX}/end", b"1")
            # Rank 0 may host the store: let the others read this first.
            time.sleep(_HEARD_WITHIN_BEATS * self._every_s)
            os._exit(EXIT_FAILED)

    def _cut_off(self, away_s: float) -> None:
        """Reports that the store does not answer, and what this host knows of rank 0, which may keep it."""
        at = "look at rank 0's process and host, and at the network between them"
        silent = self._silent_keeper(away_s)
        what = self._without_store(away_s) if silent is None else silent.headline()
        if self.speaks_for_its_host() and not self._told_alone:
            self._told_alone = True
            _print(what)
        if away_s > self._timeout_s and not self._stopped.is_set():
            if self.speaks_for_its_host():
                _print(text := str(self._end(what, at)))
                (_, step, phase), host = self.progress.place, self._hosts[self._rank]
                lost = Ending("lost", (self._rank,), host, 0, phase, step, error=text)
                # The store may not answer.
                self._note(lost if silent is None else silent.ending(text))
            self.progress.enter("failure")
            os._exit(EXIT_FAILED)

    def _silent_keeper(self, away_s: float) -> stall.Stall | None:
        """Rank 0, if this host sees what keeps it silent."""
        if (keeper := self._peers.get(0)) is None or not (
            state := keeper.silenced_by(self._silent_s)
        ):
            return None
        report = self._seen_here(0, keeper, state)
        quiet_s = keeper.last_beat[0]
        return stall.Stall((Seen(report, quiet_s, quiet_s),), (), (), (0,), away_s)

    def _without_store(self, away_s: float) -> str:
        here = self._at(self.progress.place)
        gone = "the process that keeps it, rank 0's or the launcher's, is gone"
        where = f"rank {here.rank} of host {here.host}, {here.place()}"
        return f"{where}, has not reached the run's store for {away_s:.0f} s: this host is cut off, or {gone}"

    def _end(self, what: str, look_at: str) -> Problem:
        expected = f"progress within train.timeout_s = {self._timeout_s:g} s"
        if self.overdue():
            expected = "a step and a save within checkpoint.grace_s of the signal that asked the run to stop"
        return Problem(
            what,
            f"{expected}; the run ends here, and its checkpoints are kept",
            f"{look_at}; if steps may take longer: {self._longer}; then start the run again: it resumes from its "
            "newest checkpoint",
        )


def _print(text: str) -> None:
    log.error("%s", text)
    # One write, which other ranks cannot split.
    print(f"{text}\n", end="", file=sys.stderr, flush=True)
