"""A program that is started again: whether it goes on from what was saved, with the rows and learning rates as before.

The state before its first step is compared with each state that was saved, value by value through sums that are the
same on any mesh. Where the first start trained on beyond the save, the steps of both are compared; and both together
are one training, whose epochs are judged as those of one start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from threefold.referee.judge.parts import JudgedPart, Rows, none_here, not_judged, proved, refuted
from threefold.referee.judge.states import WEIGHT, UnknownState, WholeState, whole_state
from threefold.referee.record import LoaderPass, RankRecord, WatchedCommand

RESUME = "resume"


@dataclass(frozen=True)
class WholeTraining:
    """The starts of a command as one training: its ranks up to the last start, and what is said of the resumes.

    Attributes:
        others: why a later start belongs to another training; None if it does not.
    """

    ranks: list[RankRecord]
    parts: tuple[JudgedPart, ...]
    others: str | None = None


def whole_training(watched: WatchedCommand) -> WholeTraining:
    """Joins the starts of a command, each from the step from which it goes on."""
    ranks = watched.ranks
    if not watched.later:
        return WholeTraining(ranks, (none_here(RESUME, "no program of the command went on from a save"),))
    parts: list[JudgedPart] = []
    for number, later in enumerate(watched.later, start=2):
        try:
            step = _step_of(ranks, later)
        except UnknownState as why:
            return WholeTraining(ranks, (*parts, not_judged(RESUME, f"start {number}: {why}")))
        if step is None:
            return WholeTraining(ranks, tuple(parts), "two programs trained, and the second does not go on from a save")
        parts.append(_judge(number, ranks, later, step))
        if not _same_ranks(ranks, later):
            return WholeTraining(ranks, tuple(parts))
        ranks = [_joined(before, after, step) for before, after in zip(ranks, later, strict=True)]
    return WholeTraining(ranks, tuple(parts))


def _saved(ranks: Sequence[RankRecord]) -> dict[int, WholeState]:
    """What was saved, by step: by all ranks, or by one that holds all of it."""
    saved: dict[int, WholeState] = {}
    unknown: UnknownState | None = None
    for step in sorted({step for record in ranks for step in record.saved}):
        try:
            saved[step] = whole_state([record.saved[step] for record in ranks if step in record.saved])
        except UnknownState as why:
            unknown = why
    if unknown is not None and not saved:
        raise unknown
    return saved


def _step_of(before: Sequence[RankRecord], after: Sequence[RankRecord]) -> int | None:
    """The step from which a start goes on: the last save whose weights it has, or has most of; None: from no save."""
    if len(after) != after[0].world_size or any(record.begins is None for record in after):
        raise UnknownState("not all of its ranks left a record")
    if any(record.placement.get("how") == "FullyShardedDataParallel" for record in (*before, *after)):
        raise UnknownState("FullyShardedDataParallel does not show which part of a parameter a rank holds")
    begins = whole_state([record.begins for record in after if record.begins is not None])
    is_loaded = any(record.begins and record.begins["loaded"] for record in after)
    saved = _saved(before)
    if not saved:
        if is_loaded:
            raise UnknownState("it loads a state of an optimizer that start 1 has not saved")
        return None
    step = max(saved, key=lambda step: (len(_same(saved[step], begins, weights=True)), step))
    num_weights = sum(key == WEIGHT for _, key in saved[step])
    # Frozen weights, and norms at their first values, are equal in trainings that have nothing to do with one another.
    return step if is_loaded or 2 * len(_same(saved[step], begins, weights=True)) > num_weights else None


def _same(saved: WholeState, begins: WholeState, *, weights: bool) -> set[tuple[str, str]]:
    """The names of what is equal in both, of weights or of what the optimizer keeps."""
    return {name for name, value in saved.items() if (name[1] == WEIGHT) is weights and begins.get(name) == value}


def _judge(number: int, before: list[RankRecord], after: list[RankRecord], step: int) -> JudgedPart:
    """Whether a start goes on from a step as if it had not stopped."""
    saved = _saved(before)
    begins = whole_state([record.begins for record in after if record.begins is not None])
    what = f"start {number} goes on from step {step}"
    expected = f"weights, moments, learning rates and rows as they were after step {step}"
    if wrong := _wrong_weights(saved[step], begins):
        where = "what is saved or loaded of the model: a shard, a name, strict=False, a type, weights that were tied"
        return refuted(RESUME, f"{what} with {wrong}", expected=expected, where=where)
    if wrong := _wrong_moments(saved, begins, step):
        where = "what is saved or loaded of the optimizer: its state_dict, after the parameters are in its groups"
        return refuted(RESUME, f"{what} with {wrong}", expected=expected, where=where)
    beyond = sorted(before[0].rates.keys() & {step + each for each in after[0].rates})
    for each in beyond:
        for old, new in zip(before, after, strict=False):
            rates = old.rates[each], new.rates.get(each - step)
            if rates[0] != rates[1]:
                shown = " and ".join(", ".join(f"{rate:.6g}" for rate in known or ()) for known in rates)
                text = f"{what} with other learning rates: in step {each} they were {shown}"
                where = "the schedule: its state_dict must be saved and loaded too"
                return refuted(RESUME, text, expected=expected, where=where)
    if isinstance(rows := _wrong_rows(before, after, step, beyond), JudgedPart):
        return replace(rows, what=f"{what} {rows.what}", expected=expected)
    num_moments = sum(key != WEIGHT for _, key in begins)
    held = f"{len(begins) - num_moments} weights and {num_moments} values of the optimizer as they were saved"
    if beyond:
        return proved(RESUME, f"{what}: {held}; in {len(beyond)} steps the learning rates and rows of start 1")
    if not _same_ranks(before, after):
        why = "on other ranks the rows after it do not show: let start 1 train beyond a save"
        return not_judged(RESUME, f"{what}: {held}; {why}")
    constant = {tuple(rates) for record in (*before, *after) for rates in record.rates.values()}
    if len(constant) > 1:
        why = "start 1 ended there, so its next learning rates do not show: let it train beyond a save"
        return not_judged(RESUME, f"{what}: {held}; {why}")
    return proved(RESUME, f"{what}: {held}; one learning rate")


def _wrong_weights(saved: WholeState, begins: WholeState) -> str | None:
    names = [name for name in saved if name[1] == WEIGHT]
    same = _same(saved, begins, weights=True)
    if new := [name for name in begins if name[1] == WEIGHT and name not in saved]:
        return f"weights that were not saved: {_listed(new)}"
    wrong = [name for name in names if name not in same]
    return f"{len(wrong)} of {len(names)} weights that are not as saved: {_listed(wrong)}" if wrong else None


def _wrong_moments(saved: dict[int, WholeState], begins: WholeState, step: int) -> str | None:
    names = [name for name in saved[step] if name[1] != WEIGHT]
    wrong = [name for name in names if begins.get(name) != saved[step][name]]
    if not wrong:
        return None
    if not any(key != WEIGHT for _, key in begins):
        return f"an optimizer without a state: {_listed(wrong)} begin at 0"
    for other, state in saved.items():
        if other != step and all(begins.get(name) == state.get(name) for name in names):
            return f"the moments of step {other}"
    return f"{len(wrong)} of {len(names)} values of the optimizer that are not as saved: {_listed(wrong)}"


def _listed(names: Sequence[tuple[str, str]]) -> str:
    shown = ", ".join(" ".join(filter(None, name)) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown}, ..."


def _wrong_rows(
    before: list[RankRecord], after: list[RankRecord], step: int, beyond: Sequence[int]
) -> JudgedPart | None:
    """Whether a start reads other rows than the one before it did in the same steps, or does not show it."""
    old, new = _rows_of(before), _rows_of(after)
    known = sum(old.values(), Counter[str]())
    if beyond and not any(known & new.get(each - step, Counter()) for each in beyond):
        return not_judged(RESUME, "and no row came again, so it does not show whether a row looks the same each time")
    where = "the sampler or the loader: it must go on at the row after the last one that was trained on"
    for each in beyond:
        if num_other := (new.get(each - step, Counter()) - old[each]).total():
            what = f"and reads other rows than start 1 did: {num_other} of {old[each].total()} in step {each}"
            return refuted(RESUME, what, expected="", where=where)
    return None


def _rows_of(ranks: Sequence[RankRecord]) -> dict[int, Rows]:
    """The rows of each step, of the first rank of each copy of the model: others read the same."""
    steps: dict[int, Rows] = {}
    read_by: dict[int, set[int]] = {}
    for record in ranks:
        data_ranks = record.placement.get("data_ranks", [record.rank])
        place = data_ranks.index(record.rank) if record.rank in data_ranks else record.rank
        if read_by.setdefault(place, {record.rank}) == {record.rank}:
            for call in record.calls:
                steps.setdefault(call.step, Counter()).update(call.rows)
    return steps


def _same_ranks(before: Sequence[RankRecord], after: Sequence[RankRecord]) -> bool:
    shown = [[(each.rank, each.placement.get("data_ranks")) for each in ranks] for ranks in (before, after)]
    return shown[0] == shown[1]


def _joined(before: RankRecord, after: RankRecord, step: int) -> RankRecord:
    """The calls of a rank up to a step, and those of the start that goes on from there."""
    kept = [call for call in before.calls if call.step <= step]
    open_pass = kept[-1].loader_pass if kept else None
    was_left = any(call.loader_pass == open_pass for call in before.calls if call.step > step)
    passes = {name: each for name, each in before.passes.items() if any(call.loader_pass == name for call in kept)}
    is_open = open_pass in passes and (was_left or not passes[open_pass].ended)
    first = after.calls[0].loader_pass
    names = {
        name: open_pass if is_open and name == first else (name[0], name[1] + 1000 * after.start)
        for name in after.passes
    }
    calls = kept + [
        call._replace(step=call.step + step, loader_pass=names.get(call.loader_pass) if call.loader_pass else None)
        for call in after.calls
    ]
    for name, each in after.passes.items():
        new_name = names[name]
        if new_name is not None:
            num_rows = sum(len(call.rows) for call in calls if call.loader_pass == new_name)
            passes[new_name] = _continued(passes[new_name], each, num_rows) if new_name in passes else each
    shifted = {number + step: rates for number, rates in after.rates.items()}
    return replace(
        before,
        calls=calls,
        passes=passes,
        num_steps=step + after.num_steps,
        rates={number: rates for number, rates in before.rates.items() if number <= step} | shifted,
        checked=[line for line in before.checked if line["step"] <= step],
        saved={number: each for number, each in before.saved.items() if number <= step}
        | {number + step: each for number, each in after.saved.items()},
        mixed=before.mixed or after.mixed,
        wrong=[*(() if before.is_cut else before.wrong), *after.wrong],
        is_cut=after.is_cut,
    )


def _continued(before: LoaderPass, after: LoaderPass, num_rows: int) -> LoaderPass:
    """A pass that was broken off and went on in another start, which skips what had been read, or does not read it."""
    size = before.setting("batch_size") or 1
    return replace(before, batches=-(-num_rows // size), ended=after.ended)
