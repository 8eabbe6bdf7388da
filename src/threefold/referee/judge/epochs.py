"""Rows never read, or read twice, in an epoch; and their order: one for all data ranks, another in each epoch.

An epoch is a pass of the DataLoader whose batches reached the model on every data rank. Its rows are known by their
contents, so what changes from epoch to epoch (augmented rows, random masks) is not judged by this. How many rows there
should be is known from the data set where a sampler of a known kind draws from all of it; else from the other epochs.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

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
from threefold.referee.record import LoaderPass, Records

# Samplers that read every row of a data set once, those of one data rank together with those of the others.
_READS_ALL_ROWS = {
    "DistributedSampler",
    "RandomSampler",
    "SequentialSampler",
    "SeedableRandomSampler",
}
_BATCHES = {"BatchSampler", "BatchSamplerShard"}
_PACKAGES = {"torch", "accelerate", "threefold"}


@dataclass
class Epoch:
    """An epoch: its number from 1, and the pass and the rows of each data rank, in the order in which it read them."""

    number: int
    passes: list[LoaderPass]
    rows: list[list[str]]

    @property
    def counts(self) -> Rows:
        """How often each row was read, by all ranks."""
        return Counter(row for rank in self.rows for row in rank)

    def settings(self, *names: str) -> list[Any]:
        """The first of these settings that the samplers of each data rank have."""
        return [each.setting(*names) for each in self.passes]

    @property
    def ended(self) -> bool:
        """Whether every data rank has read it to its end."""
        return all(each.ended for each in self.passes)

    @property
    def replicas(self) -> int | None:
        """Into how many shares the samplers divide the rows; None: they do not."""
        return self.settings("num_replicas", "num_processes")[0]

    @property
    def is_disjoint(self) -> bool:
        """Whether no row was read by two data ranks."""
        return sum(len(set(rank)) for rank in self.rows) == len(self.counts)

    @property
    def divides(self) -> bool:
        """Whether samplers of known kinds deal out the rows, to each data rank another share of one order."""
        if not all(is_known(each) for each in self.passes):
            return False
        if len(self.passes) == 1:
            return True
        shares = set(self.settings("rank", "process_index"))
        orders = set(
            zip(self.settings("seed", "initial_seed"), self.settings("epoch"), strict=True)
        )
        return self.replicas == len(self.passes) == len(shares) and len(orders) == 1

    def num_rows(self) -> int | None:
        """Number of rows of the data set; None if unknown."""
        counts = [each.rows for each in self.passes if each.rows is not None and is_known(each)]
        if len(counts) < len(self.passes):
            return None
        # Without shares, each rank has its own data set, or all of them read the same one.
        if self.replicas in (None, 1) and self.is_disjoint:
            return sum(counts)
        return counts[0] if len(set(counts)) == 1 else None


# Or the reason why they cannot be found.
Epochs = list[Epoch] | str


def is_known(loader_pass: LoaderPass) -> bool:
    """Whether the samplers of a pass read every row of its data set once."""
    *outer, inner = loader_pass.samplers or [{"class": None, "package": None}]
    if {each["package"] for each in (*outer, inner)} - _PACKAGES or {
        each["class"] for each in outer
    } - _BATCHES:
        return False
    is_part = inner["class"] == "RandomSampler" and inner.get("num_samples") != loader_pass.rows
    return inner["class"] in _READS_ALL_ROWS and not inner.get("replacement") and not is_part


def epochs_of(ranks: Records) -> Epochs:
    """The epochs that the data ranks (one record each) have trained on, or why they cannot be found."""
    names = [dict.fromkeys(call.loader_pass for call in record.calls) for record in ranks]
    if any(None in each for each in names):
        return _epochs_by_rows(ranks) or "the rows do not come from torch's DataLoader"
    if (
        num_loaders := len({name[0] for each in names for name in each if name is not None})
    ) > 1:
        return f"the rows come from {num_loaders} DataLoaders"
    epochs: list[Epoch] = []
    # In the order of use on each rank: a rank may have begun a pass that it never trained on.
    for used in zip(*names, strict=False):
        pairs = list(zip(ranks, used, strict=True))
        passes = [
            record.passes[name] for record, name in pairs if name and name in record.passes
        ]
        if len(passes) < len(ranks):
            return (
                "a rank was killed, so its record does not show the passes over its DataLoader"
            )
        rows = [
            [row for call in record.calls if call.loader_pass == name for row in call.rows]
            for record, name in pairs
        ]
        epochs.append(Epoch(len(epochs) + 1, passes, rows))
    if any(None in epoch.settings("batch_size") for epoch in epochs):
        return _epochs_by_rows(ranks) or "the DataLoader's batch size is not known"
    return (
        next(filter(None, map(_foreign_rows, epochs)), None)
        or epochs
        or "no rank has trained on an epoch"
    )


def _epochs_by_rows(ranks: Records) -> list[Epoch]:
    """The epochs that the rows themselves show: none comes again before all others have come, but for a step's.

    Empty if fewer than two of them ended.
    """
    reads = [
        (call.step, rank, row)
        for rank, each in enumerate(ranks)
        for call in each.calls
        for row in call.rows
    ]
    times: Rows = Counter()
    by_epoch = defaultdict[int, list[tuple[int, int, str]]](list)
    for step, rank, row in sorted(reads, key=itemgetter(0)):
        times[row] += 1
        by_epoch[times[row]].append((step, rank, row))
    ended = [each for each in by_epoch.values() if len(each) == len(times)]
    if len(ended) < 2 or any(
        now[-1][0] > after[0][0] for now, after in pairwise(by_epoch.values())
    ):
        return []
    read = [LoaderPass(None, 0, ended=True, samplers=[])] * len(ranks)
    rows = [
        [[row for _, by, row in each if by == rank] for rank in range(len(ranks))]
        for each in ended
    ]
    return [Epoch(number, read, of_ranks) for number, of_ranks in enumerate(rows, start=1)]


def _foreign_rows(epoch: Epoch) -> str | None:
    """Why the rows of the calls of the model are not those of the loader; None if they are, by their number."""
    for each, rows in zip(epoch.passes, epoch.rows, strict=True):
        size = each.setting("batch_size")
        if each.setting("split_batches"):
            size //= each.setting("num_processes")
        lost = each.batches * size - len(rows)
        # A pass that was broken off may have yielded batches that were not trained on.
        if lost < 0 or (each.ended and lost >= (1 if each.setting("drop_last") else size)):
            return (
                f"the model is called with {len(rows)} rows of {each.batches} batches of {size}"
            )
    return None


@judges("rows of an epoch")
def judge_epochs(groups: RankGroups, epochs: Epochs) -> JudgedPart:
    """Whether every row was read once in every epoch."""
    epochs, ended = _known_epochs(groups, epochs)
    if any(epochs[0].settings("replacement")):
        raise Unjudgeable("the sampler draws rows with replacement")
    if not ended:
        raise Unjudgeable(f"no epoch ended: {epochs[0].counts.total()} reads so far")
    num_rows = epochs[0].num_rows()
    rows = {row for epoch in epochs for row in epoch.counts}
    if num_rows is None:
        return _by_one_another(ended, rows)
    if len(rows) > num_rows:
        raise Unjudgeable(
            f"{len(rows)} different rows were read of a data set of {num_rows}: they change from epoch to epoch, by "
            "augmentation or padding"
        )
    for epoch in ended:
        _check_complete(epoch, num_rows=num_rows, rows=rows)
    if any(_num_repeated(epoch, num_rows) > 0 for epoch in ended):
        raise Unjudgeable("rows came twice in each epoch: the data set may hold duplicates")
    # Contents that never come again may be random: then only the samplers show that rows are read once.
    if len(ended) == 1 and not epochs[0].divides:
        raise Unjudgeable("one epoch does not show whether a row looks the same each time")
    reads = [epoch.counts.total() for epoch in ended]
    left_out, filled = max(num_rows - min(reads), 0), max(max(reads) - num_rows, 0)
    if left_out and not any(each.get("drop_last") for each in epochs[0].passes[0].samplers):
        raise Unjudgeable(
            f"{left_out} of {num_rows} rows left the DataLoader and did not reach the model"
        )
    dropped = f"; {left_out} were left out at its end (drop_last)" if left_out else ""
    again = f"; {filled} were read again to fill its last batches" if filled else ""
    return proved(
        f"each of {num_rows} rows was read once in each epoch, of {len(ended)}{dropped}{again}"
    )


def _known_epochs(groups: RankGroups, epochs: Epochs) -> tuple[list[Epoch], list[Epoch]]:
    """All epochs, and those that ended; raises why they are not known, if they are not."""
    if isinstance(epochs, str):
        raise Unjudgeable(epochs)
    groups.check()
    return epochs, [epoch for epoch in epochs if epoch.ended]


def _by_one_another(ended: list[Epoch], rows: set[str]) -> JudgedPart:
    """Judges epochs of a data set of unknown size: all of them must have read the same rows, each once."""
    if len(ended) < 2:
        raise Unjudgeable("the size of an epoch is not known, and fewer than two epochs ended")
    if all(len(rows) == len(epoch.counts) == epoch.counts.total() for epoch in ended):
        return proved(f"{len(ended)} epochs read the same {len(rows)} rows, each once")
    raise Unjudgeable("the size of an epoch is not known, and the epochs read different rows")


def _num_repeated(epoch: Epoch, num_rows: int) -> int:
    """Reads of a row that had been read, without those that fill the last batch."""
    counts = epoch.counts
    return counts.total() - len(counts) - max(counts.total() - num_rows, 0)


def _check_complete(epoch: Epoch, *, num_rows: int, rows: set[str]) -> None:
    """Raises the problem of an epoch: too few reads, too many, or missing rows that another one has."""
    counts = epoch.counts
    num_reads = counts.total()
    # Rows that drop_last leaves out, or that fill the last batches.
    tolerated = sum(size or 1 for size in epoch.settings("batch_size"))
    # Equal rows of a data set repeat too, but then no row of another epoch is missing.
    lacking = len(rows) - len(counts) - max(num_rows - num_reads, 0)
    twice = sum(count > 1 for count in counts.values())
    if _num_repeated(epoch, num_rows) > 0 and lacking > 0:
        what = f"epoch {epoch.number} read {twice} rows more than once and {num_rows - len(counts)} of {num_rows} never"
    elif num_rows - num_reads > tolerated:
        what = f"epoch {epoch.number} made {num_reads} reads of {num_rows} rows: {num_rows - len(counts)} never"
    elif num_reads - num_rows > tolerated:
        what = f"epoch {epoch.number} made {num_reads} reads of {num_rows} rows: {twice} more than once"
    else:
        return
    raise Refuted(
        what,
        f"each of the {num_rows} rows once, by one data rank",
        "the sampler of each rank: same seed and epoch, num_replicas = number of data ranks, its own rank",
    )


# Fewer rows come in the same order by chance.
_FEWEST_ROWS = 8


@judges("order of epochs")
def judge_order(groups: RankGroups, epochs: Epochs) -> JudgedPart:
    """Whether all data ranks follow one order, and whether each epoch that is shuffled has its own."""
    epochs, ended = _known_epochs(groups, epochs)
    ranks = [record.rank for record in groups.first_of_each]
    for epoch in epochs:
        if epoch.replicas is not None:
            _check_settings(epoch, ranks)
            _check_shares(epoch, epoch.replicas)
    if len(ended) < 2:
        return none_here("fewer than two epochs ended: no two orders to compare")
    same = [epoch.number for before, epoch in pairwise(ended) if before.rows == epoch.rows]
    if any(
        2 * len(before.counts & epoch.counts) < len(epoch.counts)
        for before, epoch in pairwise(ended)
    ):
        raise Unjudgeable(
            "most rows differ from those of the epoch before: orders cannot be compared"
        )
    if not same:
        return proved(f"{len(ended)} epochs, each in its own order")
    first = epochs[0].passes[0]
    if not first.setting("shuffle") and not any(
        "Random" in each["class"] for each in first.samplers
    ):
        return none_here("the same in each epoch; the sampler does not shuffle")
    if min(len(set(rows)) for rows in epochs[0].rows) < _FEWEST_ROWS:
        raise Unjudgeable(f"a rank reads fewer than {_FEWEST_ROWS} different rows in an epoch")
    raise Refuted(
        f"epoch {same[0]} read its rows in the order of the epoch before ({len(same)} of {len(ended) - 1} epochs do)",
        f"a new order in each epoch: {first.samplers[-1]['class']} is asked to shuffle",
        "the loop over epochs: sampler.set_epoch(epoch) before each of them",
    )


def _check_settings(epoch: Epoch, ranks: list[int]) -> None:
    """Raises a sampler whose order is not that of rank 0; ranks with their own data sets have their own orders."""
    for names in (("seed", "initial_seed"), ("epoch",), ("num_replicas", "num_processes")):
        values = epoch.settings(*names)
        other = next((place for place, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise Refuted(
                f"in epoch {epoch.number} the sampler of rank {ranks[other]} has {names[0]} {values[other]}, "
                f"that of rank {ranks[0]} has {values[0]}",
                "one order of the data set, each data rank reading its share",
                f"where the sampler is made, or its epoch set: {names[0]} must not depend on the rank",
            )


def _check_shares(epoch: Epoch, replicas: int) -> None:
    """Raises samplers that do not deal out all rows to the data ranks, each to one of them."""
    num_ranks = len(epoch.passes)
    shares = epoch.settings("rank", "process_index")
    collide = len(set(shares)) < num_ranks and not epoch.is_disjoint
    if replicas <= num_ranks and not collide:
        return
    raise Refuted(
        f"the samplers divide the rows by {replicas} and read the shares {', '.join(map(str, shares))} on {num_ranks} "
        "data ranks",
        "num_replicas is the number of data ranks, and each of them reads a different share",
        "where the sampler is made: num_replicas and rank are those of the data ranks",
    )
