"""The live network of a mesh: a barrier and an all-reduce on every axis, then pairs of ranks; each within a time limit.

Every rank calls `measure`; nothing waits longer than the limit. Each rank notes in the store which test it begins, so a
rank that waits in vain sees there who is missing. The measurements are plain values; `judge` reads those of all ranks.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from threefold.doctor.findings import Finding, judged, ok, stop
from threefold.errors import first_line, ranks_text, size_text
from threefold.mesh.mesh import Mesh

_KEY = "threefold/doctor"
_NUM_TIMED = 10
_NUM_LARGE = 3
_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_MOST_PAIRED = 32
_SLOW_SHARE = 0.25
_FEWEST_JUDGED = 3


class StuckError(Exception):
    """A test did not end in time: its name, the ranks that take part, and those that have not begun it."""

    def __init__(
        self, test: str, ranks: Sequence[int], missing: Sequence[int], reason: str
    ) -> None:
        super().__init__(test)
        self.test, self.ranks, self.missing, self.reason = (
            test,
            list(ranks),
            list(missing),
            reason,
        )

    def finding(self, limit_s: float) -> Finding:
        """The error as a finding."""
        names = "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        came = f"all ranks joined, so the network between them is at fault ({self.reason})"
        fix = f"open all ports between the machines; set {names} on all; NCCL_DEBUG=INFO"
        if self.missing:
            came = f"{ranks_text(self.missing)} did not join"
            fix = f"look at {ranks_text(self.missing)}: is the process running, is its host reachable"
        return stop(
            "collective",
            f"{self.test} of {ranks_text(self.ranks)} did not end in {limit_s:g} s: {came}",
            "an answer from every rank",
            fix,
        )


@dataclass(frozen=True)
class Timing:
    """One rank's view of one test: seconds of a barrier and of a small all-reduce, bytes/s of a large one."""

    ranks: list[int]
    barrier_s: float
    latency_s: float
    bytes_per_s: float
    right: bool


@dataclass(frozen=True)
class Measured:
    """One rank's measurements: by axis, and (s, bytes/s) with each partner that it led the exchange with."""

    axes: dict[str, Timing]
    pairs: dict[str, tuple[float, float]]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Measured":
        """The inverse of `dataclasses.asdict`."""
        axes = {name: Timing(**timing) for name, timing in values["axes"].items()}
        return cls(
            axes, {partner: (pair[0], pair[1]) for partner, pair in values["pairs"].items()}
        )


def axes_of(mesh: Mesh) -> list[str]:
    """The axes of more than one rank, without those that have the same ranks as an earlier one."""
    by_ranks: dict[tuple[int, ...], str] = {}
    for name in ("dp", "cp", "tp", "fsdp", "world"):
        if mesh.group(name) is not None:
            by_ranks.setdefault(tuple(dist.get_process_group_ranks(mesh.group(name))), name)
    # If two axes have the same ranks here, they have the same ranks everywhere.
    return list(by_ranks.values())


def meet(mesh: Mesh, *, limit_s: float) -> None:
    """Returns when every rank has joined; StuckError if one did not within `limit_s`. All ranks call it."""
    _begun(mesh, "barrier", range(mesh.world_size), limit_s)(
        lambda: dist.barrier(async_op=True)
    )


def measure(mesh: Mesh, *, limit_s: float, hosts: Sequence[str]) -> Measured:
    """Runs every test with the other ranks; all call it.

    Args:
        hosts: of every rank; of many ranks, only one per host takes part in pairs.

    Raises:
        StuckError: a test did not end within `limit_s`.
    """
    axes = {name: _time_axis(mesh, name, limit_s) for name in axes_of(mesh)}
    pairs: dict[str, tuple[float, float]] = {}
    for number, round_ in enumerate(rounds(paired_ranks(hosts))):
        own = next((pair for pair in round_ if mesh.rank in pair), None)
        if own is not None:
            timing = _time_pair(mesh, own, f"pair exchange {number + 1}", limit_s)
            if mesh.rank == own[0]:
                pairs[str(own[1])] = timing
    return Measured(axes, pairs)


def paired_ranks(hosts: Sequence[str]) -> list[int]:
    """All ranks, or of many only the first one on each host."""
    if len(hosts) <= _MOST_PAIRED:
        return list(range(len(hosts)))
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return sorted(first.values())[:_MOST_PAIRED]


def rounds(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Every pair once, in rounds in which each rank has at most one partner (the circle method)."""
    circle: list[int | None] = [*ranks] if len(ranks) % 2 == 0 else [*ranks, None]
    for _ in range(len(circle) - 1):
        facing = zip(
            circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True
        )
        yield [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def judge(measured: Mapping[int, Measured], *, own_links: bool) -> list[Finding]:
    """The findings from the numbers of all ranks, by axis and for pairs.

    Args:
        own_links: whether pairs have dedicated links; ranks on the CPU of one host share its cores, so that their
            pairs differ by chance.
    """
    findings = [
        _axis_finding(
            name, [each.axes[name] for each in measured.values() if name in each.axes]
        )
        for name in next(iter(measured.values())).axes
    ]
    pairs = {
        (rank, int(partner)): timing
        for rank, each in measured.items()
        for partner, timing in each.pairs.items()
    }
    if pairs:
        findings.append(_pairs_finding(pairs, own_links=own_links))
    return findings


def _axis_finding(name: str, timings: Sequence[Timing]) -> Finding:
    wrong = [timing.ranks for timing in timings if not timing.right]
    if wrong:
        what, sent = (
            f"an all-reduce of {ranks_text(wrong[0])} gave a wrong sum",
            "the sum of what the ranks sent",
        )
        return stop(
            f"axis {name}",
            what,
            sent,
            "take the host or the network card out of the job: it corrupts data",
        )
    # A group is as fast as its slowest rank saw it.
    slowest = min(timings, key=lambda timing: timing.bytes_per_s)
    text = (
        f"{len(slowest.ranks)} ranks: barrier {_time(statistics.median(t.barrier_s for t in timings))}, all-reduce "
        f"{_time(statistics.median(t.latency_s for t in timings))}, bus bandwidth {_rate(slowest.bytes_per_s)}"
    )
    groups = {tuple(timing.ranks) for timing in timings}
    if len(groups) > 1:
        text += f" in the slowest of {len(groups)} groups ({ranks_text(slowest.ranks)})"
    return ok(f"axis {name}", text)


def _pairs_finding(
    pairs: Mapping[tuple[int, int], tuple[float, float]], *, own_links: bool
) -> Finding:
    slowest = min(pairs, key=lambda pair: pairs[pair][1])
    latency_s, rate = pairs[slowest]
    median = statistics.median(rate for _, rate in pairs.values())
    text = (
        f"slowest of {len(pairs)}: ranks {slowest[0]} and {slowest[1]}, {_rate(rate)}, {_time(latency_s)} one way; "
        f"median {_rate(median)}"
    )
    fits = not (own_links and len(pairs) >= _FEWEST_JUDGED and rate < _SLOW_SHARE * median)
    return judged(
        "pairs",
        text,
        fits,
        "pairs of about the same speed: a step waits for the slowest",
        "run it again; if it is the same pair, look at the cables, cards and load of its hosts, and place "
        "tp and cp ranks on one host",
        otherwise="warning",
    )


def _time_axis(mesh: Mesh, name: str, limit_s: float) -> Timing:
    group = mesh.group(name)
    ranks = dist.get_process_group_ranks(group)
    one = torch.ones(1, device=mesh.device)
    large = torch.ones(_BYTES[mesh.device.type] // 4, device=mesh.device)

    def all_reduce(values: torch.Tensor) -> Any:
        return dist.all_reduce(values, group=group, async_op=True)

    run = _begun(mesh, f"all-reduce over {name}", ranks, limit_s)
    run(lambda: all_reduce(one))
    right = bool(one.item() == len(ranks))
    one.fill_(0)
    latency_s = statistics.median(run(lambda: all_reduce(one)) for _ in range(_NUM_TIMED))
    barrier_s = statistics.median(
        run(lambda: dist.barrier(group, async_op=True)) for _ in range(1 + _NUM_TIMED // 2)
    )
    large.zero_()
    seconds = min(run(lambda: all_reduce(large)) for _ in range(_NUM_LARGE))
    # What each rank of a ring sends and receives, which makes axes of different sizes comparable.
    moved = 2 * (len(ranks) - 1) / len(ranks) * large.numel() * 4
    return Timing(ranks, barrier_s, latency_s, moved / seconds, right)


def _time_pair(
    mesh: Mesh, pair: tuple[int, int], test: str, limit_s: float
) -> tuple[float, float]:
    """(seconds one way, bytes/s) of a message there and back."""
    first = mesh.rank == pair[0]
    partner = pair[1] if mesh.rank == pair[0] else pair[0]
    one = torch.ones(1, device=mesh.device)
    large = torch.ones(_BYTES[mesh.device.type] // 16, device=mesh.device)

    run = _begun(mesh, test, pair, limit_s)

    def there_and_back(values: torch.Tensor) -> float:
        sent, received = (
            (lambda: dist.isend(values, partner)),
            (lambda: dist.irecv(values, partner)),
        )
        ways: tuple[Callable[[], Any], ...] = (sent, received) if first else (received, sent)
        return sum(map(run, ways)) / 2

    there_and_back(one)
    latency_s = statistics.median(there_and_back(one) for _ in range(_NUM_TIMED))
    return latency_s, large.numel() * 4 / min(there_and_back(large) for _ in range(_NUM_LARGE))


def _begun(
    mesh: Mesh, test: str, ranks: Sequence[int], limit_s: float
) -> Callable[[Callable[[], Any]], float]:
    """Notes that this rank begins a test; returns a function that runs one operation and returns the seconds it takes.

    Raises (the returned function): StuckError, with the missing ranks, once the test's time is over.
    """
    store, ends = mesh.store, time.monotonic() + limit_s
    assert store is not None
    store.set(f"{_KEY}/{test}/{mesh.rank}", b"1")

    def stuck(reason: str) -> StuckError:
        try:
            missing = [rank for rank in ranks if not store.check([f"{_KEY}/{test}/{rank}"])]
        except RuntimeError:  # the store went with rank 0
            missing = [0]
        return StuckError(test, ranks, missing, reason)

    def run(begin: Callable[[], Any]) -> float:
        started = time.perf_counter()
        try:
            work = begin()
            if work is not None and not work.wait(
                timedelta(seconds=max(0.001, ends - time.monotonic()))
            ):
                raise stuck("no answer")
        except RuntimeError as error:
            raise stuck(first_line(error)) from error
        if mesh.on_cuda:
            torch.cuda.synchronize(mesh.device)
        return time.perf_counter() - started

    return run


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{size_text(bytes_per_s)}/s"
