"""Rows never read, or read twice, in an epoch.

An epoch is a pass of the DataLoader whose batches reached the model on every data rank. Its rows are known by their
contents, so what changes from epoch to epoch (augmented rows, random masks) is not judged by them. How many rows there
should be is known from the data set where a sampler of a known kind draws from all of it; else from the other epochs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from threefold.referee.judge.groups import RankGroups
from threefold.referee.judge.parts import JudgedPart, Rows, not_judged, proved, refuted
from threefold.referee.record import LoaderPass, RankRecord

EPOCHS = "rows of an epoch"

# Samplers that read every row of a data set once, those of one data rank together with those of the others.
_READS_ALL_ROWS = {"DistributedSampler", "RandomSampler", "SequentialSampler", "SeedableRandomSampler"}
_BATCHES = {"BatchSampler", "BatchSamplerShard"}
_PACKAGES = {"torch", "accelerate"}


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

    @property
    def ended(self) -> bool:
        """Whether every data rank has read it to its end."""
        return all(each.ended for each in self.passes)

    @property
    def replicas(self) -> int | None:
        """Into how many shares the samplers divide the rows; None: they do not."""
        return self.passes[0].setting("num_replicas", "num_processes")

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
        shares = {each.setting("rank", "process_index") for each in self.passes}
        orders = {(each.setting("seed", "initial_seed"), each.setting("epoch")) for each in self.passes}
        return self.replicas == len(self.passes) == len(shares) and len(orders) == 1

    def num_rows(self) -> int | None:
        """How many rows the data set has; None if that is not known."""
        counts = [each.rows for each in self.passes if each.rows is not None and is_known(each)]
        if len(counts) < len(self.passes):
            return None
        # Without shares, each rank has a data set of its own, or all of them read the same one.
        if self.replicas in (None, 1) and self.is_disjoint:
            return sum(counts)
        return counts[0] if len(set(counts)) == 1 else None


def is_known(loader_pass: LoaderPass) -> bool:
    """Whether the samplers of a pass read every row of its data set once."""
    *outer, inner = loader_pass.samplers or [{"class": None, "package": None}]
    if {each["package"] for each in (*outer, inner)} - _PACKAGES or {each["class"] for each in outer} - _BATCHES:
        return False
    if inner["class"] == "RandomSampler" and inner.get("num_samples") != loader_pass.rows:
        return False
    return inner["class"] in _READS_ALL_ROWS and not inner.get("replacement")


def epochs_of(ranks: list[RankRecord]) -> list[Epoch] | str:
    """The epochs that the data ranks (one record each) have trained on, or why they cannot be found."""
    names = [dict.fromkeys(call.loader_pass for call in record.calls) for record in ranks]
    if any(None in each for each in names):
        return "the rows do not come from torch's DataLoader"
    if (num_loaders := len({name[0] for each in names for name in each if name is not None})) > 1:
        return f"the rows come from {num_loaders} DataLoaders"
    epochs: list[Epoch] = []
    # In the order of use on each rank: a rank may have begun a pass that it never trained on.
    for used in zip(*names, strict=False):
        passes = [
            record.passes[name] for record, name in zip(ranks, used, strict=True) if name and name in record.passes
        ]
        if len(passes) < len(ranks):
            return "a rank was killed, so its record does not tell the passes of its DataLoader"
        rows = [
            [row for call in record.calls if call.loader_pass == name for row in call.rows]
            for record, name in zip(ranks, used, strict=True)
        ]
        epochs.append(Epoch(len(epochs) + 1, passes, rows))
    foreign = (why for epoch in epochs for why in _foreign_rows(epoch))
    return next(foreign, epochs) or "no rank has trained on an epoch"


def _foreign_rows(epoch: Epoch) -> list[str]:
    """Why the rows of the calls of the model are not those of the loader; nothing if they are, by their number."""
    for each, rows in zip(epoch.passes, epoch.rows, strict=True):
        size = each.setting("batch_size")
        if size is None:
            return ["the size of the DataLoader's batches is not known"]
        if each.setting("split_batches"):
            size //= each.setting("num_processes")
        # A pass that was broken off may have handed out batches that were not trained on.
        if len(rows) > each.batches * size or (each.ended and len(rows) <= (each.batches - 1) * size):
            return [f"the model is called with {len(rows)} rows of {each.batches} batches of {size}"]
    return []


def judge_epochs(groups: RankGroups, epochs: list[Epoch] | str) -> JudgedPart:
    """Whether every row was read once in every epoch."""
    if isinstance(epochs, str):
        return not_judged(EPOCHS, epochs)
    if groups.obstacle is not None:
        return not_judged(EPOCHS, groups.obstacle)
    ended = [epoch for epoch in epochs if epoch.ended]
    if any(each.setting("replacement") for each in epochs[0].passes):
        return not_judged(EPOCHS, "the sampler draws rows with replacement")
    if not ended:
        return not_judged(EPOCHS, f"no epoch ended: {epochs[0].counts.total()} reads so far")
    num_rows = epochs[0].num_rows()
    known = {row for epoch in epochs for row in epoch.counts}
    if num_rows is None:
        return _by_one_another(ended, known)
    if len(known) > num_rows:
        what = f"{len(known)} different rows were read of a data set of {num_rows}"
        return not_judged(EPOCHS, f"{what}: they change from epoch to epoch, by augmentation or padding")
    for epoch in ended:
        if part := _incomplete(epoch, num_rows=num_rows, known=known):
            return part
    if any(_num_repeated(epoch, num_rows) > 0 for epoch in ended):
        return not_judged(EPOCHS, "rows came twice in each epoch: the data set may hold equal ones")
    # Contents that never come again may be random: then only the samplers show that rows are read once.
    if len(ended) == 1 and not epochs[0].divides:
        return not_judged(EPOCHS, "one epoch does not show whether a row looks the same each time")
    reads = [epoch.counts.total() for epoch in ended]
    left_out, filled = max(num_rows - min(reads), 0), max(max(reads) - num_rows, 0)
    if left_out and not any(each.get("drop_last") for each in epochs[0].passes[0].samplers):
        return not_judged(EPOCHS, f"{left_out} of {num_rows} rows left the DataLoader and did not reach the model")
    dropped = f"; {left_out} were left out at its end (drop_last)" if left_out else ""
    again = f"; {filled} were read again to fill its last batches" if filled else ""
    return proved(EPOCHS, f"each of {num_rows} rows was read once in each epoch, of {len(ended)}{dropped}{again}")


def _by_one_another(ended: list[Epoch], known: set[str]) -> JudgedPart:
    """Judges epochs of a data set of unknown size: all of them must have read the same rows, each once."""
    if len(ended) < 2:
        return not_judged(EPOCHS, "how many rows an epoch has is not known, and fewer than two epochs ended")
    if all(len(known) == len(epoch.counts) == epoch.counts.total() for epoch in ended):
        return proved(EPOCHS, f"{len(ended)} epochs read the same {len(known)} rows, each once")
    return not_judged(EPOCHS, "how many rows an epoch has is not known, and the epochs read different ones")


def _num_repeated(epoch: Epoch, num_rows: int) -> int:
    """Reads of a row that had been read, without those that fill the last batch."""
    counts = epoch.counts
    return counts.total() - len(counts) - max(counts.total() - num_rows, 0)


def _incomplete(epoch: Epoch, *, num_rows: int, known: set[str]) -> JudgedPart | None:
    """What is wrong with an epoch: too few reads, too many, or rows that another epoch has and this one lacks."""
    counts = epoch.counts
    num_reads = counts.total()
    # What drop_last leaves out, or what fills the last batches.
    tolerated = sum(each.setting("batch_size") or 1 for each in epoch.passes)
    # Equal rows of a data set repeat too, but then no row is lacking that another epoch has.
    lacking = len(known) - len(counts) - max(num_rows - num_reads, 0)
    twice = sum(count > 1 for count in counts.values())
    if _num_repeated(epoch, num_rows) > 0 and lacking > 0:
        what = f"epoch {epoch.number} read {twice} rows more than once and {num_rows - len(counts)} of {num_rows} never"
    elif num_rows - num_reads > tolerated:
        what = f"epoch {epoch.number} made {num_reads} reads of {num_rows} rows: {num_rows - len(counts)} never"
    elif num_reads - num_rows > tolerated:
        what = f"epoch {epoch.number} made {num_reads} reads of {num_rows} rows: {twice} more than once"
    else:
        return None
    return refuted(
        EPOCHS,
        what,
        expected=f"each of the {num_rows} rows once, by one data rank",
        where="the sampler of each rank: equal seed and epoch, num_replicas the number of data ranks, rank its own",
    )
