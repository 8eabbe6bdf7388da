"""Weights, gradients and updates of the checked steps: the parts of a verdict for which torch is needed."""

from __future__ import annotations

from pathlib import Path

from threefold.referee.judge.checked_steps import CheckedStep, Unjudgeable, read_step
from threefold.referee.judge.gradients import GRADIENTS, judge_gradients
from threefold.referee.judge.groups import RankGroups
from threefold.referee.judge.parts import JudgedPart, not_judged, read_alone
from threefold.referee.judge.updates import NORM, UPDATES, judge_norms, judge_updates


def judge_curve(folder: Path, groups: RankGroups) -> list[JudgedPart]:
    """All of them."""
    try:
        steps = checked_steps(folder, groups)
    except Unjudgeable as why:
        return [not_judged(name, str(why)) for name in (GRADIENTS, NORM, UPDATES)]
    gradients = read_alone(folder) or judge_gradients(steps, groups.members[0][0].placement)
    if any(record.joined for group in groups.members for record in group):
        return [*gradients, judge_norms(steps), not_judged(UPDATES, "several optimizers step together")]
    return [*gradients, judge_norms(steps), judge_updates(steps)]


def checked_steps(folder: Path, groups: RankGroups) -> list[CheckedStep]:
    """The steps that all ranks have recorded with their weights.

    Raises:
        Unjudgeable: there are none, or ranks do not show what they hold.
    """
    records = [record for group in groups.members for record in group]
    if groups.obstacle is not None:
        raise Unjudgeable(groups.obstacle)
    if any(record.damaged for record in records):
        raise Unjudgeable("the record is not as it was written")
    num_steps = min(len(record.checked) for record in records)
    if not num_steps:
        raise Unjudgeable("no step was recorded with its weights (--steps 0)")
    return [read_step(folder, groups, place) for place in range(num_steps)]
