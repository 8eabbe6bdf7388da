"""The audit while a run goes: every rank's digests of what it read, side by side, in one small collective.

`observe` takes each step's batch and costs no communication; `check`, every `audit.every` steps and before anything is
saved, lets each rank send seven integers. Where they do not agree a second, larger exchange says what was read, and
every rank raises the same error. Rank 0 writes the digests down. The messages travel on the CPU: no rank waits for its
device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.audit.digest import Int64, Message, Window, agree, predicted_samples
from threefold.audit.offences import Evidence, explain
from threefold.audit.record import SkipLine, StepsLine
from threefold.data.order import Order, Place, StepRange, num_batches
from threefold.data.rows.concat import Rows
from threefold.errors import Problem, RunError
from threefold.jsonl import Tracker
from threefold.mesh.mesh import Mesh


@dataclass(frozen=True)
class AuditPlan:
    """What an audit goes by.

    Attributes:
        every: steps between audits; 0: none.
        first_step, begin: the first step and where in the order it begins, known from elsewhere than the loader.
        skips: ranges of steps that are left out, by the step before whose batch that happens.
        segment: how often the run was started, this time included.
        go_on: the command that goes on from the last checkpoint, for messages.
    """

    order: Order
    every: int
    first_step: int
    begin: Place
    skips: Mapping[int, StepRange] = field(default_factory=dict)
    segment: int = 1
    go_on: str = "threefold train"


class RunAudit:
    """Observes the steps of one rank and compares them with those of the others.

    Args:
        rows: the source that batches are compared with.
        record: hears the lines of audit.jsonl; on rank 0 only.
    """

    def __init__(self, mesh: Mesh, rows: Rows, plan: AuditPlan, *, record: Tracker | None = None) -> None:
        self._mesh = mesh
        self._rows = rows
        self._plan = plan
        self._record = record
        self._begin = plan.begin
        self._window = Window(rows, first_step=plan.first_step)

    def observe(self, step: int, batch: Mapping[str, Tensor]) -> None:
        """Takes the batch that `step` used: `indices` [rows], `input_ids` and `labels` [rows, seq_len]."""
        if not self._plan.every:
            return
        if (step_range := self._plan.skips.get(step)) is not None:
            self._leave_out(step, step_range)
        arrays = [batch[name].numpy(force=True) for name in ("indices", "input_ids", "labels")]
        self._window.add(*arrays)

    def due(self, step: int) -> bool:
        """Whether an audit follows `step`: it is time, or the order jumps behind it."""
        return bool(self._plan.every) and (step % self._plan.every == 0 or step + 1 in self._plan.skips)

    def check(self) -> None:
        """Compares the steps since the last audit over all ranks; every rank calls it, after the same step.

        Raises:
            RunError: ranks did not read what the order has for them; the same text on every rank.
        """
        window, plan = self._window, self._plan
        if not window.num_steps:
            return
        messages = [Message.unpack(values) for values in self._gather(window.message().pack())]
        predicted = predicted_samples(
            plan.order.rows(self._begin, window.num_steps),
            first_step=window.first_step,
            dp_size=self._mesh.dp_size,
        )
        problems: Sequence[Problem] = ()
        if not agree(messages, predicted, self._mesh.topology):
            problems = self._explain(messages)
        self._write(messages, problems)
        if problems:
            raise RunError.of(problems)
        self._begin = plan.order.after(self._begin, window.num_steps)
        self._window = Window(self._rows, first_step=window.last_step + 1)

    def close(self) -> None:
        """The run is over, whole or not."""
        if self._record is not None:
            self._record.close()

    def _explain(self, messages: list[Message]) -> list[Problem]:
        rows_per_step = self._plan.order.global_batch // self._mesh.dp_size
        evidence = Evidence(
            self._mesh.topology,
            self._plan.order,
            messages,
            self._gather(self._window.evidence(rows_per_step)),
            self._window.first_step,
            self._begin,
            resumed=self._window.first_step == self._plan.first_step and self._plan.first_step > 1,
        )
        return explain(evidence, go_on=self._plan.go_on)

    def _gather(self, values: Int64) -> Int64:
        """What every rank gave, [world, len(values)]."""
        if (group := self._mesh.group("world")) is None:
            return values[None]
        gathered = torch.empty((self._mesh.world_size, len(values)), dtype=torch.int64)
        dist.all_gather(list(gathered), torch.from_numpy(values), group=group)
        return gathered.numpy()

    def _leave_out(self, step: int, step_range: StepRange) -> None:
        batches = num_batches([step_range])
        if self._record is not None:
            line = SkipLine(self._plan.segment, step, *step_range, *self._plan.order.begin(self._begin), batches)
            self._record.log(line.to_record())
        self._begin = self._plan.order.after(self._begin, batches)

    def _write(self, messages: Sequence[Message], problems: Sequence[Problem]) -> None:
        if self._record is None:
            return
        first_ranks = messages[:: self._mesh.world_size // self._mesh.dp_size]
        epoch, position = self._plan.order.begin(self._begin)
        line = StepsLine(
            segment=self._plan.segment,
            first=self._window.first_step,
            last=self._window.last_step,
            epoch=epoch,
            position=position,
            samples=tuple(message.samples for message in first_ranks),
            contents=tuple(message.contents for message in first_ranks),
            faults=tuple(problem.what for problem in problems),
        )
        self._record.log(line.to_record())
