"""Comparisons of ranks: rows that two data ranks read in one step, rows that ranks of one model copy read differently,
and whether ranks that hold the same part of a weight or a gradient hold the same values, to the last bit."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product

from threefold.errors import ranks_text
from threefold.referee.judge.epochs import Epochs
from threefold.referee.judge.groups import RankGroups
from threefold.referee.judge.parts import (
    JudgedPart,
    Refuted,
    Rows,
    Unjudgeable,
    judges,
    none_here,
    proved,
)
from threefold.referee.record import RankRecord, Records

# From this share of the reads on, rows that two ranks read are no coincidence of equal rows in a data set.
_SHARE_REFUTED = 0.5
# A data set of which fewer rows differ, or more of the first reads repeat, does not distinguish its rows.
_FEWEST_ROWS, _LEAST_FRESH = 8, 0.5


@judges("rows of data ranks")
def judge_data_ranks(groups: RankGroups, epochs: Epochs) -> JudgedPart:
    """Whether each data rank read its own rows in every step."""
    groups.check()
    if groups.num_data_ranks == 1:
        return none_here(f"there is one data rank ({groups.how})")
    ranks = groups.first_of_each
    # A step that ends an epoch and begins the next may read a row for both.
    is_disjoint = isinstance(epochs, list) and all(epoch.is_disjoint for epoch in epochs)
    read = [(record, rows_by_step(record)) for record in ranks]
    for (first, mine), (second, others) in combinations(read, 2) if not is_disjoint else ():
        _check_pair([first, second], mine, others, how=groups.how)
    reads = Counter(row for record in ranks for call in record.calls for row in call.rows)
    # Contents that never come again may be random: then only the samplers show that rows differ.
    if max(reads.values()) == 1 and (
        isinstance(epochs, str) or not all(epoch.divides for epoch in epochs)
    ):
        raise Unjudgeable(
            "no row recurred, so it is unknown whether a row looks the same each time"
        )
    what = (
        f"no row was read by two of {len(ranks)} data ranks in one of "
        f"{max(record.num_steps for record in ranks)} steps"
    )
    return proved(f"{what} ({reads.total()} reads; {groups.how} shows the data ranks)")


def _tells_rows_apart(record: RankRecord) -> bool:
    """Whether a rank reads mostly rows that it has not read, before it has read as many as there are."""
    reads = [row for call in record.calls for row in call.rows]
    num_known = len(set(reads))
    return num_known >= _FEWEST_ROWS and len(set(reads[:num_known])) >= _LEAST_FRESH * num_known


def _check_pair(
    ranks: Records, first: dict[int, Rows], second: dict[int, Rows], *, how: str
) -> None:
    """Raises what two data ranks read both, if that is a row."""
    names = ranks_text(record.rank for record in ranks)
    common = sorted(first.keys() & second.keys())
    shared = {step: (first[step] & second[step]).total() for step in common}
    num_shared, num_reads = sum(shared.values()), sum(first[step].total() for step in common)
    if not num_shared:
        return
    first_step = next(step for step in common if shared[step])
    what = f"{names} both read {num_shared} of {num_reads} rows, first in step {first_step}"
    if num_shared < _SHARE_REFUTED * num_reads:
        raise Unjudgeable(f"{what}: an epoch that was padded, or duplicates in the data set")
    if not all(map(_tells_rows_apart, ranks)):
        raise Unjudgeable(f"{what}; but most rows of the data set are duplicates")
    same = [step for step in common if first[step] == second[step]]
    if num_shared == num_reads:
        what = f"{names} trained on the same rows in {len(same)} of {len(common)} steps"
    raise Refuted(
        what,
        f"separate rows for each data rank ({how}); {len(ranks)} ranks do the work of one",
        "the DataLoader: give it a DistributedSampler, and call its set_epoch before each epoch",
    )


@judges("rows of one model copy")
def judge_model_copies(groups: RankGroups) -> JudgedPart:
    """Whether the ranks of one model copy read the same rows in every step."""
    if groups.unknown is not None:
        raise Unjudgeable(f"it is not known which ranks share a copy ({groups.unknown})")
    shared = [members for members in groups.members if len(members) > 1]
    if not shared:
        return none_here("no two ranks compute one copy of the model")
    for first, *others in shared:
        sequence = groups.shared[first.rank]
        if not sequence.joins:
            raise Refuted(
                f"the positions of the parts of each row that {ranks_text(sequence.ranks)} hold do not fit together",
                "every position of a row once, from 0 on",
                "what gives each rank its positions: those of its tokens in the whole row",
            )
        rows = rows_by_step(first)
        for other in others:
            others_rows = rows_by_step(other)
            if differing := [
                step
                for step in sorted(rows.keys() & others_rows.keys())
                if rows[step] != others_rows[step]
            ]:
                raise Refuted(
                    f"{ranks_text([first.rank, other.rank])} read different rows in {len(differing)} of {len(rows)} "
                    f"steps, first in step {differing[0]}",
                    "the same rows on ranks that compute one copy of the model: each holds a part of it",
                    "the sampler: num_replicas and rank are those of the data ranks, not of all ranks",
                )
    return proved(
        "ranks of one model copy read the same rows in each of "
        f"{max(record.num_steps for record in groups.records)} steps"
    )


def rows_by_step(*ranks: RankRecord) -> dict[int, Rows]:
    """The rows that ranks read in each step."""
    steps: dict[int, Rows] = {}
    for record in ranks:
        for call in record.calls:
            steps.setdefault(call.step, Counter()).update(call.rows)
    return steps


# A part, by its name and its place, among the ranks of which it is known that they hold copies of it.
_Held = tuple[tuple[int, ...], str, tuple[int, ...], tuple[int, ...]]
_CHANGED_BY = {
    "weights": "what changes weights on one rank only: unseeded initialisation, a load, an update",
    "gradients": "what sums gradients over ranks: nothing, a parameter left out, no_sync on the last micro-batch",
}


@judges("copies of weights")
def judge_copies(groups: RankGroups) -> JudgedPart:
    """Compares the digests of the checked steps, of all ranks."""
    ranks = groups.records
    if len(ranks) == 1:
        return none_here("there is one rank")
    num_steps, num_copies = groups.num_checked, 0
    for place, kind in product(range(num_steps), _CHANGED_BY):
        first: dict[_Held, tuple[int, str]] = {}
        for record in ranks:
            for held, value in _part_digests(record, place, kind):
                other, expected = first.setdefault(held, (record.rank, value))
                num_copies += other != record.rank
                if value != expected:
                    raise Refuted(
                        f"{ranks_text([other, record.rank])} hold different {kind} of {held[1]} in step "
                        f"{record.checked[place]['step']}",
                        "the same values wherever the same part is held",
                        _CHANGED_BY[kind],
                    )
    if not num_copies:
        return none_here("no two ranks are known to hold the same part of a weight")
    return proved(
        f"equal to the last bit on {ranks_text({each.rank for each in ranks})} in {num_steps} steps"
    )


def _part_digests(record: RankRecord, place: int, kind: str) -> Iterator[tuple[_Held, str]]:
    """The digest of each part that a rank holds, where it shows who holds the same."""
    curve, how = record.checked[place]["curve"], record.placement.get("how")
    # Plain tensors may be parts of anything, and another model may be divided in another way.
    if how is None or curve["module"] != record.placement["module"]:
        return
    among = tuple(record.placement["data_ranks"]) if how == "DistributedDataParallel" else ()
    for name, part in curve.get(kind, {}).items():
        yield (among, name, tuple(part["begin"]), tuple(part["size"])), part["digest"]
