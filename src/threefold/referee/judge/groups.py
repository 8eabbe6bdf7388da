"""Which ranks read rows of their own (data ranks), and which compute one copy of the model together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from threefold.referee.record import RankRecord


@dataclass
class RankGroups:
    """Data ranks in their order, each with the ranks of its model copy; or why they cannot be told apart.

    Attributes:
        how: what shows it.
        num_data_ranks: how many there are, with those that left no record.
        unknown: why nothing shows it; then every rank is a group of its own.
    """

    members: list[list[RankRecord]]
    how: str
    num_data_ranks: int
    unknown: str | None = None

    @property
    def first_of_each(self) -> list[RankRecord]:
        """One rank of each data rank."""
        return [group[0] for group in self.members]

    @property
    def obstacle(self) -> str | None:
        """Why data ranks cannot be compared; None if they can, or if there is one process."""
        if self.unknown is not None:
            return f"it does not show which ranks read rows of their own ({self.unknown})"
        if len(self.members) < self.num_data_ranks:
            return f"only {len(self.members)} of {self.num_data_ranks} data ranks left a record"
        return None


def groups_of(ranks: list[RankRecord]) -> RankGroups:
    """The groups that the placements of the ranks show."""
    first = ranks[0]
    apart = [[record] for record in ranks]
    if first.world_size == 1:
        return RankGroups(apart, "one process", 1)
    for record in ranks:
        if unknown := record.placement.get("unknown"):
            return RankGroups(apart, "", len(ranks), f"rank {record.rank}: {unknown}")
    groups: dict[int, list[RankRecord]] = defaultdict(list)
    for record in ranks:
        groups[record.placement["data_ranks"].index(record.rank)].append(record)
    members = [groups[index] for index in sorted(groups)]
    for leader, *others in members:
        for other in others:
            # Two programs in one world, or stages of a pipeline, have equal data ranks too.
            if other.rank not in leader.placement["together"]:
                why = f"ranks {leader.rank} and {other.rank} have the same data rank and share no parameter"
                return RankGroups(apart, "", len(ranks), why)
    return RankGroups(members, str(first.placement["how"]), len(first.placement["data_ranks"]))
