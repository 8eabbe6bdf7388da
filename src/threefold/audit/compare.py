"""The audit during a run: every rank's digests of what it read are compared in one small collective.

`observe` takes what each step used and costs no communication; in `check`, every `audit.every` steps and before
anything is saved, each rank sends seven integers. If they do not agree, a second, larger exchange shows what was read,
and every rank raises the same error. Rank 0 records the digests.

The run and the Trainer share it: both pass in how to gather integers from all ranks and how to explain problems.
The place where a run resumes is known twice: the loader has it from the checkpoint, audit.jsonl from what was read.
They are compared before the first step (`begin`), so that a resume that is a batch off stops before it trains.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from threefold.arrays import Int64
from threefold.audit.digest import AuditWindow, Message, agree, predicted_samples
from threefold.audit.lookup import place_after
from threefold.audit.offences import Evidence
from threefold.audit.record import SegmentLine, SkipLine, StepsLine, read
from threefold.data.order.order import Place, StepRange, num_batches
from threefold.data.rows.concat import Rows
from threefold.data.rows.known_rows import KnownRows
from threefold.errors import Problem, RunError, rows_text
from threefold.jsonl import MetricsFile, Tracker, Values


@dataclass
class Audit:
    """Observes the steps of one rank and compares them with those of the others.

    Attributes:
        start: the mesh, the order, the first step and its place; `every` 0 turns the audit off.
        gather: returns the values passed by every rank, [n] int64 -> [world, n] int64.
        explain: names the problems in the evidence of all ranks, at least one.
        rows: the source that every row is compared with; None: there is none.
        known: compares the blocks of the rows that were read with their hashes; None: hashes are unknown.
        skips: ranges of steps that are left out, by the step that follows them.
        record: gets the lines of audit.jsonl; on rank 0 only.
    """

    start: SegmentLine
    gather: Callable[[Int64], Int64]
    explain: Callable[[Evidence], list[Problem]]
    rows: Rows | None = None
    known: KnownRows | None = None
    skips: Mapping[int, StepRange] = field(default_factory=dict)
    record: Tracker | None = None

    def __post_init__(self) -> None:
        self._begin = self.start.place
        self._window = self._window_from(self.start.first_step)

    def _window_from(self, first_step: int) -> AuditWindow:
        return AuditWindow(self.rows, first_step=first_step, known=self.known)

    def observe(self, step: int, indices: Int64, *contents: Int64) -> None:
        """Takes what `step` used: row indices [rows] and its tensors (`AuditWindow.add`)."""
        if not self.start.every:
            return
        if (step_range := self.skips.get(step)) is not None:
            order = self.start.order
            batches = num_batches([step_range])
            if self.record is not None:
                line = SkipLine(
                    self.start.segment, step, *step_range, *order.begin(self._begin), batches
                )
                self.record.log(line.to_record())
            self._begin = order.after(self._begin, batches)
        self._window.add(indices, *contents)

    def due(self, step: int) -> bool:
        """Whether an audit follows `step`: it is time, or the order jumps after it."""
        every = self.start.every
        return bool(every) and (step % every == 0 or step + 1 in self.skips)

    def check(self) -> None:
        """Compares the steps since the last audit over all ranks; every rank calls it, after the same step.

        Raises:
            RunError: ranks did not read what the order has for them; the same text on every rank.
        """
        window, order, topology = self._window, self.start.order, self.start.topology
        if not window.num_steps:
            return
        window.check_blocks()
        messages = [Message.unpack(values) for values in self.gather(window.message().pack())]
        rows = order.rows(self._begin, window.num_steps)
        predicted = predicted_samples(rows, first_step=window.first_step, dp_size=topology.dp)
        problems: Sequence[Problem] = ()
        if not agree(messages, predicted, topology):
            evidence = self.gather(window.evidence(order.global_batch // topology.dp))
            resumed = window.first_step == self.start.first_step > 1
            where = window.first_step, self._begin
            problems = self.explain(
                Evidence(
                    topology,
                    order,
                    messages,
                    evidence,
                    *where,
                    resumed=resumed,
                    known=self.known,
                )
            )
        self._write(messages, problems)
        RunError.raise_for(problems)
        self._begin = self.place
        self._window = self._window_from(window.last_step + 1)

    @property
    def place(self) -> Place:
        """Where the order continues after the steps that were observed."""
        return self.start.order.after(self._begin, self._window.num_steps)

    def close(self) -> None:
        """The run is over, complete or not."""
        if self.record is not None:
            self.record.close()

    def _write(self, messages: Sequence[Message], problems: Sequence[Problem]) -> None:
        if self.record is None:
            return
        first_ranks = messages[:: self.start.topology.world_size // self.start.topology.dp]
        epoch, position = self.start.order.begin(self._begin)
        line = StepsLine(
            segment=self.start.segment,
            first=self._window.first_step,
            last=self._window.last_step,
            epoch=epoch,
            position=position,
            samples=tuple(message.samples for message in first_ranks),
            contents=tuple(message.contents for message in first_ranks),
            faults=tuple(problem.what for problem in problems),
            checked=sum(message.checked for message in messages),
        )
        self.record.log(line.to_record())


def begin(
    start: SegmentLine,
    path: Path,
    file: MetricsFile | None,
    *,
    fix: str,
    link: Callable[[], str | None] = lambda: None,
) -> Values:
    """Appends a start to the record at `path`; a RunError with `fix` if it does not begin where the record ends.

    Only rank 0 calls it. Returns the start's number, place and checksum, which `link` gives if nothing refuses it.
    """
    assert file is not None
    before = read(path) if path.stat().st_size else []
    done = start.first_step - 1
    order = start.order
    place = start.place
    recorded = place_after(before, done) if done else Place(0, 0)
    if recorded is not None and (recorded := order.begin(recorded)) != place:
        lost = rows_text(order.rows(min(place, recorded), 1)[0])
        raise RunError(
            f"step {done + 1} would begin at position {place.position} of epoch {place.epoch}, but by audit.jsonl "
            f"step {done} ended at position {recorded.position} of epoch {recorded.epoch}: {lost} would be "
            f"{'left out' if place > recorded else 'read again'}",
            expected="a checkpoint and a record of the run that agree on what was read",
            fix=fix,
        )
    segment = before[-1].start.segment + 1 if before else 1
    known_by = link()
    file.log(replace(start, segment=segment, link=known_by).to_record())
    return {
        "segment": segment,
        "epoch": place.epoch,
        "position": place.position,
        "link": known_by,
    }
