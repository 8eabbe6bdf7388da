"""torchrun: which of the processes that it started ended, on which host, with which code. No torch."""

from __future__ import annotations

import re
from typing import NamedTuple

from threefold.explain.log import Log

_WHO = re.compile(r"\b(?:rank *: (\d+)|local_rank *: (\d+))")
_HOST = re.compile(r"\bhost +: (\S+)")
_CODE = re.compile(r"exitcode *: (-?\d+)")
_OF_TABLE = re.compile(r"\s*rank +: (\d+)")
_TOLD = 10  # lines from the heading of a failure on


class Exit(NamedTuple):
    """How a process ended: a rank of the job, or only a `local_rank` of one host."""

    rank: int | None
    local_rank: int | None
    host: str | None
    code: int | None


def first_exit(log: Log) -> Exit | None:
    """What torchrun says of the first failure, of the job or else a host."""
    begin = next(log.indices("failed (exitcode: "), len(log.raw))
    begin = next(log.indices("Root Cause (first"), begin)
    text = "\n".join(log.raw[begin : begin + _TOLD])
    who, host, code = (form.search(text) for form in (_WHO, _HOST, _CODE))
    if who is None:
        return None
    rank, local = (int(number) if number else None for number in who.groups())
    return Exit(rank, local, host and host[1], code and int(code[1]))


def failed_ranks(log: Log) -> set[int]:
    """The ranks in torchrun's table of failures."""
    found = (_OF_TABLE.match(line.text) for line in log.containing("rank "))
    return {int(rank[1]) for rank in found if rank}
