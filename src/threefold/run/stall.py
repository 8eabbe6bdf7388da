"""Finds the late rank from every rank's last report, and describes it for the user. No torch.

All ranks pass through the same phases in the same order. So if none progresses, the ranks that have entered the fewest
phases are late, and the others wait for them. If several are equally far behind, their stacks decide: a rank inside a
collective waits; a rank outside is late. A rank that no longer reports is named, whatever it reported last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from threefold.errors import ranks_text

_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py", ".wait(")
_INNERMOST_LINES = 6


@dataclass(frozen=True)
class Report:
    """A rank's report: its place and, if it has not moved for a while, its main thread's stack."""

    rank: int
    host: str
    process: int
    number: int
    step: int
    phase: str
    beat: int = 0
    stack: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        return cls(**json.loads(text))

    @property
    def waits(self) -> bool:
        """Whether the main thread is inside a collective, as far as Python shows."""
        return any(name in line for line in self.stack.splitlines()[-_INNERMOST_LINES:] for name in _COLLECTIVES)

    def place(self) -> str:
        return f"in {self.phase} of step {self.step}" if self.step else "before its first step"


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
    def key(self) -> tuple[object, ...]:
        """Equal for the same stall."""
        return (*((seen.report.rank, seen.report.number) for seen in self.late), *self.missing, self.silent)

    @property
    def someone_waits(self) -> bool:
        """Whether a rank is blocked by the late ones; while preparing data, ranks do not wait for one another."""
        return bool(self.waiting or self.missing or self.silent) or any(s.report.phase != "data" for s in self.late)

    def headline(self) -> str:
        """Returns one line: the late ranks, where they are, and for how long."""
        have = "has" if len(self.missing) == 1 else "have"
        late = [f"{ranks_text(self.missing)} {have} not begun"] if self.missing else []
        for seen in self.late:
            report, what = seen.report, f"is {seen.report.place()}"
            if report.rank in self.silent:
                what = (
                    f"has given no sign of life for {seen.silent_s:.0f} s, last {report.place()}: its process "
                    "or its host is gone, frozen or cut off"
                )
            late.append(f"rank {report.rank} of host {report.host} (process {report.process}) {what}")
        return f"no progress for {self.still_s:.0f} s: {'; '.join(late)}"

    def text(self) -> str:
        """Returns the complete report: the late ranks with their stacks, and where the others wait."""
        lines = [self.headline()]
        places: dict[str, list[int]] = {}
        for seen in self.waiting:
            places.setdefault(seen.report.place(), []).append(seen.report.rank)
        lines += [f"  {ranks_text(ranks)} wait{'s' * (len(ranks) == 1)} {place}" for place, ranks in places.items()]
        for seen in self.late:
            if seen.report.stack and seen.report.rank not in self.silent:
                lines.append(f"  rank {seen.report.rank} is at (the innermost call is the last):")
                lines += [f"    {line}" for line in seen.report.stack.splitlines()]
        return "\n".join(lines)


def find(ranks: Mapping[int, Seen], *, world_size: int, stall_s: float, silent_s: float) -> Stall | None:
    """Returns the stall that these ranks are in, or None if all make progress.

    Args:
        stall_s: a rank without progress for longer is stalled.
        silent_s: a stalled rank without a sign of life for longer is gone.
    """
    missing = tuple(rank for rank in range(world_size) if rank not in ranks)
    stalled = [seen for seen in ranks.values() if seen.still_s > stall_s]
    silent = tuple(seen.report.rank for seen in stalled if seen.silent_s > silent_s)
    if silent:
        late = [seen for seen in stalled if seen.report.rank in silent]
    else:
        fewest = min((seen.report.number for seen in ranks.values()), default=0)
        behind = [seen for seen in ranks.values() if seen.report.number == fewest and not missing]
        late = [seen for seen in behind if not seen.report.waits] or behind
        # A rank that is behind but progresses is slow; that is not a stall.
        if not stalled or any(seen.still_s <= stall_s for seen in late):
            return None
    waiting = tuple(seen for seen in ranks.values() if seen not in late)
    return Stall(tuple(late), waiting, missing, silent, max(seen.still_s for seen in stalled))
