"""The checked steps of a record: the weights and gradients of the model, whole, and the rows that it is trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from threefold.referee.judge.groups import RankGroups
from threefold.referee.judge.parts import Unjudgeable
from threefold.referee.judge.states import distinct
from threefold.referee.rank.rows import Tensors
from threefold.referee.rank.sealed import Values
from threefold.referee.record import RankRecord, trained_calls

# Weights are read from gradients, which bfloat16 rounds: to 0.003 of one another.
_EVEN = 0.01


@dataclass
class TrainedRows:
    """The unit that one coefficient is fitted for: a row of a call, or a call that cannot be split.

    Attributes:
        inputs: of the model, by name or place.
        targets, weights: what each output is trained on, as the gradient at the logits shows it; None: not shown.
        has_own_loss: whether the program trains on the loss that the model computes from labels.
        random: the state of the random numbers before the call, for a model with dropout.
        counted: the weights, each times the targets of its call on its own rank.
        is_other_loss: whether the gradient at the logits is that of no cross-entropy.
    """

    rank: int
    call: int
    row: int | None
    inputs: Tensors
    targets: Tensor | None
    weights: Tensor | None
    has_own_loss: bool = False
    random: Tensor | None = None
    counted: Tensor | None = None
    is_other_loss: bool = False

    def without(self, name: str) -> TrainedRows:
        """The same rows without one of their inputs."""
        return replace(
            self, inputs={other: value for other, value in self.inputs.items() if other != name}
        )

    @property
    def shares(self) -> Tensor:
        """The weight of each target, as a multiple of the unit's mean: 1 if the loss treats all of them equally."""
        return (
            torch.ones(())
            if self.weights is None or self.is_even
            else self.weights.flatten() / self._shown.mean()
        )

    @property
    def mean_weight(self) -> float | None:
        """The mean weight of the targets in the program's loss; None if it does not show."""
        return float(self._shown.mean()) if len(self._shown) else None

    @property
    def is_even(self) -> bool:
        """Whether the program's loss treats the targets of this unit equally."""
        return are_even(self._shown)

    @property
    def by_rank(self) -> Tensor:
        """The weights of the targets: equal, if each rank divides by the targets that it holds."""
        return self._of_targets(self.counted)

    @property
    def _shown(self) -> Tensor:
        return self._of_targets(self.weights)

    def _of_targets(self, weights: Tensor | None) -> Tensor:
        """The weights of the targets; none if they do not show."""
        return (
            torch.ones(0)
            if weights is None or self.targets is None
            else weights[self.targets != -100]
        )


def are_even(weights: Tensor) -> bool:
    """Whether weights are equal but for rounding."""
    return bool(((weights / weights.mean() - 1).abs() < _EVEN).all())


@dataclass
class CheckedStep:
    """One step.

    Attributes:
        weights, gradients: of the whole model, by name; the weights as they were before the step.
        units: of all data ranks.
        types: of what modules computed.
        weight_types: of the weights.
        trained: the parameters that ask for a gradient.
        clip: the norm to which gradients were clipped, and the norm that was found; why both are `unknown`; or that
            of a clip without effect (`idle`); empty: they were not.
        optimizer: its class, its groups, and whether it had no state before the step.
        ranks_a_copy: how many ranks compute one copy of the model together.
    """

    number: int
    weights: Tensors
    gradients: Tensors
    units: list[TrainedRows]
    types: set[str]
    weight_types: set[str]
    trained: list[str]
    clip: Values
    optimizer: Values
    ranks_a_copy: int = 1

    def require_finite(self) -> None:
        """Raises that a gradient is not finite, if one is not."""
        if not all(value.isfinite().all() for value in self.gradients.values()):
            raise Unjudgeable(f"step {self.number} has a gradient that is not finite")


def checked_steps(folder: Path, groups: RankGroups) -> list[CheckedStep]:
    """The steps that all ranks have recorded with their weights.

    Raises:
        Unjudgeable: there are none, or ranks do not show what they hold.
    """
    groups.check()
    if any(record.damaged for record in groups.records):
        raise Unjudgeable("the record was altered")
    return [_read_step(folder, groups, place) for place in range(groups.num_checked)]


def _read_step(folder: Path, groups: RankGroups, place: int) -> CheckedStep:
    """A checked step (counted from 0) of all ranks.

    Raises:
        Unjudgeable: parts of it were not recorded.
    """
    records = groups.records
    lines = [record.checked[place] for record in records]
    for record, line in zip(records, lines, strict=True):
        if (
            why := line["curve"].get("unknown")
            or line["curve"].get("left_out")
            or line["inputs"].get("left_out")
        ):
            raise Unjudgeable(f"rank {record.rank}: {why}")
        if {call["module"] for call in line["calls"]} != {line["curve"]["module"]}:
            raise Unjudgeable(f"rank {record.rank} trains several models in a step")
    files = [
        load_file(folder / line["curve"]["file"]) if "file" in line["curve"] else {}
        for line in lines
    ]
    weight_types = {
        str(value.dtype).removeprefix("torch.")
        for file in files
        for name, value in file.items()
        if name.startswith("weight.")
    }
    first = lines[0]["curve"]
    step = CheckedStep(
        lines[0]["step"],
        dict(_assembled("weight", lines, files)),
        dict(_assembled("gradient", lines, files)),
        [unit for record in groups.first_of_each for unit in _units(groups, record, place)],
        {kind for line in lines for kind in line["curve"]["types"]} | weight_types,
        weight_types,
        first["trained"],
        _clip_of(lines, records),
        first["optimizer"],
        max(len(group) for group in groups.members),
    )
    for name in step.trained:
        # A parameter that is to be trained and gets no gradient.
        step.gradients.setdefault(name, torch.zeros_like(step.weights[name]))
    return step


def _clip_of(lines: list[Values], records: list[RankRecord]) -> Values:
    """The clip of the first rank, with the norm of the parts of all ranks that it is taken over."""
    clips = {
        record.rank: line["curve"]["clip"] for record, line in zip(records, lines, strict=True)
    }
    first: Values = clips[records[0].rank]
    parts = [clips.get(rank, {}).get("norm") for rank in first.get("ranks", ())]
    if not parts:
        return first
    if None in (*parts, first["order"]):
        return {**first, "norm": None}
    norm = torch.tensor(parts, dtype=torch.float64).norm(first["order"] or math.inf)
    return {**first, "norm": norm.item()}


def _assembled(
    kind: str, lines: list[Values], files: list[Tensors]
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor, whole, from the parts of all ranks."""
    names = dict.fromkeys(name for line in lines for name in line["curve"].get(f"{kind}s", {}))
    for name in names:
        held = [
            {**line["curve"][f"{kind}s"][name], "values": file[f"{kind}.{name}"]}
            for line, file in zip(lines, files, strict=True)
            if f"{kind}.{name}" in file
        ]
        parts = distinct(name, held, "digest")
        whole = torch.empty(parts[0]["shape"])
        for part in parts:
            begin, values = part["begin"], part["values"]
            places = tuple(
                slice(start, start + size)
                for start, size in zip(begin, values.shape, strict=True)
            )
            (whole if len(begin) == whole.ndim else whole.flatten())[places] = values
        yield name, whole


def _units(groups: RankGroups, record: RankRecord, place: int) -> Iterator[TrainedRows]:
    line, shared = record.checked[place], groups.shared[record.rank]
    files = {each.rank: each.checked[place]["inputs"]["file"] for each in groups.records}
    tensors = shared.whole([load_file(record.folder / files[rank]) for rank in shared.ranks])
    for number, call in trained_calls(line):
        mine = {
            name.partition(".")[2]: value
            for name, value in tensors.items()
            if name.startswith(f"{number}.")
        }
        of_all = {
            name.removeprefix("!shared."): mine.pop(name)
            for name in [*mine]
            if name.startswith("!shared.")
        }
        random = mine.pop("!random", None)
        is_whole = random is not None or any(len(value) != 1 for value in of_all.values())
        for row in [None] if is_whole else range(len(call["rows"])):
            inputs = {
                name: value if row is None else value[row : row + 1]
                for name, value in mine.items()
            }
            shown = [inputs.pop(name, None) for name in ("!targets", "!weights", "!counted")]
            targets, weights, counted = shown if call.get("targets") else (None, None, None)
            inputs |= of_all
            yield TrainedRows(
                record.rank,
                number,
                row,
                inputs,
                targets,
                weights,
                call.get("own_loss", False),
                random,
                counted,
                call.get("targets") is False,
            )
