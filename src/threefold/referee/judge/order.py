"""The order of rows: whether the samplers of the data ranks agree, and whether a shuffled epoch has its own order."""

from __future__ import annotations

from itertools import pairwise

from threefold.referee.judge.epochs import Epoch
from threefold.referee.judge.groups import RankGroups
from threefold.referee.judge.parts import JudgedPart, none_here, not_judged, proved, refuted

ORDER = "order of epochs"

# Fewer rows come in the same order by chance.
_FEWEST_ROWS = 8


def judge_order(groups: RankGroups, epochs: list[Epoch] | str) -> JudgedPart:
    """Whether all data ranks follow one order, and whether each epoch that is shuffled has one of its own."""
    if isinstance(epochs, str):
        return not_judged(ORDER, epochs)
    if groups.obstacle is not None:
        return not_judged(ORDER, groups.obstacle)
    ranks = [record.rank for record in groups.first_of_each]
    for epoch in epochs:
        if part := _different_settings(epoch, ranks) or _wrong_shares(epoch):
            return part
    ended = [epoch for epoch in epochs if epoch.ended]
    if len(ended) < 2:
        return none_here(ORDER, "fewer than two epochs ended, so there is no second order")
    same = [epoch.number for before, epoch in pairwise(ended) if before.rows == epoch.rows]
    if any(2 * len(before.counts & epoch.counts) < len(epoch.counts) for before, epoch in pairwise(ended)):
        return not_judged(ORDER, "most rows of an epoch are not those of the epoch before, so orders do not show")
    if not same:
        return proved(ORDER, f"{len(ended)} epochs, each in an order of its own")
    first = epochs[0].passes[0]
    shuffles = first.setting("shuffle") or any("Random" in each["class"] for each in first.samplers)
    if not shuffles:
        return none_here(ORDER, "equal in each epoch; the sampler does not shuffle")
    if min(len(set(rows)) for rows in epochs[0].rows) < _FEWEST_ROWS:
        return not_judged(ORDER, f"a rank reads fewer than {_FEWEST_ROWS} different rows in an epoch")
    return refuted(
        ORDER,
        f"epoch {same[0]} read its rows in the order of the epoch before ({len(same)} of {len(ended) - 1} epochs do)",
        expected=f"a new order in each epoch: {first.samplers[-1]['class']} is asked to shuffle",
        where="the loop over epochs: sampler.set_epoch(epoch) before each of them",
    )


def _different_settings(epoch: Epoch, ranks: list[int]) -> JudgedPart | None:
    """A sampler whose order is not that of rank 0. Ranks with data sets of their own have orders of their own."""
    if epoch.replicas is None:
        return None
    for names in (("seed", "initial_seed"), ("epoch",), ("num_replicas", "num_processes")):
        values = [each.setting(*names) for each in epoch.passes]
        other = next((place for place, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            return refuted(
                ORDER,
                f"in epoch {epoch.number} the sampler of rank {ranks[other]} has {names[0]} {values[other]}, "
                f"that of rank {ranks[0]} has {values[0]}",
                expected="one order of the data set, of which each data rank reads its share",
                where=f"where the sampler is made, or its epoch set: {names[0]} must not depend on the rank",
            )
    return None


def _wrong_shares(epoch: Epoch) -> JudgedPart | None:
    """Samplers that do not deal out all rows to the data ranks, each to one of them."""
    if epoch.replicas is None:
        return None
    num_ranks = len(epoch.passes)
    shares = [each.setting("rank", "process_index") for each in epoch.passes]
    collide = len(set(shares)) < num_ranks and not epoch.is_disjoint
    if epoch.replicas <= num_ranks and not collide:
        return None
    numbers = ", ".join(map(str, shares))
    return refuted(
        ORDER,
        f"the samplers divide the rows by {epoch.replicas} and read the shares {numbers} on {num_ranks} data ranks",
        expected="num_replicas is the number of data ranks, and each of them reads another share",
        where="where the sampler is made: num_replicas and rank are those of the data ranks",
    )
