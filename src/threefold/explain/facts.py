"""Facts about an error: how much memory was missing, which rank was absent.

Each function gets the log and the lines that show the error, and returns sentences. No torch.
"""

from collections.abc import Sequence

from threefold.errors import ranks_text, size_text
from threefold.explain.groups import where_ranks_stood
from threefold.explain.log import Log, LogLine
from threefold.explain.sources import allocator, c10d, launcher
from threefold.explain.sources.wording import still_prepared
from threefold.mesh.local_ranks import signal_name

_LAST = 5000  # lines


class Guess(str):
    """A sentence about where to look, from what the logs of the ranks do not say; a dump would show it."""


def gpu_memory(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """How much memory was missing, and whether it is available in pieces."""
    asked, free, pieces, total, own = allocator.gpu_memory(lines[0].text)
    if asked is None or free is None:
        return []
    short = size_text(max(0, asked - free))
    sentences = [
        f"{size_text(asked)} were requested and {size_text(free)} are free: at least {short} short"
    ]
    if pieces is not None:
        sentences.append(
            f"{size_text(pieces)} are reserved but unallocated, which would be enough: start with step 1"
            if pieces + free >= asked
            else f"only {size_text(pieces)} are reserved but unallocated, so step 1 will not be enough"
        )
    if total is not None and own is not None and total - own - free > 2**30:
        sentences.append(
            f"{size_text(total - own - free)} of this GPU belong to other processes: nvidia-smi lists them"
        )
    return sentences + ranks(log, lines)


def nccl_timeout(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """Which ranks the others waited for: those in other operations, those behind, those that reported nothing.

    Only ranks of one process group are compared: operations of different groups have nothing to do with one another.
    """
    limit_ms = c10d.limit_ms(lines[0])
    sentences = [] if limit_ms is None else [f"the limit was {limit_ms / 1000:g} s"]
    if (rank := c10d.awaited(lines[0])) is not None:
        sentences.append(f"rank {rank} of the group did not come: look there first")
    if bar := still_prepared(log.raw[-_LAST:]):
        sentences.append(f"not done by then: {bar}")
    where = map(where_ranks_stood, c10d.works(log).values())
    return sentences + [Guess(place) for place in where if place][:1]


def nccl_reason(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """What NCCL gives as the reason."""
    reason = c10d.nccl_reason(log)
    return [f"NCCL's reason: {reason}"] if reason else ranks(log, lines)


def lost_peer(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """Whether the missing rank has failed at all: the launcher would have reported it."""
    sentences = ranks(log, lines)
    failed = launcher.failed_ranks(log)
    if failed and failed == {line.rank for line in lines if line.rank is not None}:
        sentences.append(
            "no other rank has failed: the missing one finished before the others (uneven batches?)"
        )
    return sentences


def first_failure(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """The process that failed first according to the launcher, and its exit code."""
    host, rank, local_rank, code = launcher.first_exit(log)
    if code is None or rank is local_rank is None:
        return ranks(log, lines)
    who = f"local_rank {local_rank}" if rank is None else f"rank {rank}"
    where = f" on {host}" if host else ""
    by = f" ({signal_name(-code)})" if code < 0 else ""
    return [f"{who}{where} failed first, with exit code {code}{by}"]


def ranks(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """The ranks that show it, if there are several."""
    named = {line.rank for line in lines if line.rank is not None}
    return [f"on {ranks_text(named)}"] if len(named) > 1 else []


def own_error(log: Log, lines: Sequence[LogLine]) -> list[str]:
    """The ranks that the first error ended, and how many other errors come after it."""
    same = [line for line in lines if line.text == lines[0].text]
    named = {line.rank for line in same if line.rank is not None}
    ended = [f"it ended {ranks_text(named)}"] if named else []
    others = len(lines) - len(same)
    return ended + ([f"errors after it: {others}"] if others else [])
