"""The record of a watched command, read back: one `RankRecord` for each rank that trained, and its problems.

No torch, and nothing of the program that was watched is loaded.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from threefold.errors import DataError
from threefold.referee.rank.sealed import Values, digest, read_sealed

COMMAND_FILE = "command.json"

# Of the steps of the training, what other optimizers may have done meanwhile; and what is a trial of another model.
_MOST_LEFT_OUT, _MOST_TRIED = 0.1, 2


class ReadCall(NamedTuple):
    """A call of an outermost module (by its number): its optimizer step from 1, and the digests of its rows."""

    step: int
    module: int
    rows: tuple[str, ...]
    ignored: tuple[int, ...]
    labelled: bool
    loader_pass: tuple[int, int] | None
    begin: int = 0
    """the least position of a row's first token, where the model is called with positions."""


@dataclass
class LoaderPass:
    """A pass of a DataLoader: the rows of its data set, if known, and its samplers, outermost first."""

    rows: int | None
    batches: int
    ended: bool
    samplers: list[Values]

    def setting(self, *names: str) -> Any:
        """The first of these settings that a sampler has, from the outermost in."""
        return next(
            (each[name] for each in self.samplers for name in names if name in each), None
        )


@dataclass
class RankRecord:
    """The record of one rank, as read.

    Attributes:
        start: number of the command's program that trained as this rank.
        placement: of the model that is trained, and what it is built from.
        checked: the steps that are recorded with their weights and gradients, as they were written.
        damaged: whether a line or a file of it is not as it was written.
        joined: whether another optimizer takes steps on the same calls.
        saved: the state of the training when it was saved, by the step after which that was.
        exported: what transformers has written of a model, where and after which step.
        begins: the state before the first step, of a rank that is not the first of its number.
        rates: the learning rates of each step, by groups.
        is_cut: whether it has no end: the rank was killed.
        left_out: steps of other optimizers, before or after the training: probes and trials.
        mixed: why it does not show which steps are the training's.
        wrong: what makes the record incomplete, in words.
    """

    rank: int
    world_size: int
    start: int = 1
    calls: list[ReadCall] = field(default_factory=list)
    passes: dict[tuple[int, int], LoaderPass] = field(default_factory=dict)
    num_steps: int = 0
    placement: Values = field(default_factory=dict)
    checked: list[Values] = field(default_factory=list)
    damaged: bool = False
    joined: bool = False
    saved: dict[int, Values] = field(default_factory=dict)
    exported: list[Values] = field(default_factory=list)
    begins: Values | None = None
    rates: dict[int, list[float]] = field(default_factory=dict)
    folder: Path = Path()
    is_cut: bool = False
    left_out: int = 0
    mixed: str | None = None
    wrong: list[str] = field(default_factory=list)


Records = list[RankRecord]


@dataclass
class WatchedCommand:
    """All that a folder holds. `exit_code` is None while the command runs, or if the referee was killed.

    Attributes:
        ranks: of the first program that trained, and of `later` ones in their order: they may continue from its save.
    """

    command: list[str]
    exit_code: int | None
    ranks: Records
    wrong: list[str]
    later: list[Records]

    @property
    def starts(self) -> list[Records]:
        """The ranks of each program."""
        return [self.ranks, *self.later]


def write_command(folder: Path, command: Sequence[str], exit_code: int | None) -> None:
    """Reports the contents of a record's folder, and how it ended."""
    values = {"schema": 1, "command": list(command), "exit_code": exit_code}
    (folder / COMMAND_FILE).write_text(json.dumps(values) + "\n", encoding="utf-8")


def read_command(folder: Path) -> WatchedCommand:
    """The record in a folder.

    Raises:
        DataError: there is none.
    """
    try:
        values = json.loads((folder / COMMAND_FILE).read_text(encoding="utf-8"))
        command, exit_code = list(values["command"]), values["exit_code"]
    except (OSError, ValueError, LookupError, TypeError):
        raise DataError(
            f"{folder} holds no record of the referee",
            expected=f"a folder with {COMMAND_FILE} and rank-*.jsonl",
            fix=f"threefold referee --record {folder} -- torchrun --nproc-per-node 2 train.py",
        ) from None
    starts: dict[int, Records] = {1: []}
    wrong: list[str] = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        record = _read_rank(path)
        if record is None:
            wrong.append(f"{path.name} has no beginning")
        elif any(record.rank == other.rank for other in starts.setdefault(record.start, [])):
            wrong.append(f"{path.name} is one of two records of rank {record.rank}")
        else:
            starts[record.start].append(record)
    ranks, *later = (starts[number] for number in sorted(starts))
    return WatchedCommand(command, exit_code, ranks, wrong, later)


def _read_rank(path: Path) -> RankRecord | None:
    lines, damage = read_sealed(path)
    if not lines or lines[0]["kind"] != "start":
        return None
    start, *rest = lines
    record = RankRecord(start["rank"], start["world_size"], start["start"], folder=path.parent)
    of_kind = defaultdict[str, list[Values]](list)
    for line in rest:
        of_kind[line["kind"]].append(line)
    for line in of_kind["step"]:
        for kind in ("inputs", "curve"):
            record.wrong += _wrong_file(path.parent, line.get(kind, {}))
    record.damaged = bool(record.wrong) or damage is not None
    for line in of_kind["pass"]:
        record.passes[tuple(line["pass"])] = LoaderPass(
            line["rows"], line["batches"], line["ended"], line["samplers"]
        )
    record.wrong += [
        f"rank {record.rank}: the referee stopped recording ({line['what']})"
        for line in of_kind["fault"]
    ]
    if unseen := of_kind["unseen"]:
        record.wrong.append(
            f"rank {record.rank}: {len(unseen)} steps of its optimizer follow no call of the model in training mode"
        )
    record.joined = bool(of_kind["joined"])
    record.saved = {line["step"]: line for line in of_kind["saved"]}
    record.exported = of_kind["exported"]
    placements = {line["module"]: line for line in of_kind["placement"]}
    _take_training(record, of_kind["step"], placements)
    if record.calls:
        record.placement = placements[record.calls[0].module]
    if damage is not None:
        record.wrong.append(damage)
    elif not of_kind["end"] and not record.wrong:
        record.is_cut = True
        record.wrong.append(
            f"rank {record.rank} was killed, or its record is cut: {path.name} has no end"
        )
    return record


def _take_training(
    record: RankRecord, steps: list[Values], placements: dict[int, Values]
) -> None:
    """Takes the steps of the one training of a program, which may train probes or trials before or after it."""
    runs = [list(lines) for _, lines in groupby(steps, key=itemgetter("optimizer"))]
    if not runs:
        return
    longest = max(runs, key=len)
    num_optimizers = len({line["optimizer"] for line in steps})
    record.num_steps = len(longest)
    record.left_out = len(steps) - len(longest)

    def models_of(lines: list[Values]) -> set[int]:
        return {placements[call["module"]]["model"] for line in lines for call in line["calls"]}

    # A few steps of models that the training does not call, wrapped or not.
    is_tried = all(
        len(lines) <= _MOST_TRIED and models_of(lines).isdisjoint(models_of(longest))
        for lines in runs
        if lines is not longest
    )
    if num_optimizers < len(runs):
        record.mixed = f"rank {record.rank} trains with {num_optimizers} optimizers in turn"
    elif record.left_out > _MOST_LEFT_OUT * len(longest) and not is_tried:
        record.mixed = (
            f"rank {record.rank} trains {len(runs)} times, for "
            f"{', '.join(str(len(lines)) for lines in runs)} steps"
        )
    record.begins = longest[0].get("begins")
    # Gradients that are set to zero again: of a trial before the first step, but not of each step.
    if not any("cleared" in call for line in longest[1:] for call in line["calls"]):
        longest[0]["first"] = sum("cleared" in call for call in longest[0]["calls"])
    for line in steps if record.mixed else longest:
        record.calls += _calls_of(line)
        record.rates[line["step"]] = line.get("rates", [])
        if "curve" in line:
            record.checked.append(line)


def trained_calls(line: Values) -> Iterator[tuple[int, Values]]:
    """The calls of a step that read rows, each with its place."""
    yield from list(enumerate(line["calls"]))[line.get("first", 0) :]


def _calls_of(line: Values) -> Iterator[ReadCall]:
    """The calls of a step; one that repeats the rows of the call before it reads nothing more."""
    before: tuple[str, ...] | None = None
    for _, call in trained_calls(line):
        rows = tuple(call["rows"])
        if rows != before:
            yield ReadCall(
                line["step"],
                call["module"],
                rows,
                tuple(call["ignored"]),
                call["labelled"],
                call["pass"] and tuple(call["pass"]),
                call["begin"],
            )
        before = rows


def _wrong_file(folder: Path, written: Values) -> Iterator[str]:
    if "file" in written:
        try:
            if digest((folder / written["file"]).read_bytes()) != written["digest"]:
                yield f"{written['file']} was altered"
        except OSError as error:
            yield f"{written['file']} cannot be read: {error.strerror}"
