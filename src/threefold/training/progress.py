"""Where a rank is, and the measurements of a run.

The step records its place in one assignment, and another thread may read it at any time: the hot path neither locks
nor sends. All ranks pass through the same places in the same order, so the rank that has passed the fewest is behind.
On an accelerator it is the place of the process, which runs ahead of its device.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

_Read = TypeVar("_Read")
# Time for a late thread to note a stop that is over: to get Python's lock for reads of /proc, and a core.
_NOTES_WITHIN_S = 0.02


class Phase(NamedTuple):
    """A phase of a step; `number` counts the phases that this process has entered."""

    number: int
    step: int
    name: str


class Progress:
    """The place of this rank, as it reports it itself.

    Attributes:
        ticks: counts signs of progress within phases; ranks may have different ones.
        mirror: called with each place.
        device: measures the device's time of the phases; None on a CPU.
        rows: the numbers of the rows that this rank has read for the step.
        blocked_s: time in a step without a core, but not waiting for another rank: noted by the main thread's watcher.
        still_s: time in a step in which no thread of this process ran although it should have: noted in the same way.
        told_s: the part of both already included when this rank last reported its own time.
        note_by: when the watcher is late to note them, by the monotonic clock.
        counted: kernel counters of this process, and observations of the next rank of its host, by name.
    """

    def __init__(self) -> None:
        self.place = Phase(0, 0, "start")
        self.ticks = 0
        self.rows: Iterable[Any] = ()
        self.mirror: Callable[[Phase], None] | None = None
        self.device: DeviceForward | None = None
        self.blocked_s = self.still_s = 0.0
        self.told_s, self.note_by = (0.0, 0.0), math.inf
        self.counted: Mapping[str, float] = {}

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """Enters a phase: data, exchange, forward, backward, reduce, optimizer, log, audit, evaluation or save."""
        place = self.place
        if step is not None:
            self.rows = ()
        self.place = place = Phase(
            place.number + 1, place.step if step is None else step, phase
        )
        if self.mirror is not None:
            self.mirror(place)
        if self.device is not None:
            self.device.enter(phase)

    def tick(self) -> None:
        """Work of this rank alone within a phase continues."""
        self.ticks += 1

    def close(self) -> None:
        """The last phase is over."""


class DeviceForward:
    """The time of the forwards on a CUDA device, between two events of each: a slow device, or one fed late.

    Where the forward sends nothing (data ranks) that is this rank's own time. With shards or tp the ranks wait for one
    another in it, and all take the same.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        """Args:
        make_event: makes a torch.cuda.Event that takes the time.
        """
        self._make_event = make_event
        self._events: list[Any] = []

    def enter(self, phase: str) -> None:
        """A phase begins; a few microseconds to record an event, and no wait."""
        open_ = len(self._events) % 2
        if phase == "forward" and open_:
            self._events.pop()  # a forward without a backward
        if phase == "forward" or (phase == "backward" and open_):
            self._events.append(self._make_event())
            self._events[-1].record()

    def forget(self) -> None:
        """Earlier time does not count."""
        self._events = []

    def take_s(self) -> float:
        """The time since the last call; waits for the last of these forwards."""
        pairs = list(zip(self._events[::2], self._events[1::2], strict=False))
        self._events = []
        if pairs:
            pairs[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000


def core_wait_s(thread: str = "thread-self") -> float:
    """How long a thread has been ready without a core, its cgroup's throttling included; 0 where Linux does not tell.

    Args:
        thread: its folder in /proc.
    """
    numbers = proc_text(f"{thread}/schedstat").split()
    return int(numbers[1]) / 1e9 if len(numbers) == 3 else 0.0


def proc_text(name: str) -> str:
    """The beginning of a file of /proc; empty if it cannot be read. Without a buffer, which takes as long again."""
    try:
        with open(f"/proc/{name}", "rb", buffering=0) as file:
            return file.read(4096).decode(errors="replace")
    except OSError:
        return ""


@dataclass
class OwnTime:
    """Wall time in which this rank did not wait for other ranks, in seconds, by what it was spent on.

    On a CPU it is what the main thread spent on a core or waiting for one, and what it was blocked or stood still for;
    the rest is waiting for others. The clock runs while a process is stopped or throttled. On a CUDA device it is the
    device's time in forwards. Either way, waiting for data is a rank's own.

    Time that another thread notes after a report is included in the next report, so none is lost.
    """

    progress: Progress = field(default_factory=Progress)
    data_wait_s: float = 0.0
    _device_s: float = 0.0
    _began: float = field(default_factory=time.thread_time)
    _waited: float = field(default_factory=core_wait_s)

    def __post_init__(self) -> None:
        self._counted = self.progress.counted
        self._blocked, self._still = self.progress.told_s
        if self.progress.device is not None:
            self.progress.device.forget()

    def read(self, batches: Iterator[_Read]) -> _Read:
        """The next batch. What that takes by the clock counts as waiting for data, and as nothing else."""
        begun = time.perf_counter()
        on_core = time.thread_time()
        waited = core_wait_s()
        batch = next(batches)
        self.data_wait_s += time.perf_counter() - begun
        self._began += time.thread_time() - on_core
        self._waited += core_wait_s() - waited
        return batch

    def parts(self) -> dict[str, float]:
        """Seconds by what they were spent on: keys of `lag.PARTS`."""
        if self.progress.device is not None:
            self._device_s += self.progress.device.take_s()
            return {"data": self.data_wait_s, "device": self._device_s}
        until = time.monotonic() + _NOTES_WITHIN_S
        while self.progress.note_by < time.monotonic() < until:
            time.sleep(0.001)
        blocked, still = self.progress.told_s = self.progress.blocked_s, self.progress.still_s
        return {
            "data": self.data_wait_s,
            "compute": time.thread_time() - self._began,
            "core": core_wait_s() - self._waited,
            "blocked": blocked - self._blocked,
            "still": still - self._still,
        }

    def counts(self) -> dict[str, float]:
        """The counts of the interval, as `Progress.counted`; without counters that did not exist before."""
        counted, before = self.progress.counted, self._counted
        return {name: counted[name] - before[name] for name in counted.keys() & before.keys()}


class Stopwatch:
    """Time since it was last read, in seconds."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed


def peak_memory_bytes(device_type: str) -> int:
    """Most memory that this rank has held: allocated on the device, or resident on a CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
