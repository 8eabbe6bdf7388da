"""Which ranks read their own rows (data ranks), and which compute one copy of the model together.

Ranks that share a sequence, as under context parallelism, are one data rank. The positions that a model is called with
show them: the parts of the ranks of one process group make whole rows, in an order that programs use. Where documents
begin anew inside a row, each position is the next one or 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from threefold.referee.judge.parts import Unjudgeable
from threefold.referee.record import RankRecord, ReadCall, Records, trained_calls

if TYPE_CHECKING:
    from torch import Tensor

    from threefold.referee.rank.rows import Tensors


@dataclass
class RankGroups:
    """Data ranks in their order, each with the ranks of its model copy; or why they cannot be distinguished.

    Attributes:
        how: what shows it.
        num_data_ranks: how many there are, with those that left no record.
        unknown: why nothing shows it; then every rank is its own group.
        shared: of each rank, the ranks that hold parts of its rows; it alone, if it holds all.
    """

    members: list[Records]
    how: str
    num_data_ranks: int
    unknown: str | None = None
    shared: dict[int, SharedSequence] = field(default_factory=dict)

    @property
    def records(self) -> Records:
        """Those of all ranks."""
        return [record for group in self.members for record in group]

    @property
    def first_of_each(self) -> Records:
        """One rank of each data rank."""
        return [group[0] for group in self.members]

    @property
    def num_checked(self) -> int:
        """Number of steps that all ranks have recorded with their weights; raises if there are none."""
        num_steps = min(len(record.checked) for record in self.records)
        if not num_steps:
            raise Unjudgeable("no step was recorded with its weights (--steps 0)")
        return num_steps

    def check(self) -> None:
        """Raises why data ranks cannot be compared, if they cannot."""
        if self.unknown is not None:
            raise Unjudgeable(
                f"it is not known which ranks read separate rows ({self.unknown})"
            )
        if len(self.members) < self.num_data_ranks:
            raise Unjudgeable(
                f"only {len(self.members)} of {self.num_data_ranks} data ranks left a record"
            )


def groups_of(ranks: Records) -> RankGroups:
    """The groups that the placements of the ranks show."""
    try:
        return _known_groups(ranks)
    except Unjudgeable as why:
        return RankGroups([[record] for record in ranks], "", len(ranks), str(why))


def _known_groups(ranks: Records) -> RankGroups:
    if mixed := next((record.mixed for record in ranks if record.mixed), None):
        raise Unjudgeable(mixed)
    first, shared = ranks[0], sequences_of(ranks)
    if first.world_size == 1:
        return RankGroups([ranks], "one process", 1, shared=shared)
    groups = defaultdict[int, Records](list)
    for record in with_whole_rows(ranks, shared):
        placement, peers = record.placement, shared[record.rank].ranks
        if unknown := placement.get("unknown"):
            raise Unjudgeable(f"rank {record.rank}: {unknown}")
        if len(peers) == 1 and (splits := placement.get("splits")):
            raise Unjudgeable(f"the axis {splits!r} may split rows among ranks")
        if begin := min((call.begin for call in record.calls), default=0):
            raise Unjudgeable(
                f"rank {record.rank} reads rows from position {begin} on, as if ranks shared a sequence; the "
                "positions do not show which"
            )
        data_ranks = placement["data_ranks"]
        groups[min(map(data_ranks.index, {*peers} & {*data_ranks}))].append(record)
    members = [groups[index] for index in sorted(groups)]
    for leader, *others in members:
        for other in others:
            # Two programs in one world, or stages of a pipeline, have equal data ranks too.
            if other.rank not in (*leader.placement["together"], *shared[leader.rank].ranks):
                raise Unjudgeable(
                    f"ranks {leader.rank} and {other.rank} have the same data rank and share no parameter"
                )
    data_ranks = first.placement["data_ranks"]
    num_data_ranks = len(data_ranks) // len({*data_ranks} & {*shared[first.rank].ranks})
    return RankGroups(members, first.placement["how"], num_data_ranks, shared=shared)


# From so many different positions on, as a share of all, the parts of ranks are those of one row, and not alike.
_LEAST_TILED = 0.9


class SharedSequence(NamedTuple):
    """The ranks that hold parts of the same rows, in the order of their group.

    Attributes:
        order: that of `_joined` in which their parts make a row.
        joins: whether the positions of the parts follow one another there.
    """

    ranks: tuple[int, ...]
    order: int = 1
    joins: bool = True

    def whole(self, parts: list[Tensors]) -> Tensors:
        """The inputs of calls, whole, from those of each rank: [rows, tokens, ...] by call and name.

        Raises:
            Unjudgeable: random numbers of each rank are among them.
        """
        whole = {}
        for name, value in parts[0].items():
            call, _, kind = name.partition(".")
            if kind == "!random" and len(parts) > 1:
                raise Unjudgeable(
                    "ranks that share rows draw different random numbers: set dropout to 0"
                )
            positions = _positions_of(parts[0], call)
            if positions is not None and value.shape[1:2] == positions.shape[1:2]:
                value = _joined([part[name] for part in parts], self.order)
            whole[name] = value
        return whole


def sequences_of(ranks: Records) -> dict[int, SharedSequence]:
    """The sequence that each rank holds parts of; its own where the positions show no other."""
    calls = {record.rank: list(_positions(record)) for record in ranks}
    shared: dict[int, SharedSequence] = {}
    for record in ranks:
        for group in sorted(record.placement.get("groups", []), key=len, reverse=True):
            if calls.keys() >= set(group) and (
                sequence := _shared(tuple(group), [calls[rank] for rank in group])
            ):
                shared[record.rank] = sequence
    is_whole = all(shared.get(rank) == each for each in shared.values() for rank in each.ranks)
    if is_whole and len(shared) == len(ranks):
        return shared
    return {record.rank: SharedSequence((record.rank,)) for record in ranks}


def with_whole_rows(ranks: Records, shared: dict[int, SharedSequence]) -> Records:
    """The records of ranks, with the rows of which they hold parts."""
    by_rank = {record.rank: record for record in ranks}
    return [
        replace(each, calls=[*_whole_calls(by_rank[rank] for rank in shared[each.rank].ranks)])
        for each in ranks
    ]


def _whole_calls(parts: Iterator[RankRecord]) -> Iterator[ReadCall]:
    for first, *others in zip(*(part.calls for part in parts), strict=False):
        ignored = set(first.ignored).intersection(*(call.ignored for call in others))
        rows = zip(first.rows, *(call.rows for call in others), strict=False)
        yield first._replace(rows=tuple(map("+".join, rows)), ignored=tuple(sorted(ignored)))


def _positions(record: RankRecord) -> Iterator[Tensor]:
    """The positions of each call of the checked steps, [rows, tokens]."""
    from safetensors.torch import load_file

    for line in record.checked if not record.damaged else ():
        if "file" in line["inputs"]:
            tensors = load_file(record.folder / line["inputs"]["file"])
            by_call = (_positions_of(tensors, str(place)) for place, _ in trained_calls(line))
            yield from (
                positions
                for positions in by_call
                if positions is not None and positions.ndim == 2
            )


def _positions_of(tensors: Tensors, call: str) -> Tensor | None:
    return tensors.get(f"{call}.position_ids", tensors.get(f"{call}.!shared.position_ids"))


def _shared(group: tuple[int, ...], parts: list[list[Tensor]]) -> SharedSequence | None:
    """The sequence shared by ranks whose parts make rows that begin at 0; None: nothing."""
    calls = [
        [*each] for each in zip(*parts, strict=False) if len({part.shape for part in each}) == 1
    ]
    # Separate rows follow one another too, as documents do.
    if len(parts) == 1 or not any(part[:, 0].any() for part in chain(*calls)):
        return None
    rows = [[_joined(each, order) for each in calls] for order in range(3)]
    for order, each in enumerate(rows):
        if all(map(_follow, each)):
            return SharedSequence(group, order)
    if any(len(row.unique()) < _LEAST_TILED * len(row) for row in chain(*rows[1])):
        return None
    breaks = [sum(int((each.diff(dim=1) != 1).sum()) for each in of_order) for of_order in rows]
    return SharedSequence(group, breaks.index(min(breaks)), joins=False)


def _follow(positions: Tensor) -> bool:
    later = positions[:, 1:]
    return not bool(positions[:, 0].any()) and bool(
        ((later == 0) | (later == positions[:, :-1] + 1)).all()
    )


def _joined(parts: list[Tensor], order: int) -> Tensor:
    """Whole rows, [rows, tokens of all ranks, ...].

    Args:
        order: 0: of 2n chunks rank r holds chunks r and 2n - 1 - r, so that each has as much causal work;
            1: one part after the other; 2: the ranks take turns.
    """
    import torch

    if order == 2:
        return torch.stack(parts, dim=2).flatten(1, 2)
    if order == 1:
        return torch.cat(parts, dim=1)
    heads, tails = zip(*(part.tensor_split(2, dim=1) for part in parts), strict=True)
    return torch.cat([*heads, *reversed(tails)], dim=1)
