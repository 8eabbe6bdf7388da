"""The verdict on a recorded command: every part, and what all of them come to.

Refuted if one part is; proved if every part is that the program has; else not judged. What could not be seen is never
called right, and the parts that the referee does not know yet are named.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from threefold.errors import EXIT_FAILED, ranks_text
from threefold.referee.judge.copies import COPIES, judge_copies
from threefold.referee.judge.epochs import EPOCHS, epochs_of, judge_epochs
from threefold.referee.judge.groups import RankGroups, groups_of
from threefold.referee.judge.order import ORDER, judge_order
from threefold.referee.judge.parts import JudgedPart, PartStatus, none_here, not_judged, proved, refuted
from threefold.referee.judge.resumes import WholeTraining, whole_training
from threefold.referee.judge.shared_rows import DATA_RANKS, MODEL_COPY, judge_data_ranks, judge_model_copies
from threefold.referee.record import RankRecord, ReadCall, WatchedCommand, read_command

EXIT_NOT_JUDGED = 3
RECORD, LABELS, GRADIENTS, EXPORTS = "record", "labels", "gradients", "exports"


@dataclass(frozen=True)
class CommandVerdict:
    """All parts of a verdict."""

    folder: Path
    watched: WatchedCommand
    parts: tuple[JudgedPart, ...]

    @property
    def status(self) -> PartStatus:
        """What all parts come to."""
        statuses = {part.status for part in self.parts}
        for status in (PartStatus.REFUTED, PartStatus.NOT_JUDGED):
            if status in statuses:
                return status
        return PartStatus.PROVED

    @property
    def exit_code(self) -> int:
        """0 proved, 1 refuted, 3 not judged."""
        return {PartStatus.PROVED: 0, PartStatus.REFUTED: EXIT_FAILED}.get(self.status, EXIT_NOT_JUDGED)

    def lines(self) -> list[str]:
        """The verdict as text."""
        num_steps = sum(max((each.num_steps for each in ranks), default=0) for ranks in self.watched.starts)
        num_ranks = len(self.watched.ranks)
        head = f"referee: {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}, {num_steps} steps"
        return [head, *map(str, self.parts), f"verdict: {self.status.value} (exit code {self.exit_code})"]

    def as_values(self) -> dict[str, Any]:
        """The verdict as plain values."""
        return {
            "schema": 1,
            "record": str(self.folder),
            "command": self.watched.command,
            "command_exit_code": self.watched.exit_code,
            "ranks": len(self.watched.ranks),
            "steps": sum(max((each.num_steps for each in ranks), default=0) for ranks in self.watched.starts),
            "verdict": self.status.value,
            "exit_code": self.exit_code,
            "parts": [{**asdict(part), "status": part.status.value} for part in self.parts],
        }


def judge(folder: Path) -> CommandVerdict:
    """The verdict on the record in a folder.

    Raises:
        DataError: the folder holds no record.
    """
    watched = read_command(folder)
    training = whole_training(watched)
    ranks = [record for record in training.ranks if record.calls]
    if not ranks:
        return CommandVerdict(folder, watched, (_nothing(watched),))
    if mixed := next((record.mixed for record in ranks if record.mixed), None):
        names = (DATA_RANKS, MODEL_COPY, EPOCHS, ORDER, LABELS, COPIES, GRADIENTS)
        parts = [not_judged(name, f"{mixed}: which rows belong together does not show") for name in names]
        return CommandVerdict(folder, watched, (judge_record(watched, training), *parts))
    groups = groups_of(ranks)
    epochs = epochs_of(groups.first_of_each)
    shared = judge_data_ranks(groups, epochs)
    # All ranks read all rows: said once.
    same = f"see {DATA_RANKS!r}" if shared.status is PartStatus.REFUTED else None
    parts = [
        judge_record(watched, training),
        shared,
        judge_model_copies(groups),
        not_judged(EPOCHS, same) if same else judge_epochs(groups, epochs),
        judge_order(groups, epochs),
        judge_labels(ranks),
        *_curve_of_starts(folder, groups, watched, training),
        *training.parts,
        _exports(watched),
    ]
    return CommandVerdict(folder, watched, tuple(parts))


def _curve_of_starts(
    folder: Path, groups: RankGroups, watched: WatchedCommand, training: WholeTraining
) -> list[JudgedPart]:
    """What follows from weights and gradients of the first start, and what is refuted of a later one."""
    parts = {part.name: part for part in (judge_copies(groups), *_curve(folder, groups))}
    for number, later in enumerate(watched.later if training.others is None else [], start=2):
        of_start = groups_of([record for record in later if record.calls])
        for part in (judge_copies(of_start), *_curve(folder, of_start)):
            if part.status is PartStatus.REFUTED and parts[part.name].status is not PartStatus.REFUTED:
                parts[part.name] = replace(part, what=f"start {number}: {part.what}")
    return list(parts.values())


def _curve(folder: Path, groups: RankGroups) -> list[JudgedPart]:
    """What follows from weights and gradients, where torch is installed."""
    try:
        from threefold.referee.judge.curve import judge_curve
    except ImportError as error:
        return [not_judged(GRADIENTS, f"{error.name} is not installed here")]
    return judge_curve(folder, groups)


def _exports(watched: WatchedCommand) -> JudgedPart:
    try:
        from threefold.referee.judge.exports import judge_exports
    except ImportError as error:
        return not_judged(EXPORTS, f"{error.name} is not installed here")
    return judge_exports(watched.starts)


def _nothing(watched: WatchedCommand) -> JudgedPart:
    shown = shlex.join(watched.command)
    why = f"no process of `{shown}` took an optimizer step of torch"
    if watched.exit_code:
        why = f"`{shown}` ended with exit code {watched.exit_code} before its first optimizer step"
    return not_judged(
        RECORD, "; ".join([why, *watched.wrong, *(each for rank in watched.ranks for each in rank.wrong)])
    )


def judge_record(watched: WatchedCommand, training: WholeTraining) -> JudgedPart:
    """Whether all that the command trained on is there, as it was written."""
    wrong = [*watched.wrong, *(each for record in training.ranks for each in record.wrong)]
    wrong += [each for later in watched.later for record in later for each in record.wrong if each not in wrong]
    wrong += [training.others] if training.others else []
    numbers = {record.rank for record in watched.ranks}
    if absent := set(range(watched.ranks[0].world_size)) - numbers:
        wrong.append(f"{ranks_text(absent)} left no record")
    if len(steps := sorted({record.num_steps for record in training.ranks})) > 1:
        wrong.append(f"ranks recorded {steps[0]} to {steps[-1]} steps")
    if watched.exit_code:
        wrong.append(f"the command ended with exit code {watched.exit_code}")
    elif watched.exit_code is None:
        wrong.append("the command has not ended, or the referee was killed")
    if wrong:
        return not_judged(RECORD, "; ".join(wrong))
    left_out = max(record.left_out for record in watched.ranks)
    counted = "1 step of other optimizers is" if left_out == 1 else f"{left_out} steps of other optimizers are"
    others = f"; {counted} left out" if left_out else ""
    return proved(RECORD, f"every line of {ranks_text(numbers)} is as it was written{others}")


def judge_labels(ranks: list[RankRecord]) -> JudgedPart:
    """Whether a row was read that trains nothing, as all its labels are ignored."""
    labelled = [(record, call) for record in ranks for call in record.calls if call.labelled]
    if not labelled:
        return none_here(LABELS, "the model is not called with labels of tokens")
    ignored = [(record, call) for record, call in labelled if call.ignored]
    num_rows = sum(len(call.rows) for _, call in labelled)
    if not ignored:
        return proved(LABELS, f"each of {num_rows} rows has a label that is trained on")
    ignored = [(record, call) for record, call in ignored if not _fills_up(record, call)]
    if not ignored:
        return not_judged(LABELS, "rows at the end of an epoch have no label: they fill it up, or have lost theirs")
    record, call = ignored[0]
    count = sum(len(call.ignored) for _, call in ignored)
    return refuted(
        LABELS,
        f"all labels are ignored (-100) in {count} of {num_rows} rows: "
        f"the first is row {call.ignored[0]} of rank {record.rank} in step {call.step}",
        expected="a label that is trained on in every row that is not padding",
        where="what makes the labels: a prompt longer than the row, a template without its answer, a collator's mask",
    )


def _fills_up(record: RankRecord, call: ReadCall) -> bool:
    """Whether rows without labels are the last ones that a rank reads in a pass of its loader."""
    last = max(place for place, other in enumerate(record.calls) if other.loader_pass == call.loader_pass)
    trailing = range(len(call.rows) - len(call.ignored), len(call.rows))
    return record.calls[last] is call and list(call.ignored) == list(trailing)
