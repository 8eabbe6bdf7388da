"""Two trainings compared: losses, gradient norms, gradients, weights. The one comparison of this project.

`verify`, `verify --against`, admission's probes, the table of architectures and the tests all compare here, so that
these rules hold wherever equality is claimed:

- a non-finite value is never equal, not even to itself;
- a value that only one side has is a difference, and so is a shorter list;
- nothing compared is no proof: an empty comparison does not hold.

A difference is a figure, its bound and the place where it was measured; the first one that exceeds its bound is named.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from threefold.jsonl import Values
from threefold.model.collectives import whole_of
from threefold.model.model import Model

# Tensors are torch's or numpy's.
Tensors: TypeAlias = Mapping[str, Any]

# Below any gradient that matters: it keeps a division by the size of a tensor of zeros defined.
_LEAST_SIZE = 1e-12


@dataclass(frozen=True)
class Bound:
    """How far apart two values of one quantity may be.

    Attributes:
        quantity: the compared quantity.
        limit: in nats for a loss; for the others relative to the expected value, of a tensor to its largest entry.
        reason: why this limit.
        relative: divide by the size of the expected value.
        smallest: the least size that a tensor's difference is divided by, as a share of the largest entry of all
            tensors; a gradient that is zero but for rounding (that of a key's bias) has no relative difference.
    """

    quantity: str
    limit: float
    reason: str
    relative: bool = True
    smallest: float = 0.0


# float32 rounds sums by about 1e-7 of their size. What a mesh changes is the order of sums: over 20 steps of all meshes
# and families of the tests that moves losses by up to 1e-5 nats and gradients by up to 1e-4. A wrong mask, scale or
# shard moves them by 1e-2 and more.
LOSS = Bound(
    "loss", 1e-4, "ten times what another order of float32 sums moves a loss by", relative=False
)
GRADIENT_NORM = Bound(
    "gradient norm", 1e-3, "ten times what another order of float32 sums moves it by"
)
GRADIENT = Bound(
    "gradient", 1e-3, "as the gradient norm, of each parameter's largest entry", smallest=1e-4
)
WEIGHT = Bound("weight", 1e-3, "as its gradients, whose sums made it")
OUTPUT = Bound("output", 1e-3, "as the gradients: a layer's outputs pass fewer sums")
LOGITS = Bound("head", 1e-3, "the same product in another order, of the largest logit")
ROUTERS_LOSS = Bound("routers' loss", 1e-4, "as the loss, which it is added to", relative=False)
# For reduced models, on rows of few tokens: more of their gradients are zero except for rounding.
PROBE_GRADIENT = Bound("gradients", 1e-3, GRADIENT.reason, smallest=1e-3)
PROBE_REPLICA = Bound(
    "replicas", 1e-3, "copies on tp ranks that differ by more would drift apart", smallest=1e-3
)
# 8 bits of mantissa, against float32: the largest of all architectures is 0.04.
BFLOAT16_LOSS = Bound(
    "bfloat16", 0.2, "five times the largest of all architectures", relative=False
)

# Of a run's gradients in bfloat16, beyond rounding: those of dense architectures are within 0.08.
KERNELS = Bound(
    "kernels", 0.25, "a token that a near tie sends to another expert moves one by 0.2"
)

REAL_SIZE = Bound(
    "real size", 1e-3, "of one token, whose loss moves more than a mean", relative=False
)

# For the run's own forward: how far a token moves that does not see the change.
FORWARD = Bound(
    "forward",
    1e-4,
    "equal operations on equal rows; experts of other sizes round otherwise, by 1e-6",
)
FORWARD_BFLOAT16 = Bound("forward", 2e-2, "as in float32, rounded to 8 bits")
FORWARD_FLOAT8 = Bound(
    "forward", 0.2, "its scales depend on the largest number of a whole micro-batch"
)

FINITE = Bound("numbers", 0.0, "no comparison holds for what is not finite", relative=False)

# For values written and read again, or computed twice by the same operations.
SAME_WEIGHT = Bound("weight", 0.0, "the same bits are promised", relative=False)
SAME_LOGITS = Bound("logits", 0.0, "the same weights and operations", relative=False)


@dataclass(frozen=True)
class Difference:
    """One comparison of one quantity.

    Attributes:
        quantity, bound: as of the `Bound`.
        figure: at most the bound where it holds; infinite where there is nothing to compare, or it is not finite.
        place: the step or the parameter.
        detail: what was compared, where that is more than a figure.
    """

    quantity: str
    figure: float
    bound: float
    place: str = ""
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.figure <= self.bound  # a NaN never is

    def __str__(self) -> str:
        where = f" of {self.place}" if self.place else ""
        if self.detail:
            return f"{self.quantity}{where}: {self.detail}"
        return f"{self.quantity}{where} differs by {self.figure:.1e}, bound {self.bound:.0e}"


@dataclass
class Training:
    """The results of a few steps.

    Attributes:
        losses, norms: one for each step; norms of the gradient, before clipping.
        gradients: of the first step, by parameter, complete.
        weights: after the last step, by parameter, complete; empty on both sides: not compared.
        outputs: of each layer in the first step, [rows, sequence, hidden].
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)


@dataclass
class Comparison:
    """All differences, in the order in which they were measured."""

    differences: list[Difference] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return bool(self.differences) and all(
            difference.holds for difference in self.differences
        )

    @property
    def first(self) -> Difference | None:
        """The first difference that exceeds its bound; None if the comparison holds."""
        if not self.differences:
            return Difference("comparison", math.inf, 0.0, detail="nothing was compared")
        return next(
            (difference for difference in self.differences if not difference.holds), None
        )

    def of(self, quantity: str) -> list[Difference]:
        return [
            difference for difference in self.differences if difference.quantity == quantity
        ]

    def worst(self, quantity: str | None = None) -> Difference:
        """The difference that is largest in terms of its bound.

        Raises:
            ValueError: nothing was compared.
        """
        chosen = self.differences if quantity is None else self.of(quantity)
        return max(chosen, key=_share_of_bound)

    def __str__(self) -> str:
        if (first := self.first) is not None:
            exceeding = sum(not difference.holds for difference in self.differences)
            return f"{first}" + (f", and {exceeding - 1} more differ" if exceeding > 1 else "")
        quantities = dict.fromkeys(difference.quantity for difference in self.differences)
        return ", ".join(
            f"{quantity} {self.worst(quantity).figure:.1e}" for quantity in quantities
        )


def _share_of_bound(difference: Difference) -> float:
    if not math.isfinite(difference.figure):
        return math.inf
    return difference.figure / max(difference.bound, _LEAST_SIZE)


def compare_number(
    bound: Bound, actual: float, expected: float, *, place: str = ""
) -> Difference:
    """Compares two numbers."""
    if not (math.isfinite(actual) and math.isfinite(expected)):
        detail = f"{actual:g}, expected {expected:g}: what is not finite is never equal"
        return Difference(bound.quantity, math.inf, bound.limit, place, detail)
    figure = abs(actual - expected)
    if bound.relative:
        figure /= max(abs(expected), _LEAST_SIZE)
    exceeds = f"{actual:.9g}, expected {expected:.9g}: differs by {figure:.1e}, bound {bound.limit:.0e}"
    return Difference(
        bound.quantity, figure, bound.limit, place, "" if figure <= bound.limit else exceeds
    )


def compare_numbers(
    bound: Bound,
    actual: Sequence[float],
    expected: Sequence[float],
) -> list[Difference]:
    """Compares the numbers of steps, one by one; at least one difference."""
    if not actual and not expected:
        return [_nothing(bound)]
    differences = []
    for number in range(max(len(actual), len(expected))):
        place = f"step {number + 1}"
        if number >= len(actual):
            differences.append(_absent(bound, place, "missing"))
        elif number >= len(expected):
            differences.append(_absent(bound, place, "not expected"))
        else:
            differences.append(
                compare_number(bound, actual[number], expected[number], place=place)
            )
    return differences


def compare_tensors(bound: Bound, actual: Tensors, expected: Tensors) -> list[Difference]:
    """Compares tensors by name; at least one difference."""
    comparison = TensorComparison(bound, expected)
    for name, tensor in actual.items():
        comparison.add(name, tensor)
    return comparison.differences()


class TensorComparison:
    """Compares named tensors with the expected ones, one at a time, so that only one side is held in memory."""

    def __init__(self, bound: Bound, expected: Tensors) -> None:
        self._bound = bound
        self._expected = expected
        self._sizes = {name: _size_of(tensor) for name, tensor in expected.items()}
        finite = [size for size in self._sizes.values() if math.isfinite(size)]
        self._least = max(bound.smallest * max(finite, default=0.0), _LEAST_SIZE)
        self._seen: dict[str, Difference] = {}

    def add(self, name: str, tensor: Any) -> None:
        """Compares a tensor with the expected one of that name.

        Of two under one name, as parts of a tied weight that came apart, each must equal it.
        """
        if name not in self._seen or self._seen[name].holds:
            self._seen[name] = self._compare(name, tensor)

    def differences(self) -> list[Difference]:
        """The difference of each tensor in the order of the expected ones; what was never added is missing."""
        if not self._seen and not self._expected:
            return [_nothing(self._bound)]
        ordered = [
            self._seen.get(name) or _absent(self._bound, name, "missing")
            for name in self._expected
        ]
        return ordered + [
            difference for name, difference in self._seen.items() if name not in self._expected
        ]

    def _compare(self, name: str, tensor: Any) -> Difference:
        bound = self._bound
        if name not in self._expected:
            return _absent(bound, name, "not expected")
        actual = _float(tensor)
        expected = _float(self._expected[name])
        if actual.shape != expected.shape:
            return _absent(
                bound, name, f"of shape {[*actual.shape]}, expected {[*expected.shape]}"
            )
        for value, side in ((actual, ""), (expected, ", expected")):
            if not value.isfinite().all():
                at = (~value.isfinite()).nonzero()[0].tolist()
                return _absent(
                    bound, name, f"not finite at {at}{side}: what is not finite is never equal"
                )
        if not actual.numel():
            return Difference(bound.quantity, 0.0, bound.limit, name)
        figure = (actual - expected).abs().max().item()
        if bound.relative:
            figure /= max(self._sizes[name], self._least)
        return Difference(bound.quantity, figure, bound.limit, name)


def compare_exactly(quantity: str, actual: Values, expected: Values) -> list[Difference]:
    """Compares hashes, integers or floats by name, for equality; at least one difference.

    A non-finite float is never equal, and neither is None, which means that a value could not be computed.
    """
    if not actual and not expected:
        return [Difference(quantity, math.inf, 0.0, detail="nothing was compared")]
    differences = []
    for name in [*expected, *(name for name in actual if name not in expected)]:
        if name not in actual or name not in expected:
            detail = "missing" if name not in actual else "not expected"
        else:
            detail = _unequal(actual[name], expected[name])
        differences.append(Difference(quantity, math.inf if detail else 0.0, 0.0, name, detail))
    return differences


def _unequal(actual: Any, expected: Any) -> str:
    """Why two plain values are not equal; empty if they are."""
    for value in (actual, expected):
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            return f"{actual}, expected {expected}: what is not finite is never equal"
    # By `repr`, which keeps the bits of a float, its sign too.
    return "" if repr(actual) == repr(expected) else f"{actual}, expected {expected}"


def _nothing(bound: Bound) -> Difference:
    return Difference(bound.quantity, math.inf, bound.limit, detail="nothing was compared")


def _absent(bound: Bound, place: str, detail: str) -> Difference:
    return Difference(bound.quantity, math.inf, bound.limit, place, detail)


def _float(tensor: Any) -> Any:
    """A tensor on the CPU, in float32 or float64."""
    value = tensor.detach().cpu() if isinstance(tensor, torch.Tensor) else torch.tensor(tensor)
    return value if value.dtype == torch.float64 else value.float()


def _size_of(tensor: Any) -> float:
    value = _float(tensor)
    return float(value.abs().max()) if value.numel() else 0.0


def complete_gradients(model: Model) -> Iterator[tuple[str, Tensor]]:
    """(name, gradient) of each parameter that is trained, whole; zeros where it has none. Every rank calls it.

    A parameter that is tied to another one has that one's name, as in `check.reference.gradients_of`.
    """
    tied = dict(getattr(model.module, "all_tied_weights_keys", {}))
    for name, parameter in model.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if (gradient := parameter.grad) is None:
            gradient = torch.zeros(parameter.shape, device=parameter.device)
        yield tied.get(name, name), whole_of(gradient).detach()
