"""Why an audit failed, in words: which ranks, which step, which samples.

In: every rank's evidence (what it has read) and the order's prediction. Out: problems, one for each thing that went
wrong, with the ranks it went wrong on. Invariants: the same evidence gives the same problems, so every rank raises
the same error and none waits for another.

If a rank's rows are not the predicted ones, the reason is where else the order has them: at another dp rank (it took a
wrong place on the mesh), at an earlier step (a batch repeated) or at a later one (a batch left out).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from threefold.arrays import Int64
from threefold.audit.digest import TOKEN_FIELDS, Message, TokenDifference
from threefold.data.order.order import Order, Place
from threefold.data.rows.known_rows import Changed, KnownRows
from threefold.data.store.blocks import Change
from threefold.errors import Problem, ranks_text, rows_text
from threefold.mesh.topology import Topology

_NUM_DIFFERENCE = len(TokenDifference._fields)
# Then the number of the store + 1 (0: none), the block, and the size of the file.
_HEAD = _NUM_DIFFERENCE + 3


@dataclass(frozen=True)
class Evidence:
    """What all ranks reported of one window of steps, and the order.

    Attributes:
        messages: by global rank.
        values: `AuditWindow.evidence` of each rank, [world, ...].
        first_step, begin: the window's first step and its place in the order.
        resumed: the run resumed from a checkpoint in step `first_step`.
        known: names the block of a store, and the rows that read it.
    """

    topology: Topology
    order: Order
    messages: Sequence[Message]
    values: Int64
    first_step: int
    begin: Place
    resumed: bool = False
    known: KnownRows | None = None

    @property
    def num_steps(self) -> int:
        return (self.values.shape[1] - _HEAD) // self._rows_per_step

    @property
    def _rows_per_step(self) -> int:
        return self.order.global_batch // self.topology.dp

    def read(self, rank: int) -> Int64:
        """Row indices that a rank read, [num_steps, rows]."""
        return self.values[rank, _HEAD:].reshape(self.num_steps, self._rows_per_step)

    def difference(self, rank: int) -> TokenDifference | None:
        """The first token of a rank that is not the source's."""
        difference = TokenDifference(*self.values[rank, :_NUM_DIFFERENCE].tolist())
        return difference if difference.step else None

    def changed(self, rank: int) -> Changed | None:
        """The first block of a rank that is not what was hashed."""
        part, block, size = self.values[rank, _NUM_DIFFERENCE:_HEAD].tolist()
        return Changed(part - 1, Change(".bin", block, size)) if part else None


def explain(evidence: Evidence, *, resume: str) -> list[Problem]:
    """Everything that is wrong, at least one problem; `resume` is the command for the last checkpoint."""
    problems = _order_problems(evidence, resume)
    problems += _source_problems(evidence)
    problems += _byte_problems(evidence, resume)
    problems += _token_problems(evidence, resume)
    return problems or [_unexplained(evidence, resume)]


def _order_problems(evidence: Evidence, resume: str) -> list[Problem]:
    """Ranks whose rows are not the predicted ones, those with the same explanation together."""
    topology = evidence.topology
    predicted = evidence.order.rows(evidence.begin, evidence.num_steps)
    ranks_of: dict[tuple[str, int, int], list[int]] = {}
    for rank in range(topology.world_size):
        wrong = (
            evidence.read(rank) != predicted[:, topology.dp_rank(rank) :: topology.dp]
        ).any(axis=1)
        if wrong.any():
            ranks_of.setdefault(
                _elsewhere(evidence, rank, int(np.argmax(wrong)), predicted), []
            ).append(rank)
    return [
        _order_problem(evidence, ranks, reason, predicted, resume)
        for reason, ranks in ranks_of.items()
    ]


def _elsewhere(
    evidence: Evidence, rank: int, place: int, predicted: Int64
) -> tuple[str, int, int]:
    """(kind, place, where): what a rank read in step `place` of the window belongs to another dp rank or step."""
    topology, order = evidence.topology, evidence.order
    read = evidence.read(rank)[place]
    for other in range(topology.dp):
        if np.array_equal(read, predicted[place, other :: topology.dp]):
            return "dp rank", place, other
    earlier = list(enumerate(predicted[:place]))
    if (before := order.before(evidence.begin)) is not None:
        earlier.insert(0, (-1, order.rows(before, 1)[0]))
    ahead = order.rows(order.after(evidence.begin, place + 1), evidence.num_steps + 1)
    for kind, steps in (
        ("earlier", reversed(earlier)),
        ("later", enumerate(ahead, start=place + 1)),
    ):
        for other, rows in steps:
            if np.array_equal(read, rows[topology.dp_rank(rank) :: topology.dp]):
                return kind, place, other
    return "unknown", place, 0


def _order_problem(
    evidence: Evidence,
    ranks: list[int],
    reason: tuple[str, int, int],
    predicted: Int64,
    resume: str,
) -> Problem:
    """The problem of ranks that `_elsewhere` gives the same reason for."""
    (kind, place, other), topology, first = reason, evidence.topology, ranks[0]
    step = evidence.first_step + place
    other_step = evidence.first_step + other
    dp_rank = topology.dp_rank(first)
    own = predicted[place, dp_rank :: topology.dp]
    instead = f"{rows_text(evidence.read(first)[place])} instead of {rows_text(own)}"
    if len({topology.dp_rank(rank) for rank in ranks}) > 1:
        instead = f"on rank {first} {instead}"
    who, when = ranks_text(ranks), f"in step {step}"
    if evidence.resumed and step == evidence.first_step:
        when += " (the first after the resume)"
    next_batch = f"step {step} reads the batch after that of step {step - 1}"
    fix = _again(resume)
    if kind == "dp rank":
        _, _, cp, tp = topology.coordinates(first)
        what = f"{who} (dp rank {dp_rank}, cp rank {cp}, tp rank {tp}) read the samples of dp rank {other} {when}"
        expected = f"the samples of its own dp rank on {topology}: others have read these already, and nobody reads "
        expected += "its own"
        fix = f"give its loader dp_rank=mesh.dp_rank and dp_size=mesh.dp_size, then: {resume}"
    elif kind == "earlier":
        what = f"{who} read the batch of step {other_step} again {when}"
        expected = f"each batch once: {next_batch}"
    elif kind == "later":
        left_out = (
            f"step {step}" if other_step == step + 1 else f"steps {step} to {other_step - 1}"
        )
        what = f"{who} read the batch of step {other_step} {when}: the batch of {left_out} was left out"
        expected = f"every batch: {next_batch}"
    else:
        what = f"{who} read other samples than the order has {when}"
        expected = f"the order of data.seed = {evidence.order.seed} and {evidence.order.num_rows:,} rows"
    return Problem(f"{what}: {instead}", expected, fix)


def _again(resume: str) -> str:
    return f"resume from the last checkpoint: {resume}   (if it happens again, with --data.num_workers 0)"


def _source_problems(evidence: Evidence) -> list[Problem]:
    sources = [message.source for message in evidence.messages]
    others = [rank for rank, source in enumerate(sources) if source != sources[0]]
    if not others:
        return []
    return [
        Problem(
            f"{ranks_text(others)} read another source than rank 0: its fingerprint differs",
            "the same tokens on every rank: otherwise a sample's number means different samples",
            "threefold data prepare --data.source ... --to DIR   once, copy DIR to all machines, and --data.source DIR",
        )
    ]


def _byte_problems(evidence: Evidence, resume: str) -> list[Problem]:
    ranks_of: dict[Changed, list[int]] = {}
    for rank in range(evidence.topology.world_size):
        if (changed := evidence.changed(rank)) is not None:
            ranks_of.setdefault(changed, []).append(rank)
    assert evidence.known is not None or not ranks_of
    return [
        Problem(
            f"{ranks_text(ranks)}, after step {evidence.messages[0].last_step}: {evidence.known.describe(change)}",
            "the bytes that were hashed, as long as a run reads them: its last steps may have trained on others",
            f"copy the store again from its origin, then continue from the last checkpoint: {resume}",
        )
        for change, ranks in ranks_of.items()
        if evidence.known is not None
    ]


def _token_problems(evidence: Evidence, resume: str) -> list[Problem]:
    ranks_of: dict[TokenDifference, list[int]] = {}
    for rank in range(evidence.topology.world_size):
        if (difference := evidence.difference(rank)) is not None:
            ranks_of.setdefault(difference, []).append(rank)
    return [
        Problem(
            f"{ranks_text(ranks)} trained on a changed token in step {token.step}: row {token.row:,} has "
            f"{TOKEN_FIELDS[token.field]}[{token.column}] = {token.found}, the source "
            f"{'no such row' if token.expected == -1 else token.expected}",
            "the tokens of the source: something between it and the step has changed them (a worker, memory)",
            _again(resume),
        )
        for token, ranks in ranks_of.items()
    ]


def _unexplained(evidence: Evidence, resume: str) -> Problem:
    """The rows agree and each rank's tokens match its own source: the sources of one dp rank's ranks must differ."""
    size = evidence.topology.cp * evidence.topology.tp
    others = [
        rank
        for rank, message in enumerate(evidence.messages)
        if message.contents != evidence.messages[rank - rank % size].contents
    ]
    last = evidence.messages[0].last_step
    return Problem(
        f"{ranks_text(others or range(evidence.topology.world_size))} read other tokens than the first rank of the "
        f"same dp rank, in steps {evidence.first_step} to {last}, though the samples are the same",
        "the same contents on every rank; each rank agrees with its own copy of the source",
        f"compare the copies of the source on the machines, replace the damaged one, then: {resume}",
    )
