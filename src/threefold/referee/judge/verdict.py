"""The verdict on a recorded command: every part, and the overall status.

Refuted if one part is; proved if every part that the program has is; else not judged. Anything not observed is never
called right, and the parts that the referee does not know yet are named.
"""

import shlex
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from threefold.errors import EXIT_FAILED, ranks_text
from threefold.referee.judge.epochs import epochs_of, judge_epochs, judge_order
from threefold.referee.judge.groups import RankGroups, groups_of
from threefold.referee.judge.parts import (
    JudgedPart,
    PartStatus,
    Refuted,
    Unjudgeable,
    judges,
    none_here,
    not_judged,
    proved,
    read_alone,
)
from threefold.referee.judge.resumes import WholeTraining, whole_training
from threefold.referee.judge.shared_rows import (
    judge_copies,
    judge_data_ranks,
    judge_model_copies,
)
from threefold.referee.rank.sealed import Values
from threefold.referee.record import RankRecord, ReadCall, Records, WatchedCommand, read_command

_EXIT_CODES = {
    PartStatus.NONE: 0,
    PartStatus.PROVED: 0,
    PartStatus.NOT_JUDGED: 3,
    PartStatus.REFUTED: EXIT_FAILED,
}


@dataclass(frozen=True)
class CommandVerdict:
    """All parts of a verdict."""

    folder: Path
    watched: WatchedCommand
    parts: tuple[JudgedPart, ...]

    @property
    def status(self) -> PartStatus:
        """The overall status: the worst of all parts."""
        return max((part.status for part in self.parts), key=[*_EXIT_CODES].index)

    @property
    def exit_code(self) -> int:
        """0 proved, 1 refuted, 3 not judged."""
        return _EXIT_CODES[self.status]

    @property
    def _num_steps(self) -> int:
        return sum(
            max((each.num_steps for each in ranks), default=0) for ranks in self.watched.starts
        )

    def lines(self) -> list[str]:
        """The verdict as text."""
        num_ranks = len(self.watched.ranks)
        head = f"referee: {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}, {self._num_steps} steps"
        return [
            head,
            *map(str, self.parts),
            f"verdict: {self.status} (exit code {self.exit_code})",
        ]

    def as_values(self) -> Values:
        """The verdict as plain values."""
        return {
            "schema": 1,
            "record": str(self.folder),
            "command": self.watched.command,
            "command_exit_code": self.watched.exit_code,
            "ranks": len(self.watched.ranks),
            "steps": self._num_steps,
            "verdict": self.status,
            "exit_code": self.exit_code,
            "parts": [asdict(part) for part in self.parts],
        }


def judge(folder: Path) -> CommandVerdict:
    """The verdict on the record in a folder.

    Raises:
        DataError: the folder holds no record.
    """
    from threefold.referee.judge.exports import judge_exports

    watched = read_command(folder)
    training = whole_training(watched)
    ranks = [record for record in training.ranks if record.calls]
    if not ranks:
        return CommandVerdict(folder, watched, (_nothing(watched),))
    groups = groups_of(ranks)
    epochs = epochs_of(groups.first_of_each)
    shared = judge_data_ranks(groups, epochs)
    rows = judge_epochs(groups, epochs)
    if shared.status is PartStatus.REFUTED:  # all ranks read all rows: reported once
        rows = not_judged(rows.name, f"see {shared.name!r}")
    return CommandVerdict(
        folder,
        watched,
        (
            judge_record(watched, training),
            shared,
            judge_model_copies(groups),
            rows,
            judge_order(groups, epochs),
            judge_labels(groups.first_of_each),
            *_curve_of_starts(folder, groups, watched, training),
            *training.parts,
            judge_exports(watched.starts),
        ),
    )


def _curve_of_starts(
    folder: Path, groups: RankGroups, watched: WatchedCommand, training: WholeTraining
) -> list[JudgedPart]:
    """Conclusions from weights and gradients of the first start, and refutations from later ones."""
    parts = {part.name: part for part in _curve(folder, groups)}
    for number, later in enumerate(watched.later if training.others is None else [], start=2):
        for part in _curve(folder, groups_of([record for record in later if record.calls])):
            earlier = getattr(parts.get(part.name), "status", None)
            if part.status is PartStatus.REFUTED is not earlier:
                parts[part.name] = replace(part, what=f"start {number}: {part.what}")
    return list(parts.values())


def _curve(folder: Path, groups: RankGroups) -> list[JudgedPart]:
    """Weights, gradients and updates of the checked steps: the parts for which torch is needed."""
    from threefold.referee.judge.checked_steps import checked_steps
    from threefold.referee.judge.gradients import (
        GRADIENTS,
        judge_gradients,
        judge_target_places,
    )
    from threefold.referee.judge.updates import NORM, UPDATES, judge_norms, judge_updates

    copies = judge_copies(groups)
    try:
        steps = checked_steps(folder, groups)
    except Unjudgeable as why:
        return [copies, *(not_judged(name, why) for name in (GRADIENTS, NORM, UPDATES))]
    placement = groups.records[0].placement
    places = judge_target_places(steps, placement["architecture"])
    return [
        copies,
        read_alone(folder) or judge_gradients(steps, placement),
        *([places] if _EXIT_CODES[places.status] else []),
        judge_norms(steps),
        not_judged(UPDATES, "several optimizers step together")
        if any(record.joined for record in groups.records)
        else judge_updates(steps),
    ]


@judges("record")
def _nothing(watched: WatchedCommand) -> JudgedPart:
    shown = shlex.join(watched.command)
    why = (
        f"no process of `{shown}` took a step of a torch optimizer for a model in training mode"
    )
    if watched.exit_code:
        why = f"`{shown}` ended with exit code {watched.exit_code} before its first optimizer step"
    raise Unjudgeable(
        "; ".join(
            [why, *watched.wrong, *(each for rank in watched.ranks for each in rank.wrong)]
        )
    )


@judges("record")
def judge_record(watched: WatchedCommand, training: WholeTraining) -> JudgedPart:
    """Whether all that the command trained on is there, as it was written."""
    records = chain(training.ranks, *watched.later)
    wrong = [
        *dict.fromkeys([*watched.wrong, *(each for record in records for each in record.wrong)])
    ]
    if training.others:
        wrong.append(training.others)
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
        raise Unjudgeable("; ".join(wrong))
    left_out = max(record.left_out for record in watched.ranks)
    others = f"; steps of other optimizers left out: {left_out}" if left_out else ""
    return proved(f"every line of {ranks_text(numbers)} is intact{others}")


@judges("labels")
def judge_labels(ranks: Records) -> JudgedPart:
    """Whether a row was read that trains nothing, as all its labels are ignored."""
    labelled = [(record, call) for record in ranks for call in record.calls if call.labelled]
    if not labelled:
        return none_here("the model is not called with token labels")
    num_rows = sum(len(call.rows) for _, call in labelled)
    without = [(record, call) for record, call in labelled if call.ignored]
    if not without:
        return proved(f"each of {num_rows} rows has a label that is trained on")
    ignored = [each for each in without if not _fills_up(*each)]
    if not ignored:
        raise Unjudgeable(
            "rows at the end of an epoch have no label: they fill it up, or have lost theirs"
        )
    record, call = ignored[0]
    if record.mixed:
        raise Unjudgeable(record.mixed)
    count = sum(len(call.ignored) for _, call in ignored)
    raise Refuted(
        f"all labels are ignored (-100) in {count} of {num_rows} rows: "
        f"the first is row {call.ignored[0]} of rank {record.rank} in step {call.step}",
        "a label that is trained on in every row that is not padding",
        "what makes the labels: a prompt longer than the row, a template without its answer, a collator's mask",
    )


def _fills_up(record: RankRecord, call: ReadCall) -> bool:
    """Whether rows without labels are the last ones that a rank reads in a pass of its loader."""
    *_, last = (other for other in record.calls if other.loader_pass == call.loader_pass)
    trailing = range(len(call.rows) - len(call.ignored), len(call.rows))
    return last is call and list(call.ignored) == list(trailing)
