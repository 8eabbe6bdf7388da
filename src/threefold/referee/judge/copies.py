"""Whether ranks that hold the same part of a weight or a gradient hold the same values, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

from threefold.errors import ranks_text
from threefold.referee.judge.groups import RankGroups
from threefold.referee.judge.parts import JudgedPart, none_here, not_judged, proved, refuted
from threefold.referee.record import RankRecord

COPIES = "copies of weights"

# A part, by its name and its place, among the ranks of which it is known that they hold copies of it.
_Held = tuple[tuple[int, ...], str, tuple[int, ...], tuple[int, ...]]


def judge_copies(groups: RankGroups) -> JudgedPart:
    """Compares the digests of the checked steps, of all ranks."""
    ranks = [record for group in groups.members for record in group]
    if len(ranks) == 1:
        return none_here(COPIES, "there is one rank")
    num_steps = min(len(record.checked) for record in ranks)
    num_copies = 0
    for place in range(num_steps):
        step = ranks[0].checked[place]["step"]
        for kind in ("weights", "gradients"):
            first: dict[_Held, tuple[int, str]] = {}
            for record in ranks:
                for held, value in _held(record, place, kind):
                    other, expected = first.setdefault(held, (record.rank, value))
                    num_copies += other != record.rank
                    if value != expected:
                        return _different(kind, held[1], [other, record.rank], step)
    if not num_copies:
        return (
            none_here(COPIES, "no two ranks are known to hold the same part of a weight")
            if num_steps
            else _unrecorded()
        )
    return proved(COPIES, f"equal to the last bit on {ranks_text({each.rank for each in ranks})} in {num_steps} steps")


def _unrecorded() -> JudgedPart:
    return not_judged(COPIES, "no step was recorded with its weights (--steps 0)")


def _held(record: RankRecord, place: int, kind: str) -> Iterator[tuple[_Held, str]]:
    """The digest of each part that a rank holds, where it shows who holds the same."""
    match record.placement.get("how"):
        case "DistributedDataParallel":
            among = tuple(record.placement["data_ranks"])
        case None | "FullyShardedDataParallel":  # plain tensors may be parts of anything
            return
        case _:
            among = ()
    for name, part in record.checked[place]["curve"].get(kind, {}).items():
        yield (among, name, tuple(part["begin"]), tuple(part["size"])), part["digest"]


def _different(kind: str, name: str, ranks: list[int], step: int) -> JudgedPart:
    where = {
        "weights": "what changes weights on one rank only: a random start without a seed, a load, an update",
        "gradients": "what sums gradients over ranks: a parameter that it leaves out, no_sync on the last micro-batch",
    }[kind]
    what = f"{ranks_text(ranks)} hold different {kind} of {name} in step {step}"
    return refuted(COPIES, what, expected="the same values wherever the same part is held", where=where)
