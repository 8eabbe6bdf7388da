"""A trace of a few steps of this rank: RUN/profile/rank-0003.json.gz, for chrome://tracing, and what it shows.

Every rank traces the same steps; what the trace costs and the time to write it are part of the run's time, but not of
the steps in the trace.

A trace is torch's (Chrome's format): events with a name, a category, a thread, and a beginning and a duration in
microseconds. The phases of the steps are marked in it. A moment belongs to the first of these that holds: something is
computed (a kernel on the device; on a CPU an operator of torch); a collective is under way, and thus exposed; the step
waits for its data (idle); on a device, nothing happens on the host either (idle); else the host works.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from threefold.config.paths import PROFILE_FOLDER
from threefold.training.progress import Progress

PHASE = "threefold:"
LONGEST = 10
Event: TypeAlias = Mapping[str, Any]
Intervals: TypeAlias = list[tuple[float, float]]


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


@dataclass(frozen=True)
class Summary:
    """Summary of the steps of one rank.

    Attributes:
        steps: how many.
        step_s: wall time of one on average.
        compute, communication, host, idle: shares of that time, which add up to 1; communication is the exposed part.
        overlapped: share of the time in which collectives ran concurrently with computation.
        phases: seconds a step in each phase of a step.
        kernels: the longest: name, calls per step, seconds per step; on a CPU operators, without nested calls.
    """

    steps: int
    step_s: float
    compute: float
    communication: float
    host: float
    idle: float
    overlapped: float
    phases: dict[str, float]
    kernels: list[tuple[str, float, float]]


def summary_of(events: Iterable[Event]) -> Summary:
    """The summary of a trace whose phases are marked.

    Raises:
        ValueError: it has no whole step.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    phases = [
        event
        for event in complete
        if event["name"].startswith(PHASE) and event.get("cat") == "user_annotation"
    ]
    steps = sum(each["name"] == f"{PHASE}optimizer" for each in phases)
    if not steps:
        raise ValueError("the trace has no whole step")
    begin = min(each["ts"] for each in phases)
    end = max(each["ts"] + each["dur"] for each in phases)
    kernels = [
        event
        for event in complete
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    computed = (
        [event for event in kernels if not _is_collective(event)]
        if kernels
        else _operators(complete)
    )
    busy = _union(computed, begin, end)
    sent = _union(
        [event for event in (kernels or complete) if _is_collective(event)], begin, end
    )
    data = _union([event for event in phases if event["name"] == f"{PHASE}data"], begin, end)
    exposed = _without(sent, busy)
    rest = _without(_without([(begin, end)], busy), sent)
    waiting = _both(rest, data)
    rest = _without(rest, data)
    if kernels:
        at_work = _union(
            [event for event in complete if event.get("cat") in ("cpu_op", "cuda_runtime")],
            begin,
            end,
        )
        waiting += _without(rest, at_work)
        rest = _both(rest, at_work)
    whole = end - begin
    times: dict[str, float] = defaultdict(float)
    for event in phases:
        times[event["name"].removeprefix(PHASE)] += event["dur"] / 1e6 / steps
    return Summary(
        steps=steps,
        step_s=whole / 1e6 / steps,
        compute=_length(busy) / whole,
        communication=_length(exposed) / whole,
        host=_length(rest) / whole,
        idle=_length(waiting) / whole,
        overlapped=(_length(sent) - _length(exposed)) / whole,
        phases=dict(times),
        kernels=_longest(kernels or _operators(complete), steps, nested=not kernels),
    )


def _is_collective(event: Event) -> bool:
    name = event["name"]
    return (
        "nccl" in name.lower()
        if event.get("cat") == "kernel"
        else name.startswith(("gloo:", "nccl:"))
    )


def _operators(events: Sequence[Event]) -> list[Event]:
    return [
        event
        for event in events
        if event.get("cat") == "cpu_op" and event["name"].startswith("aten::")
    ]


def _union(events: Iterable[Event], begin: float, end: float) -> Intervals:
    merged: Intervals = []
    for start, stop in sorted(
        (max(begin, each["ts"]), min(end, each["ts"] + each["dur"])) for each in events
    ):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _both(left: Intervals, right: Intervals) -> Intervals:
    overlaps, place = [], 0
    for start, stop in left:
        while place < len(right) and right[place][1] <= start:
            place += 1
        at = place
        while at < len(right) and right[at][0] < stop:
            overlaps.append((max(start, right[at][0]), min(stop, right[at][1])))
            at += 1
    return overlaps


def _without(left: Intervals, right: Intervals) -> Intervals:
    ends = [float("-inf"), *(edge for interval in right for edge in interval), float("inf")]
    return _both(left, [(ends[number], ends[number + 1]) for number in range(0, len(ends), 2)])


def _length(intervals: Intervals) -> float:
    return sum(stop - start for start, stop in intervals)


def _longest(
    events: Sequence[Event], steps: int, *, nested: bool
) -> list[tuple[str, float, float]]:
    """By the time that they take themselves; events of one thread that are `nested` lie inside one another."""
    own = [float(event["dur"]) for event in events]
    if nested:
        stacks: dict[Any, list[int]] = defaultdict(list)
        for number in sorted(
            range(len(events)), key=lambda each: (events[each]["ts"], -events[each]["dur"])
        ):
            event = events[number]
            stack = stacks[event.get("tid")]
            while stack and events[stack[-1]]["ts"] + events[stack[-1]]["dur"] <= event["ts"]:
                stack.pop()
            if stack:
                own[stack[-1]] -= event["dur"]
            stack.append(number)
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event, time in zip(events, own, strict=True):
        totals[event["name"]][0] += 1
        totals[event["name"]][1] += time
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])[:LONGEST]
    return [(name, calls / steps, time / 1e6 / steps) for name, (calls, time) in ordered]
