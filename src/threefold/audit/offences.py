"""Why an audit failed, in words: which ranks, which step, which samples.

In: what every rank has read (its evidence) and what the order predicts. Out: problems, one for each thing that went
wrong, with the ranks it went wrong on. What stays true: the same evidence gives the same problems, so that every rank
raises the same error and none waits for another.

A rank whose rows are not the predicted ones is explained by where else the order has them: at another dp rank (it took
a wrong place on the mesh), at an earlier step (a batch repeated) or at a later one (a batch left out).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from threefold.audit.digest import TOKEN_FIELDS, Difference, Int64, Message
from threefold.data.order import Order, Place
from threefold.errors import Problem, ranks_text, rows_text
from threefold.mesh.topology import Topology

_NUM_DIFFERENCE = len(Difference._fields)


@dataclass(frozen=True)
class Evidence:
    """What all ranks said of one window of steps, and what the order says.

    Attributes:
        messages: by global rank.
        values: `Window.evidence` of each rank, [world, ...].
        first_step, begin: the window's first step and where it was to begin.
        resumed: the run went on here from a checkpoint, in step `first_step`.
    """

    topology: Topology
    order: Order
    messages: Sequence[Message]
    values: Int64
    first_step: int
    begin: Place
    resumed: bool = False

    @property
    def num_steps(self) -> int:
        return (self.values.shape[1] - _NUM_DIFFERENCE) // self._rows_per_step

    @property
    def _rows_per_step(self) -> int:
        return self.order.global_batch // self.topology.dp

    def read(self, rank: int) -> Int64:
        """Row indices that a rank read, [num_steps, rows]."""
        return self.values[rank, _NUM_DIFFERENCE:].reshape(self.num_steps, self._rows_per_step)

    def difference(self, rank: int) -> Difference | None:
        """The first token of a rank that is not the source's."""
        found = Difference(*self.values[rank, :_NUM_DIFFERENCE].tolist())
        return found if found.step else None


def explain(evidence: Evidence, *, resume: str) -> list[Problem]:
    """Everything that is wrong, at least one problem.

    Args:
        resume: the command that resumes from the last checkpoint.
    """
    problems = _order_problems(evidence, resume)
    problems += _source_problems(evidence)
    problems += _token_problems(evidence, resume)
    return problems or [_unexplained(evidence, resume)]


def _order_problems(evidence: Evidence, resume: str) -> list[Problem]:
    """Ranks whose rows are not the predicted ones, those with the same explanation together."""
    topology, order = evidence.topology, evidence.order
    predicted = order.rows(evidence.begin, evidence.num_steps)
    found: dict[tuple[str, int, int], list[int]] = {}
    for rank in range(topology.world_size):
        share = predicted[:, topology.dp_rank(rank) :: topology.dp]
        wrong = (evidence.read(rank) != share).any(axis=1)
        if wrong.any():
            place = int(np.argmax(wrong))
            found.setdefault(_elsewhere(evidence, rank, place, predicted), []).append(rank)
    problems = []
    for (kind, place, other), ranks in found.items():
        step = evidence.first_step + place
        read = evidence.read(ranks[0])[place]
        meant = predicted[place, topology.dp_rank(ranks[0]) :: topology.dp]
        problems.append(_order_problem(evidence, kind, ranks, step, other, read, meant, resume))
    return problems


def _elsewhere(evidence: Evidence, rank: int, place: int, predicted: Int64) -> tuple[str, int, int]:
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
    for kind, steps in (("earlier", reversed(earlier)), ("later", enumerate(ahead, start=place + 1))):
        for other, rows in steps:
            if np.array_equal(read, rows[topology.dp_rank(rank) :: topology.dp]):
                return kind, place, other
    return "unknown", place, 0


def _order_problem(
    evidence: Evidence, kind: str, ranks: list[int], step: int, other: int, read: Int64, meant: Int64, resume: str
) -> Problem:
    who = ranks_text(ranks)
    instead = f"{rows_text(read)} instead of {rows_text(meant)}"
    if len({evidence.topology.dp_rank(rank) for rank in ranks}) > 1:
        instead = f"on rank {ranks[0]} {instead}"
    at_resume = " (the first after the resume)" if evidence.resumed and step == evidence.first_step else ""
    again = f"go on from the last checkpoint: {resume}   (if it comes again, with --data.num_workers 0)"
    other_step = evidence.first_step + other
    if kind == "dp rank":
        topology, rank = evidence.topology, ranks[0]
        _, _, cp, tp = topology.coordinates(rank)
        own = f"dp rank {topology.dp_rank(rank)}, cp rank {cp}, tp rank {tp}"
        return Problem(
            f"{who} ({own}) read the samples of dp rank {other} in step {step}{at_resume}: {instead}",
            f"the samples of its own dp rank on {topology}: others read these already, and its own are read by nobody",
            f"give its loader dp_rank=mesh.dp_rank and dp_size=mesh.dp_size, then: {resume}",
        )
    if kind == "earlier":
        return Problem(
            f"{who} read the batch of step {other_step} again in step {step}{at_resume}: {instead}",
            f"each batch once: step {step} reads the batch behind that of step {step - 1}",
            again,
        )
    if kind == "later":
        left_out = f"step {step}" if other_step == step + 1 else f"steps {step} to {other_step - 1}"
        return Problem(
            f"{who} read the batch of step {other_step} in step {step}{at_resume}: the batch of {left_out} was "
            f"left out: {instead}",
            f"every batch: step {step} reads the batch behind that of step {step - 1}",
            again,
        )
    return Problem(
        f"{who} read other samples than the order has in step {step}{at_resume}: {instead}",
        f"the order of data.seed = {evidence.order.seed} and {evidence.order.num_rows:,} rows",
        again,
    )


def _source_problems(evidence: Evidence) -> list[Problem]:
    sources = [message.source for message in evidence.messages]
    others = [rank for rank, source in enumerate(sources) if source != sources[0]]
    if not others:
        return []
    return [
        Problem(
            f"{ranks_text(others)} read another source than rank 0: its fingerprint differs",
            "the same tokens behind every rank, or the sample of a number is not the same sample everywhere",
            "threefold data prepare --source ... --to DIR   once, copy DIR to every machine, and --data.source DIR",
        )
    ]


def _token_problems(evidence: Evidence, resume: str) -> list[Problem]:
    differences = [(rank, evidence.difference(rank)) for rank in range(evidence.topology.world_size)]
    ranks_of: dict[Difference, list[int]] = {}
    for rank, difference in differences:
        if difference is not None:
            ranks_of.setdefault(difference, []).append(rank)
    problems = []
    for difference, ranks in ranks_of.items():
        name = TOKEN_FIELDS[difference.field]
        source = "no such row" if difference.expected == -1 else str(difference.expected)
        problems.append(
            Problem(
                f"{ranks_text(ranks)} trained on a changed token in step {difference.step}: row {difference.row:,} "
                f"has {name}[{difference.column}] = {difference.found}, the source {source}",
                "the tokens of the source: something between it and the step has changed them (a worker, memory)",
                f"go on from the last checkpoint: {resume}   (if it comes again, with --data.num_workers 0)",
            )
        )
    return problems


def _unexplained(evidence: Evidence, resume: str) -> Problem:
    """The rows agree and each rank finds its own tokens right: then what ranks of one dp rank compare with differs."""
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
        "one content behind every rank; each rank agrees with its own copy of the source",
        f"compare the copies of the source on the machines, replace the damaged one, then: {resume}",
    )
