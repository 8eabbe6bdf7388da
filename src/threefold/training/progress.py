"""Where a rank is in its step, which rank the others wait for, and what a run measures of itself.

The step records its place in one assignment, and another thread may read it at any time: the hot path neither locks
nor sends. All ranks pass through the same places in the same order, so the rank that has passed the fewest is behind.
On an accelerator it is the place of the process, which runs ahead of its device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from threefold.mesh.mesh import Mesh

# Dense bfloat16 FLOP/s by the vendors' data sheets; MFU is reported for the devices named here.
_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "B200": 2250e12}
_KEY = "threefold/own-time"


class Phase(NamedTuple):
    """A phase of a step; `number` counts the phases that this process has entered."""

    number: int
    step: int
    name: str


class Progress:
    """The place of this rank, as its training loop reports it."""

    def __init__(self) -> None:
        self.place = Phase(0, 0, "start")

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """Enters a phase (data, forward, backward, reduce, optimizer, log, audit, evaluation, save)."""
        place = self.place
        self.place = Phase(place.number + 1, place.step if step is None else step, phase)


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


class Stopwatch:
    """Time since it was last read, in seconds."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed


def flops_per_token(num_parameters: int, *, num_layers: int, hidden_size: int, seq_len: int) -> float:
    """Forward and backward: 6 per parameter, and 12 x layers x hidden x length of attention (PaLM, appendix B)."""
    return 6.0 * num_parameters + 12.0 * num_layers * hidden_size * seq_len


def peak_flops(device_name: str) -> float | None:
    """The device's dense bfloat16 peak, FLOP/s, if it is known."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in device_name), None)


def peak_memory_bytes(device_type: str) -> int:
    """Most memory that this rank has held: allocated on the device, or resident on a CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
