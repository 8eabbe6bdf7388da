"""Finds the late rank from every rank's last report, and describes it for the user. No torch.

All ranks pass through the same phases in the same order. So if none progresses, the ranks that have entered the fewest
phases are late, and the others wait for them. If several are equally far behind, a rank inside a collective waits and
a rank outside is late; if all are inside, as in a backward whose collectives run in C++, the late one is the rank that
others have begun a collective without. A rank that no longer reports is named, whatever it reported last, with
the observations of another rank of its host.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from threefold.checkpoint.lineage import Ending
from threefold.errors import ranks_text

# What keeps a process silent, as seen by another of its host.
GONE = "gone"
STOPPED = "stopped"
HELD = "held"
UNINTERRUPTIBLE = "uninterruptible"
_STATES = {
    "": "its process or its host is gone, frozen or cut off",
    GONE: "its process is gone",
    STOPPED: "its process is stopped (SIGSTOP or a debugger): resume it with kill -CONT {process}",
    HELD: "its process is alive, but one call holds Python's lock (the GIL)",
    UNINTERRUPTIBLE: "its process waits uninterruptibly in {kernel}: a disk, a file system or a driver is stuck",
}
CLOSING = "closing"
# With more late ranks than this, only their numbers are given.
_MOST_DESCRIBED = 4


@dataclass(frozen=True)
class Report:
    """A rank's report: its place and, if it has not moved for a while, what its main thread does.

    Attributes:
        number, step, phase: its place.
        beat: counts the reports.
        ticks: counts the signs of progress within phases.
        stack: the calls of its main thread, the innermost last.
        waits: what it waits for: another rank in a `collective`, or over the `store`; empty: for none, or unknown.
        begun: how many collectives of each process group it has begun.
        state: what keeps it silent, if another rank of its host reports in its place.
        kernel: where in the kernel it waits uninterruptibly.
    """

    rank: int
    host: str
    process: int
    number: int
    step: int
    phase: str
    beat: int = 0
    ticks: int = 0
    stack: str = ""
    waits: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)
    state: str = ""
    kernel: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Report":
        return cls(**json.loads(text))

    def place(self) -> str:
        if not self.step:
            return f"in {self.phase}, before its first step"
        return (
            f"in {self.phase}{', after' if self.phase == CLOSING else ' of'} step {self.step}"
        )

    def waits_for(self, other: "Report") -> bool:
        """Whether it has begun a collective of a group that the other is in, and has not begun."""
        return any(
            count > other.begun[group]
            for group, count in self.begun.items()
            if group in other.begun
        )


@dataclass(frozen=True)
class Seen:
    """A rank's newest report, and how long, in s, it has made no progress and given no sign of life."""

    report: Report
    still_s: float
    silent_s: float


@dataclass(frozen=True)
class Stall:
    """Ranks that are late, and those that wait for them; `missing` ranks have never reported."""

    late: tuple[Seen, ...]
    waiting: tuple[Seen, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    still_s: float

    @property
    def key(self) -> str:
        """Equal for the same stall, on every rank that finds it."""
        # Another rank of its host may report a later place of a silent one.
        late = [
            f"{each.rank}:{each.beat if each.rank in self.silent else each.number}"
            for each in (seen.report for seen in self.late)
        ]
        return f"{','.join(late)}/{','.join(map(str, self.missing))}/{','.join(map(str, self.silent))}"

    @property
    def ends(self) -> bool:
        """Whether the run ends if this lasts: not where all prepare data of their own.

        Before the first step a rank may take long with what the others wait for over the store, which has no limit:
        it ends if that rank cannot continue, or if a rank waits in a collective, which has one.
        """
        lost = (
            s.report
            for s in self.late
            if s.report.step or s.report.state not in (HELD, UNINTERRUPTIBLE)
        )
        if self.missing or any(report.rank in self.silent for report in lost):
            return True
        if any(seen.report.step for seen in self.late):
            return bool(self.waiting) or any(seen.report.phase != "data" for seen in self.late)
        return any(seen.report.waits == "collective" for seen in (*self.waiting, *self.late))

    def headline(self) -> str:
        """Returns one line: the late ranks, where they are, and for how long."""
        have = "has" if len(self.missing) == 1 else "have"
        late = [f"{ranks_text(self.missing)} {have} not begun"] if self.missing else []
        late += [self._described(seen) for seen in self.late[:_MOST_DESCRIBED]]
        if more := [seen.report.rank for seen in self.late[_MOST_DESCRIBED:]]:
            late.append(f"and {ranks_text(more)}")
        return f"no progress for {self.still_s:.0f} s: {'; '.join(late)}"

    def _described(self, seen: Seen) -> str:
        report, what = seen.report, f"is {seen.report.place()}"
        state = _STATES[report.state].format(process=report.process, kernel=report.kernel)
        if report.rank in self.silent:
            last = "" if report.state else "last "  # seen on its host, or reported earlier
            what = f"has given no sign of life for {seen.silent_s:.0f} s, {last}{report.place()}: {state}"
        elif report.kernel:
            what += f", waiting uninterruptibly in {report.kernel}: a disk, a file system or a driver is stuck"
        return f"rank {report.rank} of host {report.host} (process {report.process}) {what}"

    def ending(self, error: str) -> Ending:
        """How a run has ended that this stall ended."""
        ranks = (*(seen.report.rank for seen in self.late), *self.missing)
        first = self.late[0].report if self.late else Report(0, "", 0, 0, 0, "rendezvous")
        return Ending(
            "worker" if self._waits_for_worker else "stall",
            ranks,
            first.host,
            phase=first.phase,
            step=first.step,
            error=error,
            at=first.stack,
        )

    def text(self) -> str:
        """Returns the complete report: the late ranks with their stacks, and where the others wait."""
        lines = [self.headline()]
        places: dict[str, list[int]] = {}
        for seen in self.waiting:
            places.setdefault(seen.report.place(), []).append(seen.report.rank)
        lines += [
            f"  {ranks_text(ranks)} wait{'s' * (len(ranks) == 1)} {place}"
            for place, ranks in places.items()
        ]
        for seen in self._with_stacks:
            lines.append(f"  rank {seen.report.rank} is at (the innermost call is the last):")
            lines += [f"    {line}" for line in seen.report.stack.splitlines()]
        return "\n".join(lines)

    def what_to_look_at(self) -> str:
        """Where to look for the cause."""
        if self._waits_for_worker:
            return (
                "its loader waits for a worker process (data.num_workers): look for one "
                "that is stopped, or a slow disk"
            )
        if self._with_stacks:
            return "see the stack above for what the late rank is doing"
        if any(seen.report.state == STOPPED for seen in self.late):
            return "look for what stopped that process: a debugger, a terminal (Ctrl-Z), a scheduler that suspends jobs"
        return (
            "look at that rank's process and host: its last lines, dmesg, the scheduler's log"
        )

    @property
    def _waits_for_worker(self) -> bool:
        return any(
            "dataloader.py" in seen.report.stack and "_get_data" in seen.report.stack
            for seen in self.late
        )

    @property
    def _with_stacks(self) -> list[Seen]:
        no_stack = (STOPPED, GONE, "")
        return [
            s
            for s in self.late[:_MOST_DESCRIBED]
            if s.report.stack
            and (s.report.rank not in self.silent or s.report.state not in no_stack)
        ]


def find(
    ranks: Mapping[int, Seen], *, world_size: int, stall_s: float, silent_s: float
) -> Stall | None:
    """Returns the stall that these ranks are in, or None if all make progress.

    Args:
        stall_s: a rank without progress for longer is stalled.
        silent_s: a stalled rank without a sign of life for longer is gone.
    """
    missing = tuple(rank for rank in range(world_size) if rank not in ranks)
    stalled = [seen for seen in ranks.values() if seen.still_s > stall_s]
    silent = tuple(seen.report.rank for seen in stalled if seen.silent_s > silent_s)
    if silent:
        late: Sequence[Seen] = [seen for seen in stalled if seen.report.rank in silent]
    else:
        late = _behind(ranks.values()) if not missing else []
        # A rank that is behind but progresses is slow; of one that falls silent it is not known yet where it is.
        if not stalled or any(
            seen.still_s <= stall_s or seen.silent_s > silent_s / 2 for seen in late
        ):
            return None
    waiting = tuple(seen for seen in ranks.values() if seen not in late)
    return Stall(tuple(late), waiting, missing, silent, max(seen.still_s for seen in stalled))


def _behind(ranks: Iterable[Seen]) -> Sequence[Seen]:
    """The ranks that the others wait for."""
    everyone = list(ranks)
    fewest = min((seen.report.number for seen in everyone), default=0)
    behind = [seen for seen in everyone if seen.report.number == fewest]
    if outside := [seen for seen in behind if not seen.report.waits]:
        return outside
    roots = [
        seen
        for seen in everyone
        if any(other.report.waits_for(seen.report) for other in everyone)
        and not any(seen.report.waits_for(other.report) for other in everyone)
    ]
    return roots or [seen for seen in everyone if not seen.report.waits] or behind
