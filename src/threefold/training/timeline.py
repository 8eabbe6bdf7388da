"""When each rank was in which phase, of some steps: RUN/timeline/rank-0003.json, and all of them in timeline.json.

Trace events as Chrome and Perfetto read them: a process for each rank, in it a thread of the host and, on an
accelerator, one of the device, whose phases begin and end later than those of the process that runs ahead of it. Times
are those of the host's clock at the beginning and of a steady one from there on, so ranks of one host can be compared
to a few microseconds, and others as well as their clocks agree. No torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from threefold.config.paths import TIMELINE_FOLDER

log = logging.getLogger("threefold")

MERGED = "timeline.json"
_TRACKS = ("host", "device")
_MOST_S = 1e12  # no time of a run


class Interval(NamedTuple):
    """A phase of a rank; times in seconds since the epoch (1970)."""

    rank: int
    track: str
    """host or device."""
    step: int
    name: str
    begin_s: float
    end_s: float


class Timeline:
    """Notes when this rank enters the phases of the steps [first, last]; one list entry for each."""

    def __init__(
        self, folder: Path, rank: int, steps: tuple[int, int], make_event: Callable[[], Any] | None = None
    ) -> None:
        """Args:
        make_event: makes a torch.cuda.Event that takes the time; None: there is no device to time.
        """
        self._path, self._rank = folder / TIMELINE_FOLDER / f"rank-{rank:04}.json", rank
        self._first, self._last = steps
        self._make_event = make_event
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._entered: list[tuple[int, str, int, Any]] = []
        self._origin_ns = 0
        self._over = False

    def enter(self, step: int, name: str) -> None:
        """A phase begins: a clock is read, and on a device an event recorded, without a wait but before the first."""
        if self._over or step < self._first:
            return
        if step > self._last:
            self.close()
            return
        event = None
        if self._make_event is not None:
            event = self._make_event()
            event.record()
            if not self._entered:
                event.synchronize()  # where the device's clock begins on the host's
                self._origin_ns = time.perf_counter_ns()
        self._entered.append((step, name, time.perf_counter_ns(), event))

    def close(self, *, device: bool = True) -> None:
        """Writes what was noted, once. `device`: waits for it, and adds its phases; not of a run that failed."""
        if self._over:
            return
        self._over = True
        if not self._entered:
            return
        end_ns = time.perf_counter_ns()
        found = list(self._host(end_ns))
        if self._make_event is not None and device:
            found += self._device()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(_trace(found)), encoding="utf-8")
        except OSError as error:  # worth no run's end
            log.warning("%s cannot be written: %s", self._path, error.strerror)

    def _host(self, end_ns: int) -> Iterator[Interval]:
        ends = [entered for _, _, entered, _ in self._entered[1:]] + [end_ns]
        for (step, name, begin, _), end in zip(self._entered, ends, strict=True):
            yield self._interval("host", step, name, begin, end)

    def _device(self) -> Iterator[Interval]:
        assert self._make_event is not None
        last = self._make_event()
        last.record()
        last.synchronize()
        events = [event for *_, event in self._entered]
        times = [self._origin_ns + round(events[0].elapsed_time(event) * 1e6) for event in [*events, last]]
        for (step, name, *_), begin, end in zip(self._entered, times[:-1], times[1:], strict=True):
            yield self._interval("device", step, name, begin, end)

    def _interval(self, track: str, step: int, name: str, begin_ns: int, end_ns: int) -> Interval:
        times = ((each + self._epoch_ns) / 1e9 for each in (begin_ns, end_ns))
        return Interval(self._rank, track, step, name, *times)


def _trace(intervals: list[Interval]) -> dict[str, Any]:
    """Trace events, with names for processes and threads."""
    events: list[dict[str, Any]] = []
    for rank, track in sorted({(each.rank, _TRACKS.index(each.track)) for each in intervals}):
        name: dict[str, Any] = {"ph": "M", "pid": rank, "tid": track, "ts": 0}
        if not track:
            events.append({**name, "name": "process_name", "args": {"name": f"rank {rank}"}})
            events.append({**name, "name": "process_sort_index", "args": {"sort_index": rank}})
        events.append({**name, "name": "thread_name", "args": {"name": _TRACKS[track]}})
    for each in sorted(intervals, key=lambda each: each.begin_s):
        times = {"ts": each.begin_s * 1e6, "dur": (each.end_s - each.begin_s) * 1e6}
        where = {"pid": each.rank, "tid": _TRACKS.index(each.track), "args": {"step": each.step}}
        events.append({"name": each.name, "cat": "phase", "ph": "X", **times, **where})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def intervals(run: Path) -> list[Interval]:
    """The phases that all ranks of a run have noted, by their begin; without files that are not what a rank writes."""
    found: list[Interval] = []
    for path in sorted((run / TIMELINE_FOLDER).glob("rank-*.json")):
        with suppress(OSError):
            found += parsed(path.read_bytes())
    return sorted(found, key=lambda each: each.begin_s)


def parsed(content: bytes) -> list[Interval]:
    """The phases in a file of one rank; none if it is not what a rank writes."""
    try:
        return [_read(event) for event in json.loads(content)["traceEvents"] if event["ph"] == "X"]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return []


def _read(event: dict[str, Any]) -> Interval:
    begin_s, dur_s = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    rank, step = int(event["pid"]), int(event["args"]["step"])
    if not (abs(begin_s) < _MOST_S and 0 <= dur_s < _MOST_S and 0 <= rank < 1 << 32 and 0 <= step < 1 << 53):
        raise ValueError("it is no phase of a rank")
    return Interval(rank, _TRACKS[event["tid"]], step, str(event["name"]), begin_s, begin_s + dur_s)


def merge(run: Path) -> Path | None:
    """Writes the phases of all ranks into one file for https://ui.perfetto.dev; None if none was noted, or kept."""
    if not (found := intervals(run)):
        return None
    path = run / TIMELINE_FOLDER / MERGED
    try:
        path.write_text(json.dumps(_trace(found)), encoding="utf-8")
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)
        return None
    return path
