"""Where a rank is in its step, and which rank the others wait for.

The step writes down its place in one assignment, and somebody else may read it from another thread at any time: the
hot path neither locks nor sends. All ranks pass through the same places in the same order, so the rank that has passed
fewest is the one that is behind. On an accelerator it is the place of the process, which runs ahead of its device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from threefold.mesh.mesh import Mesh

_KEY = "threefold/own-time"


class Phase(NamedTuple):
    """A phase of a step; `number` counts the phases that this process has entered."""

    number: int
    step: int
    name: str


class Progress:
    """The place of this rank, as its training loop has told it."""

    def __init__(self) -> None:
        self.place = Phase(0, 0, "start")

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """Enters a phase (data, forward, backward, reduce, optimizer, log, audit, evaluation, save)."""
        place = self.place
        self.place = Phase(place.number + 1, place.step if step is None else step, phase)


class Watch(Protocol):
    """Looks after the ranks while steps are made."""

    def __enter__(self) -> object:
        """Begins to look."""

    def __exit__(self, *exception: object) -> None:
        """Looks no more."""


@dataclass
class OwnTime:
    """Time that this rank has worked or waited for its own data, and not for other ranks, in seconds.

    Work is the time of the main thread on a CPU core: waiting in a collective takes none. On an accelerator that leaves
    the device's own time out, so there it finds slow hosts and slow data, not slow devices.
    """

    data_wait_s: float = 0.0
    _began: float = field(default_factory=time.thread_time)

    def read(self, wall_s: float, cpu_s: float) -> None:
        """A batch was waited for: `wall_s` by the clock, of which the main thread worked `cpu_s`."""
        self.data_wait_s += wall_s
        self._began += cpu_s

    def total_s(self) -> float:
        return self.data_wait_s + time.thread_time() - self._began


class Slowest:
    """Finds the rank that the others wait for, over the rendezvous store: two small messages a logged step."""

    def __init__(self, mesh: Mesh) -> None:
        self._store = mesh.store if mesh.world_size > 1 else None
        self._rank = mesh.rank
        self._keys = [f"{_KEY}/{rank}" for rank in range(mesh.world_size)]

    def tell(self, own_s: float) -> None:
        """This rank's own time since the last logged step; said before the collective of the loss."""
        if self._store is not None:
            self._store.set(self._keys[self._rank], repr(own_s))

    def find(self, elapsed_s: float) -> tuple[int, float] | None:
        """On rank 0, after that collective: as `slowest`; None elsewhere and in a single process."""
        if self._store is None or self._rank != 0:
            return None
        return slowest([float(value) for value in self._store.multi_get(self._keys)], elapsed_s)


def slowest(own_s: Sequence[float], elapsed_s: float) -> tuple[int, float]:
    """(rank with the most time of its own, share of the elapsed time by which it exceeds the others' mean).

    A share of 0.3 says: if that rank were as fast as the others, a step would take about 30 % less.
    """
    rank = max(range(len(own_s)), key=own_s.__getitem__)
    others = (sum(own_s) - own_s[rank]) / (len(own_s) - 1)
    return rank, (own_s[rank] - others) / elapsed_s if elapsed_s > 0 else 0.0
