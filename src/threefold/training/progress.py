"""Where a rank is, which rank the others wait for, and what a run measures of itself.

The step records its place in one assignment, and another thread may read it at any time: the hot path neither locks
nor sends. All ranks pass through the same places in the same order, so the rank that has passed the fewest is behind.
On an accelerator it is the place of the process, which runs ahead of its device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from threefold.mesh.mesh import Mesh

_KEY = "threefold/own-time"
# A rank that is slowest by this share of the step, in each logged step of so many.
_NOTICED, _CHRONIC_STEPS = 0.1, 50


class Phase(NamedTuple):
    """A phase of a step; `number` counts the phases that this process has entered."""

    number: int
    step: int
    name: str


class Progress:
    """The place of this rank, as it reports it itself.

    Attributes:
        ticks: counts signs of progress within phases; ranks may have different ones.
        mirror: is given each place.
        device: measures the device's time of the phases; None on a CPU.
        rows: the numbers of the rows that this rank has read for the step.
        blocked_s: time in a step without a core, and not for another rank: noted by whoever watches the main thread.
    """

    def __init__(self) -> None:
        self.place = Phase(0, 0, "start")
        self.ticks = 0
        self.rows: Iterable[Any] = ()
        self.mirror: Callable[[Phase], None] | None = None
        self.device: DeviceForward | None = None
        self.blocked_s = 0.0

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """Enters a phase: data, exchange, forward, backward, reduce, optimizer, log, audit, evaluation or save."""
        place = self.place
        if step is not None:
            self.rows = ()
        self.place = place = Phase(place.number + 1, place.step if step is None else step, phase)
        if self.mirror is not None:
            self.mirror(place)
        if self.device is not None:
            self.device.enter(phase)

    def go_on_from(self, before: Progress) -> None:
        """Takes the place of another object, which gets nothing any more."""
        self.place, self.ticks, self.mirror = before.place, before.ticks, before.mirror

    def tick(self) -> None:
        """What this rank alone does in a phase continues."""
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
        """What was before does not count."""
        self._events = []

    def take_s(self) -> float:
        """The time since the last call; waits for the last of these forwards."""
        pairs = list(zip(self._events[::2], self._events[1::2], strict=False))
        self._events = []
        if pairs:
            pairs[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000


@dataclass
class OwnTime:
    """Time that this rank has worked or waited for its own data, and not for other ranks, in seconds.

    On a CPU: what the main thread has spent on a core, and what it was blocked outside of collectives (`blocked_s`).
    On a CUDA device: the device's time in forwards.
    """

    progress: Progress = field(default_factory=Progress)
    data_wait_s: float = 0.0
    _device_s: float = 0.0
    _began: float = field(default_factory=time.thread_time)
    _blocked: float = field(init=False)

    def __post_init__(self) -> None:
        self._blocked = self.progress.blocked_s
        if self.progress.device is not None:
            self.progress.device.forget()

    def read(self, wall_s: float, cpu_s: float) -> None:
        """A batch was waited for: `wall_s` by the clock, of which the main thread worked `cpu_s`."""
        self.data_wait_s += wall_s
        self._began += cpu_s

    def total_s(self) -> float:
        if self.progress.device is not None:
            self._device_s += self.progress.device.take_s()
            return self.data_wait_s + self._device_s
        return self.data_wait_s + time.thread_time() - self._began + self.progress.blocked_s - self._blocked


class Slowest:
    """Finds the rank that the others wait for, over the rendezvous store: two small messages a logged step."""

    def __init__(self, mesh: Mesh) -> None:
        self._store = mesh.store if mesh.world_size > 1 else None
        self._rank = mesh.rank
        self._keys = [f"{_KEY}/{rank}" for rank in range(mesh.world_size)]

    def tell(self, own_s: float) -> None:
        """Tells this rank's own time since the last logged step; before the collective of the loss."""
        if self._store is not None:
            self._store.set(self._keys[self._rank], repr(own_s))

    def find(self, elapsed_s: float) -> tuple[int, float] | None:
        """On rank 0, after that collective: `slowest` of all; None elsewhere and in a single process."""
        if self._store is None or self._rank != 0:
            return None
        return slowest([float(value) for value in self._store.multi_get(self._keys)], elapsed_s)


def slowest(own_s: Sequence[float], elapsed_s: float) -> tuple[int, float]:
    """(rank with the most time of its own, share of the elapsed time by which it exceeds the others' mean).

    A share of 0.3: if that rank were as fast as the others, a step would take about 30 % less time.
    """
    rank = max(range(len(own_s)), key=own_s.__getitem__)
    others = (sum(own_s) - own_s[rank]) / (len(own_s) - 1)
    return rank, (own_s[rank] - others) / elapsed_s if elapsed_s > 0 else 0.0


class Lag:
    """Notices a rank that stays the slowest."""

    def __init__(self) -> None:
        self._rank, self._since, self._told = -1, 0, -1
        self._shares: list[float] = []

    def after(self, step: int, rank: int, share: float) -> str | None:
        """What to say of the slowest rank at a logged step, once for each rank: that it has been it for 50 steps."""
        if rank != self._rank or share < _NOTICED:
            self._rank, self._since, self._shares = rank if share >= _NOTICED else -1, step, []
            return None
        self._shares.append(share)
        if step - self._since < _CHRONIC_STEPS or rank == self._told:
            return None
        self._told = rank
        mean = sum(self._shares) / len(self._shares)
        return (
            f"rank {rank} has been the slowest since step {self._since}: a step would take about {mean:.0%} less "
            "if it were as fast as the others"
        )


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
