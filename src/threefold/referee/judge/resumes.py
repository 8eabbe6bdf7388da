"""A program that is started again: whether it continues from what was saved, with rows and learning rates as before.

The state before its first step is compared with each state that was saved, value by value through sums that are the
same on any mesh. Where the first start trained on beyond the save, the steps of both are compared; and both together
are one training, whose epochs are judged as those of one start.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from threefold.referee.judge.groups import groups_of, sequences_of
from threefold.referee.judge.parts import (
    JudgedPart,
    PartStatus,
    Refuted,
    Unjudgeable,
    judges,
    listed,
    not_judged,
    proved,
)
from threefold.referee.judge.shared_rows import rows_by_step
from threefold.referee.judge.states import WholeState, differing, whole_state
from threefold.referee.record import RankRecord, Records, WatchedCommand

RESUME = "resume"


@dataclass(frozen=True)
class WholeTraining:
    """The starts of a command as one training: its ranks up to the last start, and the verdict on the resumes.

    Attributes:
        others: why a later start belongs to another training; None if it does not.
    """

    ranks: Records
    parts: tuple[JudgedPart, ...]
    others: str | None = None


def whole_training(watched: WatchedCommand) -> WholeTraining:
    """Joins the starts of a command, each from the step from which it continues."""
    ranks = watched.ranks
    none = JudgedPart(RESUME, PartStatus.NONE, "no program of the command resumed from a save")
    parts = [] if watched.later else [none]
    for number, later in enumerate(watched.later, start=2):
        try:
            step = _step_of(ranks, later)
        except Unjudgeable as why:
            return WholeTraining(ranks, (*parts, not_judged(RESUME, f"start {number}: {why}")))
        if step is None:
            return WholeTraining(
                ranks,
                tuple(parts),
                "two programs trained, and the second does not resume from a save",
            )
        parts.append(_judge(number, ranks, later, step))
        if _division(ranks) != _division(later):
            return WholeTraining(ranks, tuple(parts))
        ranks = [
            _joined(before, after, step) for before, after in zip(ranks, later, strict=True)
        ]
    return WholeTraining(ranks, tuple(parts))


def _saved(ranks: Records) -> dict[int, WholeState]:
    """The saved states, by step: by all ranks, or by one that holds all of it."""
    saved: dict[int, WholeState] = {}
    unknown: Unjudgeable | None = None
    for step in sorted({step for record in ranks for step in record.saved}):
        try:
            saved[step] = whole_state(
                [record.saved[step] for record in ranks if step in record.saved]
            )
        except Unjudgeable as why:
            unknown = why
    if unknown is not None and not saved:
        raise unknown
    return saved


def _step_of(before: Records, after: Records) -> int | None:
    """The step from which a start continues: the last save whose weights it has, or most of them; None: no save."""
    if len(after) != after[0].world_size or any(record.begins is None for record in after):
        raise Unjudgeable("not all of its ranks left a record")
    begins = _begins(after)
    is_loaded = any(record.begins and record.begins["loaded"] for record in after)
    saved = _saved(before)
    if not saved:
        if is_loaded:
            raise Unjudgeable("it loads an optimizer state that start 1 did not save")
        return None
    num_equal = {
        step: len(state.weights.items() & begins.weights.items())
        for step, state in saved.items()
    }
    step = max(saved, key=lambda step: (num_equal[step], step))
    # Frozen weights, and norms at their first values, are equal in trainings that have nothing to do with one another.
    return step if is_loaded or 2 * num_equal[step] > len(saved[step].weights) else None


@judges(RESUME)
def _judge(number: int, before: Records, after: Records, step: int) -> JudgedPart:
    """Whether a start continues from a step as if it had not stopped."""
    begins = _begins(after)
    what = f"start {number} resumes from step {step}"
    beyond = sorted(before[0].rates.keys() & {step + each for each in after[0].rates})
    for wrong, where in _differences(before, after, step, beyond):
        expected = f"weights, moments, learning rates and rows as they were after step {step}"
        raise Refuted(f"{what} {wrong}", expected, where)
    held = f"{what}: {len(begins.weights)} weights and {len(begins.moments)} values of the optimizer as they were saved"
    if beyond:
        return proved(f"{held}; in {len(beyond)} steps the learning rates and rows of start 1")
    if _division(before) != _division(after):
        raise Unjudgeable(
            f"{held}; with other ranks, later rows cannot be compared: let start 1 train beyond a save"
        )
    rates = {tuple(rates) for each in (*before, *after) for rates in each.rates.values()}
    if len(rates) > 1:
        raise Unjudgeable(
            f"{held}; start 1 ended there, so its next learning rates are not known: let it train beyond a save"
        )
    return proved(f"{held}; one learning rate")


def _differences(
    before: Records, after: Records, step: int, beyond: list[int]
) -> Iterator[tuple[str, str]]:
    """Differences from the state after a step, and from the steps beyond it; and where to look."""
    saved, begins = _saved(before), _begins(after)
    if wrong := _wrong_weights(saved[step], begins):
        where = "what is saved or loaded of the model: a shard, a name, strict=False, a type, weights that were tied"
        yield f"with {wrong}", where
    if wrong := _wrong_moments(saved, begins, step):
        where = "what is saved or loaded of the optimizer: its state_dict, after the parameters are in its groups"
        yield f"with {wrong}", where
    for each in beyond:
        for old, new in zip(before, after, strict=False):
            rates = old.rates[each], new.rates.get(each - step)
            if rates[0] != rates[1]:
                shown = " and ".join(
                    ", ".join(f"{rate:.6g}" for rate in groups or ()) for groups in rates
                )
                where = "the schedule: its state_dict must be saved and loaded too"
                yield f"with other learning rates: in step {each} they were {shown}", where
    old_rows, new_rows = (
        rows_by_step(*groups_of(ranks).first_of_each) for ranks in (before, after)
    )
    known_rows = sum(old_rows.values(), Counter[str]())
    read_again = {each: new_rows.get(each - step, Counter()) for each in beyond}
    if beyond and not any(known_rows & rows for rows in read_again.values()):
        raise Unjudgeable(
            "no row recurred, so it is unknown whether a row looks the same each time"
        )
    where = (
        "the sampler or the loader: it must continue at the row after the last one trained on"
    )
    for each, rows in read_again.items():
        if num_other := (rows - old_rows[each]).total():
            what = f"{num_other} of {old_rows[each].total()} in step {each}"
            yield f"and reads different rows from start 1: {what}", where


def _begins(ranks: Records) -> WholeState:
    """The state before the first step of a start."""
    return whole_state([record.begins for record in ranks if record.begins is not None])


def _wrong_weights(saved: WholeState, begins: WholeState) -> str | None:
    if new := [name for name in begins.weights if name not in saved.weights]:
        return f"weights that were not saved: {listed(new)}"
    if wrong := differing(saved.weights, begins.weights):
        return f"{len(wrong)} of {len(saved.weights)} weights that are not as saved: {listed(wrong)}"
    return None


def _wrong_moments(saved: dict[int, WholeState], begins: WholeState, step: int) -> str | None:
    names = saved[step].moments
    wrong = differing(names, begins.moments)
    if not wrong:
        return None
    if not begins.moments:
        return f"an optimizer without a state: {listed(wrong)} begin at 0"
    for other, state in saved.items():
        if all(begins.moments.get(name) == state.moments.get(name) for name in names):
            return f"the moments of step {other}"
    return f"{len(wrong)} of {len(names)} values of the optimizer that are not as saved: {listed(wrong)}"


def _division(ranks: Records) -> Any:
    """How ranks divide the rows."""
    shares = [(each.rank, each.placement.get("data_ranks")) for each in ranks]
    return shares, sequences_of(ranks)


def _joined(before: RankRecord, after: RankRecord, step: int) -> RankRecord:
    """The calls of a rank up to a step, and those of the start that continues from there."""
    kept = [call for call in before.calls if call.step <= step]
    last: Any = kept[-1].loader_pass if kept else None
    first: Any = after.calls[0].loader_pass
    was_left = any(call.loader_pass == last for call in before.calls if call.step > step)
    is_open = last in before.passes and (was_left or not before.passes[last].ended)

    def renamed(name: Any) -> Any:
        return (
            last
            if is_open and name == first
            else name and (name[0], name[1] + 1000 * after.start)
        )

    def shifted(old: dict[int, Any], new: dict[int, Any]) -> dict[int, Any]:
        until = {number: each for number, each in old.items() if number <= step}
        return until | {number + step: each for number, each in new.items()}

    calls = kept + [
        call._replace(step=call.step + step, loader_pass=renamed(call.loader_pass))
        for call in after.calls
    ]
    used = {call.loader_pass for call in kept}
    passes = {name: each for name, each in before.passes.items() if name in used}
    passes |= {renamed(name): each for name, each in after.passes.items()}
    if is_open and first in after.passes:
        # Rows already read are skipped, or not read again.
        num_rows = sum(len(call.rows) for call in calls if call.loader_pass == last)
        num_batches = -(-num_rows // (before.passes[last].setting("batch_size") or 1))
        passes[last] = replace(
            before.passes[last], batches=num_batches, ended=after.passes[first].ended
        )
    return replace(
        before,
        calls=calls,
        passes=passes,
        num_steps=step + after.num_steps,
        rates=shifted(before.rates, after.rates),
        checked=[line for line in before.checked if line["step"] <= step],
        saved=shifted(before.saved, after.saved),
        mixed=before.mixed or after.mixed,
        wrong=[*(() if before.is_cut else before.wrong), *after.wrong],
        is_cut=after.is_cut,
    )
