"""Where the ranks of a process group were, by its operations in dumps or in logs. No torch.

Operations of two process groups are never compared: each group counts its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from threefold.errors import ranks_text
from threefold.explain.sources.c10d import Work
from threefold.explain.sources.dumps import Dump, Operation

_Value = TypeVar("_Value", int, str)


@dataclass(frozen=True)
class Divergence:
    """The first operation of a group that is not the same, or not done, on all its ranks.

    Attributes:
        kind: `absent` (some ranks have not started it), `different`, or `unfinished` (all did, and it does not end).
        ranks: those to look at.
    """

    kind: str
    ranks: Sequence[int]
    text: str


def first_differences(dumps: Sequence[Dump]) -> list[Divergence]:
    """In each group with dumps of two ranks or more, the first operation that differs; none if all agree."""
    diffs = []
    for group in sorted({group for dump in dumps for group in dump.operations}):
        description, members = next(
            (dump.members[group] for dump in dumps if group in dump.members), ("", ())
        )
        ranks = {
            dump.rank: dump.operations.get(group, {})
            for dump in dumps
            if not members or dump.rank in members
        }
        if len(ranks) > 1 and (difference := _first(group, description, ranks)):
            diffs.append(difference)
    return sorted(diffs, key=lambda one: ("different", "absent", "unfinished").index(one.kind))


def _first(
    group: str, description: str, ranks: Mapping[int, Mapping[int, Operation]]
) -> Divergence | None:
    # Each ring has lost its oldest operations: what all still have is compared.
    begin = max((min(own) for own in ranks.values() if own), default=0)
    name = f"process group {group}" + (
        f" ({description})" if description and description != "undefined" else ""
    )
    for number in sorted(
        {number for own in ranks.values() for number in own if number >= begin}
    ):
        here = {rank: own[number] for rank, own in ranks.items() if number in own}
        absent = sorted(set(ranks) - set(here))
        what, kind = f"{name}, operation {number}", next(iter(here.values())).kind
        groups = ranks_by({rank: one.kind for rank, one in here.items()})
        if len(groups) == 1:
            groups = ranks_by({rank: one.call for rank, one in here.items()})
        if len(groups) > 1:
            ways = _ways(sorted(groups.items(), key=lambda it: -len(it[1])))
            fewest = min(groups.values(), key=len)
            return Divergence("different", fewest, f"{what}: {ways}{_at(here, fewest)}")
        if absent:
            last = {rank: max(ranks[rank], default=None) for rank in absent[:3]}
            did = "; ".join(
                f"the last of rank {rank} was {one}{_at(ranks[rank], [one])}"
                for rank, one in last.items()
            )
            did = f"{what}: not started by {ranks_text(absent)} ({did})"
            return Divergence("absent", absent, f"{did}; {ranks_text(sorted(here))} in {kind}")
        states = ranks_by({rank: one.state for rank, one in here.items()})
        if set(states) != {"completed"}:
            behind = [] if set(states) == {"scheduled"} else states.get("scheduled", [])
            came = "" if behind else ": all ranks joined"
            did = "; ".join(f"{state} on {ranks_text(own)}" for state, own in states.items())
            return Divergence("unfinished", behind, f"{what}, {kind}: {did}{came}")
    return None


def ranks_by(values: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Each value, and the ranks that have it."""
    groups: dict[_Value, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return groups


def _ways(groups: Sequence[tuple[str, list[int]]]) -> str:
    return "; ".join(f"{ranks_text(own)} in {way}" for way, own in groups)


def _at(operations: Mapping[int, Operation], which: Sequence[int | None]) -> str:
    place = next(
        (operations[one].place for one in which if one is not None and one in operations), None
    )
    return f", at {place}" if place else ""


def where_ranks_stood(works: Sequence[Work]) -> str:
    """Which ranks of one process group the others waited for; empty if the operations do not show it."""
    late = sorted(((one.late, one.rank) for one in works if one.late), reverse=True)
    first = {rank: operation for operation, rank in late}
    by_kind = ranks_by({rank: kind for rank, (_, kind) in first.items()})
    by_number = sorted(ranks_by({rank: number for rank, (number, _) in first.items()}).items())
    enqueued = {one.rank: one.enqueued for one in works if one.enqueued is not None}
    # Ranks that have the same number in the group as in the job: up to these, the group has all ranks.
    numbered = (one.rank for one in works if one.within == one.rank)
    if len(by_kind) > 1:
        ways = _ways(sorted(by_kind.items()))
        return f"the ranks took different paths: {ways}: uneven batches, or an `if rank == 0` around a collective"
    if len(by_number) > 1:
        (behind, slow), (ahead, _) = by_number[0], by_number[-1]
        return f"{ranks_text(slow)} lagged behind the others (operation {behind} of {ahead}): look there"
    read = {one.rank for one in works}
    silent = sorted(set(range(max(numbered, default=-1) + 1)) - read)
    if silent and len(read) >= len(silent):  # one rank's log shows nothing about the others
        return f"{ranks_text(silent)} did not report this timeout: look there first"
    by_last = ranks_by(enqueued)
    if len(by_last) > 1:
        fewest, slow = min(by_last.items())
        return (
            f"{ranks_text(slow)} had started the fewest operations ({fewest}): look there first"
        )
    return ""
