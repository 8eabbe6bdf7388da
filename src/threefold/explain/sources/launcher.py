"""torchrun: which of the processes that it started ended, on which host, with which code. No torch."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from threefold.explain.log import Log, LogLine

_HOST = re.compile(r"\bhost +: (\S+)")
_RANK = re.compile(r"\brank *: (\d+)")
_NUMBERS = (_RANK, re.compile(r"\blocal_rank *: (\d+)"), re.compile(r"exitcode *: (-?\d+)"))
_REPORT_LINES = 10  # lines from the heading of the first failure on


class Exit(NamedTuple):
    """How a process ended, as far as lines show: a rank of the job, or only a `local_rank` of one host."""

    host: str | None
    rank: int | None
    local_rank: int | None
    code: int | None


def first_exit(log: Log) -> Exit:
    """What torchrun reports about the first failure, of the job or else of a host."""
    if (root := next(log.indices("Root Cause (first"), None)) is not None:
        return _exit(log.raw[root : root + _REPORT_LINES])
    begin = next(log.indices("failed (exitcode: "), len(log.raw))
    return _exit(log.raw[begin : begin + 1])


def rank_of_exit(log: Log, line: LogLine) -> int | None:
    """The rank whose end a line of torchrun reports: that of its entry in the table, or else of the first failure."""
    own = _exit(log.raw[line.index - 1 : line.index + 1]).rank
    return first_exit(log).rank if own is None else own


def failed_ranks(log: Log) -> set[int]:
    """The ranks in torchrun's table of failures."""
    ranks = (_RANK.match(line.text.lstrip()) for line in log.containing("rank "))
    return {int(rank[1]) for rank in ranks if rank}


def _exit(lines: Sequence[str]) -> Exit:
    text = "\n".join(lines)
    host, *numbers = (form.search(text) for form in (_HOST, *_NUMBERS))
    return Exit(host and host[1], *(number and int(number[1]) for number in numbers))
