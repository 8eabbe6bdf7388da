"""The weights of rows in an update: the laws that programs follow, and the one that recorded gradients show.

A law gives each unit (a row, or a micro-batch that cannot be taken apart) the weight of one of its targets. A gradient
is a sum of the units' own gradients, each the gradient of the sum over its targets, with these weights.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Of each parameter some values of gradients: [units, values] the units' own, and [values] the recorded.
Samples = list[tuple[Tensor, Tensor]]

TARGETS = "the mean over all targets"
OWN_LOSS = "what the program's own loss weighs"

# The share by which units' gradients must differ for their weights to be determined.
_WORST_CONDITION = 1e6


class UnitSize(NamedTuple):
    """A unit: its data rank, its micro-batch, its row or None for all of them, its targets and labels."""

    rank: int
    call: int
    row: int | None
    num_targets: int
    num_labels: int

    def __str__(self) -> str:
        row = "" if self.row is None else f"row {self.row + 1} of "
        return (
            f"{row}micro-batch {self.call + 1} of rank {self.rank} ({self.num_targets} targets)"
        )


class Law(NamedTuple):
    """How programs weigh targets: [units] the weight of one target of each."""

    name: str
    weights: Tensor


def known_laws(units: list[UnitSize]) -> list[Law]:
    """The laws; one equal to an earlier one is omitted."""
    # The mean is taken within units of the same key, and then over the keys.
    keys: dict[str, Callable[[UnitSize], Any]] = {
        TARGETS: lambda unit: None,
        "the mean of each rank's mean": lambda unit: unit.rank,
        "the mean of each micro-batch's mean": lambda unit: (unit.rank, unit.call),
        "the mean of each row's mean": lambda unit: unit,
    }
    laws: list[Law] = []
    for name, key in keys.items():
        counts = Counter[Any]()
        for unit in units:
            counts[key(unit)] += unit.num_targets
        weights = torch.tensor(
            [1 / (len(counts) * counts[key(unit)]) for unit in units], dtype=torch.float64
        )
        if not any(torch.allclose(weights, law.weights, rtol=1e-3) for law in laws):
            laws.append(Law(name, weights))
    return laws


class NamedFactor(NamedTuple):
    """A factor of the mean over all targets, and the law that it gives; None: it is a mistake."""

    name: str
    value: float
    law: str | None = None


def named_factors(units: list[UnitSize], ranks_a_copy: int) -> Iterator[NamedFactor]:
    """By what programs multiply the mean over all targets."""
    ranks = len({unit.rank for unit in units})
    calls = len({(unit.rank, unit.call) for unit in units}) / ranks
    total = sum(unit.num_targets for unit in units)
    labels = sum(unit.num_labels for unit in units)
    yield NamedFactor("1", 1.0, TARGETS)
    yield NamedFactor("the number of targets", total, "the sum over all targets")
    divided = f"the sum over all targets, divided by the number of labels ({labels}: before they are shifted)"
    yield NamedFactor("the share of labels that are targets", total / labels, divided)
    yield NamedFactor(
        "the targets of a rank",
        total / ranks,
        "the sum over all targets, over the number of ranks",
    )
    counts = {
        "the number of ranks": ranks,
        "the number of micro-batches of a rank": calls,
        "the number of ranks of a model copy": ranks_a_copy,
        "the number of all micro-batches": ranks * calls if min(ranks, calls) > 1 else 1,
    }
    for name, count in counts.items():
        if count > 1:
            yield NamedFactor(name, count)
            yield NamedFactor(f"one over {name}", 1 / count)


class LawFit(NamedTuple):
    """A law and how recorded gradients follow it, by parameter: the factor, and the share that is left unexplained."""

    law: Law
    factors: Tensor
    left: Tensor

    @property
    def factor(self) -> float:
        """The one of most parameters: of those whose gradient is not zero, as that of a new adapter is."""
        return float(self.factors[self.factors.nonzero()].median())


def fit_law(law: Law, samples: Samples) -> LawFit:
    """Fits one factor for each parameter."""
    fits = [factor_of(law.weights.float() @ rows, values) for rows, values in samples]
    return LawFit(law, *torch.tensor(fits).T)


def factor_of(expected: Tensor, recorded: Tensor) -> tuple[float, float]:
    """`recorded` as a multiple of `expected`, infinite of nothing, and the share of it that is left."""
    expected, recorded = expected.double().flatten(), recorded.double().flatten()
    squared = float(expected @ expected)
    norm = float(recorded.norm())
    if not (squared and norm):
        return torch.inf if norm else 0.0, float(bool(squared or norm))
    factor = float(expected @ recorded) / squared
    return factor, float((recorded - factor * expected).norm()) / norm


def left_beside(law: Law, samples: Samples, others: list[Tensor]) -> Tensor:
    """For each parameter, the share of the recorded values that a law and a multiple of other values leave."""
    left = []
    for (rows, values), other in zip(samples, others, strict=True):
        expected, values = (law.weights.float() @ rows).double(), values.double()
        rest = _without(_without(values, expected), _without(other.double(), expected))
        left.append(float(rest.norm() / values.norm().clamp_min(1e-300)))
    return torch.tensor(left)


def _without(values: Tensor, direction: Tensor) -> Tensor:
    """The values without their component in a direction."""
    return values - direction * (
        (values @ direction) / (direction @ direction).clamp_min(1e-300)
    )


def fit_units(samples: Samples) -> Tensor | None:
    """[units] the weight of a target of each, whatever the law: the median over the parameters that tell it.

    None if the gradients of units are too alike for it.
    """
    fits = []
    for rows, values in samples:
        lengths = rows.double().norm(dim=1)
        if rows.shape[1] < 4 * rows.shape[0] or not (lengths > 0).all():
            continue
        directions = (rows.double() / lengths[:, None]).T
        gram = directions.T @ directions
        if torch.linalg.cond(gram) < _WORST_CONDITION:
            fits.append(torch.linalg.solve(gram, directions.T @ values.double()) / lengths)
    return torch.stack(fits).median(dim=0).values if fits else None
