"""c10d and its NCCL: operations of process groups that timed out, reasons of errors, attempts to connect. No torch."""

import re
from functools import partial
from itertools import chain
from typing import NamedTuple

from threefold.explain.log import Log, LogLine

# Whether a line reports an attempt of torch to connect that will be repeated.
is_retry = re.compile(r"\[W\S* .*socket\.cpp").search
_PARTS = ("SeqNum=", "last enqueued")
_LATE = re.compile(r"SeqNum=(\d+), OpType=(\w+)")
_GROUP = r"\bPG (?:ID )?(\d+)"  # PG ID 3 ..., PG GUID 3(...), or older: PG 3
_WITHIN = r"\[PG [^\]]*Rank (\d+)\]"
_AT = r"at (?:NCCL )?work(?: sequence id)?: (\d+)"
_ENQUEUED = r"last enqueued (?:NCCL )?work: (-?\d+)"
_REASON = re.compile(r"(?:Last error:\s*\n(?:\[rank\d+\]: )?|NCCL WARN )(.+)")


class Work(NamedTuple):
    """What a line of a rank reports about the operations of a process group.

    Attributes:
        within: the rank's number in that group.
        late: number and kind of the operation that timed out.
        enqueued: number of the last one that was enqueued.
    """

    rank: int
    within: int | None
    late: tuple[int, str] | None
    enqueued: int | None


def works(log: Log) -> dict[int, list[Work]]:
    """What ranks report about the operations of each process group, in order.

    A line that names no group is of the one that the same rank names elsewhere for the same operation, or may be of
    any: then it says only that its rank reports.
    """
    lines = [log.line(index) for index in sorted({*chain(*map(log.indices, _PARTS))})]
    named = {(line.rank, _number(_AT, line)): _number(_GROUP, line) for line in lines}
    by_group: dict[int, list[Work]] = {}
    unnamed = []
    for line in lines:
        operation, group = _LATE.search(line.text), _number(_GROUP, line)
        late = operation and (int(operation[1]), operation[2])
        if group is None and late:
            group = named.get((line.rank, late[0]))
        if line.rank is None:
            continue
        if group is None:
            unnamed.append(Work(line.rank, None, None, None))
        else:
            work = Work(line.rank, _number(_WITHIN, line), late, _number(_ENQUEUED, line))
            by_group.setdefault(group, []).append(work)
    return {group: works + unnamed for group, works in by_group.items()}


def nccl_reason(log: Log) -> str:
    """The reason of NCCL's first error, if the log has it."""
    match = _REASON.search(log.firsts)
    return match[1] if match else ""


def _number(form: str, line: LogLine) -> int | None:
    match = re.search(form, line.text)
    return match and int(match[1])


# How long the operations of a group may take.
limit_ms = partial(_number, r"Timeout\(ms\)=(\d+)")
# The rank of a group that the others wait for when it is made.
awaited = partial(_number, r"ncclUniqueId from \[(\d+)\]")
