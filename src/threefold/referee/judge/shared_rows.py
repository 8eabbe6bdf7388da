"""Rows that two data ranks read in one step, and ranks of one model copy that read different rows."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from threefold.errors import ranks_text
from threefold.referee.judge.epochs import Epoch
from threefold.referee.judge.groups import RankGroups
from threefold.referee.judge.parts import JudgedPart, Rows, none_here, not_judged, proved, refuted
from threefold.referee.record import RankRecord

DATA_RANKS, MODEL_COPY = "rows of data ranks", "rows of one model copy"

# From this share of the reads on, rows that two ranks read are no coincidence of equal rows in a data set.
_SHARE_REFUTED = 0.5
# A data set of which fewer rows differ, or more of the first reads repeat, does not tell its rows apart.
_FEWEST_ROWS, _LEAST_FRESH = 8, 0.5


def judge_data_ranks(groups: RankGroups, epochs: list[Epoch] | str) -> JudgedPart:
    """Whether each data rank read rows of its own in every step."""
    if groups.obstacle is not None:
        return not_judged(DATA_RANKS, groups.obstacle)
    if groups.num_data_ranks == 1:
        return none_here(DATA_RANKS, f"there is one data rank ({groups.how})")
    ranks = groups.first_of_each
    steps = [rows_by_step(record) for record in ranks]
    for pair in combinations(range(len(ranks)), 2):
        numbers = [ranks[place].rank for place in pair]
        if part := _judge_pair(numbers, *(steps[place] for place in pair), how=groups.how):
            is_clear = all(_tells_rows_apart(ranks[place]) for place in pair)
            return part if is_clear else not_judged(DATA_RANKS, f"{part.what}; but most rows of the data set are equal")
    reads = Counter(row for record in ranks for call in record.calls for row in call.rows)
    # Contents that never come again may be random: then only the samplers show that rows differ.
    if max(reads.values()) == 1 and (isinstance(epochs, str) or not all(epoch.divides for epoch in epochs)):
        return not_judged(DATA_RANKS, "no row came again, so it does not show whether a row looks the same each time")
    what = f"no row was read by two of {len(ranks)} data ranks in one of {max(map(len, steps))} steps"
    return proved(DATA_RANKS, f"{what} ({reads.total()} reads; {groups.how} shows the data ranks)")


def _tells_rows_apart(record: RankRecord) -> bool:
    """Whether a rank reads mostly rows that it has not read, before it has read as many as there are."""
    reads = [row for call in record.calls for row in call.rows]
    num_known = len(set(reads))
    return num_known >= _FEWEST_ROWS and len(set(reads[:num_known])) >= _LEAST_FRESH * num_known


def _judge_pair(numbers: list[int], first: dict[int, Rows], second: dict[int, Rows], *, how: str) -> JudgedPart | None:
    """What two data ranks read both; None if that is no row."""
    common = sorted(first.keys() & second.keys())
    shared = {step: (first[step] & second[step]).total() for step in common}
    num_shared, num_reads = sum(shared.values()), sum(first[step].total() for step in common)
    if not num_shared:
        return None
    first_step = next(step for step in common if shared[step])
    what = f"{ranks_text(numbers)} read {num_shared} of {num_reads} rows both, first in step {first_step}"
    if num_shared < _SHARE_REFUTED * num_reads:
        return not_judged(DATA_RANKS, f"{what}: an epoch that was filled up, or equal rows of the data set")
    same = [step for step in common if first[step] == second[step]]
    if num_shared == num_reads:
        what = f"{ranks_text(numbers)} trained on the same rows in {len(same)} of {len(common)} steps"
    return refuted(
        DATA_RANKS,
        what,
        expected=f"rows of its own for each data rank ({how}); {len(numbers)} ranks do the work of one",
        where="the DataLoader: give it a DistributedSampler, and call its set_epoch before each epoch",
    )


def judge_model_copies(groups: RankGroups) -> JudgedPart:
    """Whether the ranks of one model copy read the same rows in every step."""
    if groups.unknown is not None:
        return not_judged(MODEL_COPY, f"it does not show which ranks share a copy ({groups.unknown})")
    shared = [members for members in groups.members if len(members) > 1]
    if not shared:
        return none_here(MODEL_COPY, "no two ranks compute one copy of the model")
    for first, *others in shared:
        rows = rows_by_step(first)
        for other in others:
            others_rows = rows_by_step(other)
            differing = [step for step in sorted(rows.keys() & others_rows.keys()) if rows[step] != others_rows[step]]
            if differing:
                return refuted(
                    MODEL_COPY,
                    f"{ranks_text([first.rank, other.rank])} read different rows in {len(differing)} of {len(rows)} "
                    f"steps, first in step {differing[0]}",
                    expected="the same rows on ranks that compute one copy of the model: each holds a part of it",
                    where="the sampler: num_replicas and rank are those of the data ranks, not of all ranks",
                )
    num_steps = max(len(rows_by_step(first)) for first, *_ in shared)
    return proved(MODEL_COPY, f"ranks of one model copy read the same rows in each of {num_steps} steps")


def rows_by_step(record: RankRecord) -> dict[int, Rows]:
    """The rows that a rank read in each step."""
    steps: dict[int, Rows] = {}
    for call in record.calls:
        steps.setdefault(call.step, Counter()).update(call.rows)
    return steps
