"""The checked steps of a record: the weights and gradients of the model, whole, and the rows that it is trained on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from threefold.referee.judge.groups import RankGroups
from threefold.referee.record import RankRecord

# Weights are read from gradients, which bfloat16 rounds.
_EVEN = 0.05


class Unjudgeable(Exception):
    """Why the gradients of a record cannot be judged."""


@dataclass
class TrainedRows:
    """What one coefficient is fitted for: a row of a call, or a call that cannot be taken apart.

    Attributes:
        inputs: of the model, by name or place.
        targets, weights: what each output is trained on, as the gradient at the logits shows it; None: not shown.
        has_own_loss: whether the program trains on the loss that the model computes from labels.
        random: the state of the random numbers before the call, for a model with dropout.
    """

    rank: int
    call: int
    row: int | None
    inputs: dict[str, Tensor]
    targets: Tensor | None
    weights: Tensor | None
    has_own_loss: bool = False
    random: Tensor | None = None

    def shares(self) -> Tensor:
        """What each target counts, as a multiple of the unit's mean: 1 where the loss treats all of them equally."""
        assert self.weights is not None and self.targets is not None
        trained = self.weights[self.targets != -100]
        shares = self.weights / trained.mean()
        return torch.ones_like(shares) if self.is_even else shares

    @property
    def mean_weight(self) -> float | None:
        """The mean weight of the targets in the program's loss; None if it does not show."""
        if self.weights is None or self.targets is None:
            return None
        return float(self.weights[self.targets != -100].mean())

    @property
    def is_even(self) -> bool:
        """Whether the program's loss treats the targets of this unit equally."""
        if self.weights is None or self.targets is None:
            return True
        trained = self.weights[self.targets != -100]
        return bool(((trained / trained.mean() - 1).abs() < _EVEN).all())


@dataclass
class CheckedStep:
    """One step.

    Attributes:
        weights, gradients: of the whole model, by name; the weights as they were before the step.
        units: of all data ranks.
        types: of what modules computed.
        weight_types: of the weights.
        trained: the parameters that ask for a gradient.
        clip: the norm to which gradients were clipped, and the norm that was found; None: they were not.
        optimizer: its class, its groups, and whether it had no state before the step.
        ranks_a_copy: how many ranks compute one copy of the model together.
    """

    number: int
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    units: list[TrainedRows]
    types: set[str]
    weight_types: set[str]
    trained: list[str]
    clip: dict[str, Any] | None
    optimizer: dict[str, Any]
    ranks_a_copy: int = 1


def read_step(folder: Path, groups: RankGroups, place: int) -> CheckedStep:
    """A checked step (counted from 0) of all ranks.

    Raises:
        Unjudgeable: parts of it were not recorded.
    """
    records = [record for group in groups.members for record in group]
    lines = [record.checked[place] for record in records]
    for record, line in zip(records, lines, strict=True):
        if record.placement.get("how") == "FullyShardedDataParallel":
            raise Unjudgeable("FullyShardedDataParallel does not show which part of a parameter a rank holds")
        if why := line["curve"].get("unknown") or line["curve"].get("left_out") or line["inputs"].get("left_out"):
            raise Unjudgeable(f"rank {record.rank}: {why}")
        if {call["module"] for call in line["calls"]} != {line["curve"]["module"]}:
            raise Unjudgeable(f"rank {record.rank} trains several models in a step")
    files = [load_file(folder / line["curve"]["file"]) if "file" in line["curve"] else {} for line in lines]
    kept = {name: value for file in files for name, value in file.items() if name.startswith("weight.")}
    weight_types = {str(value.dtype).removeprefix("torch.") for value in kept.values()}
    step = CheckedStep(
        lines[0]["step"],
        dict(_assembled("weight", lines, files)),
        dict(_assembled("gradient", lines, files)),
        [unit for record in groups.first_of_each for unit in _units(folder, record, record.checked[place])],
        {kind for line in lines for kind in line["curve"]["types"]} | weight_types,
        weight_types,
        lines[0]["curve"]["trained"],
        lines[0]["curve"]["clip"],
        lines[0]["curve"]["optimizer"],
        max(len(group) for group in groups.members),
    )
    for name in lines[0]["curve"]["trained"]:
        # A parameter that is to be trained and gets no gradient.
        step.gradients.setdefault(name, torch.zeros_like(step.weights[name]))
    return step


def _assembled(kind: str, lines: list[dict[str, Any]], files: list[dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor, whole, from the parts of all ranks."""
    names = dict.fromkeys(name for line in lines for name in line["curve"].get(f"{kind}s", {}))
    for name in names:
        parts: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        shape: list[int] = []
        for line, file in zip(lines, files, strict=True):
            if (part := file.get(f"{kind}.{name}")) is not None:
                described = line["curve"][f"{kind}s"][name]
                shape = described["shape"]
                place = tuple(described["begin"]), tuple(part.shape)
                if not torch.equal(parts.setdefault(place, part), part):
                    raise Unjudgeable(f"ranks hold different values of {name} in the same place")
        if sum(part.numel() for part in parts.values()) != math.prod(shape) or not parts:
            raise Unjudgeable(f"the parts of {name} that ranks hold do not make the whole")
        whole = torch.empty(shape)
        for (begin, size), part in parts.items():
            whole[tuple(slice(start, start + length) for start, length in zip(begin, size, strict=True))] = part
        yield name, whole


def _units(folder: Path, record: RankRecord, line: dict[str, Any]) -> Iterator[TrainedRows]:
    tensors = load_file(folder / line["inputs"]["file"])
    for place, call in enumerate(line["calls"]):
        mine = {name.partition(".")[2]: value for name, value in tensors.items() if name.startswith(f"{place}.")}
        special = {name: value for name, value in mine.items() if name.startswith("!")}
        inputs = {name: value for name, value in mine.items() if name not in special}
        shared = {name.removeprefix("!shared."): value for name, value in special.items() if "!shared." in name}
        targets, weights = special.get("!targets"), special.get("!weights")
        if not call.get("targets"):
            targets = weights = None
        random, own_loss = special.get("!random"), bool(call.get("own_loss"))
        if random is not None or any(len(value) != 1 for value in shared.values()):
            yield TrainedRows(record.rank, place, None, inputs | shared, targets, weights, own_loss, random)
            continue
        for row in range(len(call["rows"])):
            one = {name: value[row : row + 1] for name, value in inputs.items()}
            mine_only = [None if value is None else value[row : row + 1] for value in (targets, weights)]
            yield TrainedRows(record.rank, place, row, one | shared, mine_only[0], mine_only[1], own_loss)
