"""Facts from the lines of an error: how much memory was missing, which rank was absent.

Each function gets the log and the lines that show the error, and returns sentences. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from threefold.errors import ranks_text, size_text
from threefold.explain.flight import ranks_by
from threefold.explain.log import Log, LogLine
from threefold.mesh.local_ranks import signal_name


class Guess(str):
    """A sentence about where to look, from what the logs of the ranks do not say; a dump would know."""


_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_WORK = re.compile(r"SeqNum=(\d+), OpType=(\w+)")
_AT_WORK = re.compile(r"at work: (\d+)")
_NUMBER_IN_GROUP = re.compile(r"\[PG [^\]]*Rank (\d+)\]")
# PG ID 3 ..., PG GUID 3(...), or older: PG 3.
_PROCESS_GROUP = re.compile(r"\bPG (?:ID )?(\d+)")
_TIMEOUT_MS = re.compile(r"Timeout\(ms\)=(\d+)")
_LAST_WORK = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d+), last completed (?:NCCL )?work: (-?\d+)"
)


def gpu_memory(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """How much memory was missing, and whether it is available in pieces."""
    text = lines[0].text
    asked = _bytes(rf"Tried to allocate {_SIZE}", text)
    free = _bytes(rf"of which {_SIZE} is free", text) or _bytes(rf"{_SIZE} free", text)
    if asked is None or free is None:
        return []
    short = size_text(max(0, asked - free))
    found = [
        f"{size_text(asked)} were requested and {size_text(free)} are free: at least {short} short"
    ]
    pieces = _bytes(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    if pieces is not None and pieces + free >= asked:
        found.append(
            f"{size_text(pieces)} are reserved but unallocated, which would be enough: start with step 1"
        )
    elif pieces is not None:
        found.append(
            f"only {size_text(pieces)} are reserved but unallocated, so step 1 will not be enough"
        )
    total = _bytes(rf"total capac\w+ of {_SIZE}", text)
    own = _bytes(rf"this process has {_SIZE} memory in use", text)
    if total is not None and own is not None and total - own - free > 2**30:
        found.append(
            f"{size_text(total - own - free)} of this GPU belong to other processes: nvidia-smi lists them"
        )
    return found + ranks(log, lines)


def nccl_timeout(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """Which ranks the others waited for: those in other operations, those behind, those that reported nothing.

    Only ranks of one process group are compared: operations of different groups have nothing to do with one another.
    """
    limit = _TIMEOUT_MS.search(lines[0].text)
    found = [f"the limit was {int(limit[1]) / 1000:g} s"] if limit else []
    where = (group.where_ranks_stood() for group in _groups(log))
    return found + [Guess(place) for place in where if place][:1]


def _group(text: str) -> str:
    """The process group that a line of NCCL's watchdog names; empty if none."""
    found = _PROCESS_GROUP.search(text)
    return str(int(found[1])) if found else ""


@dataclass
class _Group:
    """What the ranks of one process group say of their operations.

    Attributes:
        first: each rank's first operation that timed out: number and kind.
        enqueued: the number of each rank's last enqueued one.
        numbered: ranks that have the same number in the group as in the job: up to these, the group has all ranks.
    """

    first: dict[int, tuple[int, str]] = field(default_factory=dict)
    enqueued: dict[int, int] = field(default_factory=dict)
    numbered: set[int] = field(default_factory=set)

    def where_ranks_stood(self) -> str:
        """Which ranks the others waited for; empty if they do not tell."""
        by_kind = ranks_by({rank: kind for rank, (_, kind) in self.first.items()})
        by_number = sorted(
            ranks_by({rank: number for rank, (number, _) in self.first.items()}).items()
        )
        if len(by_kind) > 1:
            ways = "; ".join(
                f"{ranks_text(own)} in {kind}" for kind, own in sorted(by_kind.items())
            )
            return f"the ranks took different paths: {ways}: uneven batches, or an `if rank == 0` around a collective"
        if len(by_number) > 1:
            (behind, late), (ahead, _) = by_number[0], by_number[-1]
            return f"{ranks_text(late)} lagged behind the others (operation {behind} of {ahead}): look there"
        read = {*self.first, *self.enqueued}
        silent = sorted(set(range(max(self.numbered, default=-1) + 1)) - read)
        if silent and len(read) >= len(silent):  # one rank's log says nothing of the others
            return f"{ranks_text(silent)} did not report this timeout: look there first"
        by_last = ranks_by(self.enqueued)
        if len(by_last) > 1:
            fewest, late = min(by_last.items())
            return f"{ranks_text(late)} had started the fewest operations ({fewest}): look there first"
        return ""


def _groups(log: Log) -> list[_Group]:
    """The process groups that the log names.

    A line that names none is of the one that the same rank names elsewhere for the same operation, or of none.
    """
    groups: dict[str, _Group] = {}
    parts = ("SeqNum=", "last enqueued", "at work: ")
    seen = {line.index: line for part in parts for line in log.containing(part)}
    at_work = {
        (line.rank, at[1]): _group(line.text)
        for line in seen.values()
        if (at := _AT_WORK.search(line.text))
    }
    for _, line in sorted(seen.items()):
        work, last, rank = _WORK.search(line.text), _LAST_WORK.search(line.text), line.rank
        named = _group(line.text) or (work and at_work.get((rank, work[1])))
        if rank is None or not named:
            continue
        group = groups.setdefault(named, _Group())
        if work:
            place = (int(work[1]), work[2])
            group.first[rank] = min(group.first.get(rank, place), place)
        if last:
            group.enqueued[rank] = int(last[1])
        own = _NUMBER_IN_GROUP.search(line.text)
        if own and int(own[1]) == rank:
            group.numbered.add(rank)
    return list(groups.values())


def lost_peer(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """Whether the rank that is gone has failed at all: the launcher would have reported it."""
    found = ranks(log, lines)
    losers = {line.rank for line in lines if line.rank is not None}
    failed = {
        int(rank[1])
        for line in log.containing("rank ")
        if (rank := re.match(r"\s*rank +: (\d+)", line.text))
    }
    if failed and failed == losers:
        found.append(
            "no other rank has failed: the missing one finished before the others (uneven batches?)"
        )
    return found


def first_failure(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """The rank that failed first according to the launcher, and its exit code."""
    text = root_cause(log)
    rank = re.search(r"\b((?:local_)?rank) *: (\d+)", text)
    code = re.search(r"exitcode *: (-?\d+)", text)
    if rank is None or code is None:
        return ranks(log, lines)
    host = re.search(r"\bhost +: (\S+)", text)
    where = f" on {host[1]}" if host else ""
    by = f" ({signal_name(-int(code[1]))})" if code[1].startswith("-") else ""
    return [f"{rank[1]} {rank[2]}{where} failed first, with exit code {code[1]}{by}"]


def root_cause(log: Log) -> str:
    """What torchrun says of the first failure, of the job or else a host."""
    begin = next(log.indices("failed (exitcode: "), len(log.raw))
    begin = next(log.indices("Root Cause (first"), begin)
    return "\n".join(log.raw[begin : begin + 10])


def ranks(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """The ranks that show it, if there are several."""
    seen = {line.rank for line in lines if line.rank is not None}
    return [f"on {ranks_text(seen)}"] if len(seen) > 1 else []


def _bytes(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None
