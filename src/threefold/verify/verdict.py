"""The mesh compared with one process, as lines; and two finished runs compared the same way.

`rank.py` makes the steps, `check/compare.py` has the bounds.
A few steps run on the mesh and in one process, in float32, on the same rows; losses, gradient norms, the first step's
gradients and the layers' outputs are compared.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from threefold.check.compare import (
    FINITE,
    GRADIENT,
    GRADIENT_NORM,
    LOSS,
    Comparison,
    Difference,
    compare_number,
    compare_numbers,
    compare_tensors,
)
from threefold.config.paths import METRICS
from threefold.errors import ConfigError
from threefold.mesh.topology import Topology
from threefold.records.metrics import Metrics

_EVALUATION = replace(LOSS, quantity="evaluation loss")
_COMPARED = ("loss", "grad_norm", "eval_loss")


@dataclass(frozen=True)
class VerifyOptions:
    """What to compare: steps, layers (None: all), random weights instead of the named ones; to probe; to print JSON."""

    steps: int = 3
    layers: int | None = None
    random: bool = False
    admission: bool = True
    as_json: bool = False


@dataclass
class Verification:
    """Mesh and single process side by side.

    Attributes:
        losses, norms: (mesh, alone) of each step.
        gradients: of each parameter in the first step.
        not_finite: what was not finite on the mesh, and on which rank.
        departed_layer: number of the first layer whose output differs, from 0, or None.
        admission: what the probes of the architecture found, or why they refuse it.
        admitted: whether they hold.
    """

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    gradients: list[Difference] = field(default_factory=list)
    not_finite: list[Difference] = field(default_factory=list)
    departed_layer: int | None = None
    admission: str = ""
    admitted: bool = True

    @property
    def comparison(self) -> Comparison:
        """All differences, step by step; gradients that were not compared do not hold."""
        losses, norms = (
            compare_numbers(bound, [pair[0] for pair in pairs], [pair[1] for pair in pairs])
            for bound, pairs in ((LOSS, self.losses), (GRADIENT_NORM, self.norms))
        )
        gradients = self.gradients or compare_tensors(GRADIENT, {}, {})
        differences = []
        for number in range(max(len(losses), len(norms))):
            differences += [*losses[number : number + 1], *norms[number : number + 1]]
            differences += gradients if number == 0 else []
            differences += [
                each for each in self.not_finite if each.place == f"step {number + 1}"
            ]
        return Comparison(differences)

    @property
    def holds(self) -> bool:
        return self.admitted and self.comparison.holds

    def to_record(self) -> dict[str, Any]:
        """Plain values, which `from_record` reads back."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Verification":
        differences = {
            name: [Difference(**values) for values in record[name]]
            for name in ("gradients", "not_finite")
        }
        return cls(**{**record, **differences})


def group_of(parameter: str) -> str:
    """The parameter's name without its layer number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", parameter)


def table(verification: Verification) -> list[str]:
    """The verification as lines to print."""
    lines = [
        "step   loss, mesh   loss, alone   difference   norm, mesh   norm, alone   relative difference"
    ]
    pairs = zip(verification.losses, verification.norms, strict=True)
    for number, ((loss, alone), (norm, norm_alone)) in enumerate(pairs, start=1):
        relative = compare_number(GRADIENT_NORM, norm, norm_alone).figure
        lines.append(
            f"{number:>4}   {loss:>10.6f}   {alone:>11.6f}   {abs(loss - alone):>10.1e}   {norm:>10.5f}   "
            f"{norm_alone:>11.5f}   {relative:>19.1e}"
        )
    lines.append(
        "largest relative difference of the first step's gradients, by group of parameters:"
    )
    for worst in _by_group(verification.gradients)[:12]:
        mark = (
            ""
            if worst.holds
            else "  <- differs" + (f": {worst.detail}" if worst.detail else "")
        )
        lines.append(f"  {worst.figure:.1e}  {worst.place}{mark}")
    if verification.departed_layer is not None:
        lines.append(
            f"the first layer whose output differs: layer {verification.departed_layer} (from 0)"
        )
    lines += [
        f"{difference.place}: {difference.detail}" for difference in verification.not_finite
    ]
    if (first := verification.comparison.first) is not None:
        lines.append(f"the first difference: {first}")
    return [*lines, *verification.admission.splitlines()]


def answer_of(verification: Verification, mesh: Topology) -> dict[str, Any]:
    """The verification as plain values, for programs; gradients by group, the largest difference first."""
    groups = [
        {**asdict(each), "holds": each.holds} for each in _by_group(verification.gradients)
    ]
    values = verification.to_record() | {
        "mesh": str(mesh),
        "holds": verification.holds,
        "gradients": groups,
    }
    first = verification.comparison.first
    return values | {"first_difference": None if first is None else str(first)}


def _by_group(gradients: Sequence[Difference]) -> list[Difference]:
    """The worst difference of each group of parameters, under the group's name, the largest first."""
    groups: dict[str, list[Difference]] = {}
    for difference in gradients:
        groups.setdefault(group_of(difference.place), []).append(difference)
    worst = [
        replace(Comparison(members).worst(), place=group) for group, members in groups.items()
    ]
    return sorted(worst, key=lambda difference: -difference.figure)


def diagnose(topology: Topology, verify: Callable[[Topology], Verification | int]) -> str:
    """Finds which axis differs, by trying each one alone."""
    if topology.world_size == 1:
        return (
            "the mesh differs from the single process, on one rank: no axis of it is the cause"
        )
    alone = {
        "data": replace(topology, cp=1, tp=1),
        "context": Topology(cp=topology.cp),
        "tensor": Topology(tp=topology.tp),
    }
    wrong: list[str] = []
    right: list[str] = []
    for axis, smaller in alone.items():
        if smaller.world_size == 1:
            continue
        if smaller == topology:
            return f"the mesh differs from the single process: the {axis} axis, the only one it has"
        result = verify(smaller)
        (right if not isinstance(result, int) and result.holds else wrong).append(
            f"{axis} ({smaller})"
        )
    if wrong:
        also = f"; correct alone: {', '.join(right)}" if right else ""
        return f"the mesh differs from the single process: {' and '.join(wrong)}{also}"
    return f"the mesh differs from the single process only when axes are combined; correct alone: {', '.join(right)}"


def compare_runs(
    first: Path, second: Path, *, steps: int | None = None
) -> tuple[list[str], bool]:
    """Lines that compare the metrics of two runs step by step, and whether they are within the bounds.

    A step that only one of them logged is a difference, unless the other one logs less often or began later.

    Args:
        steps: compare the steps up to this one; None: all.

    Raises:
        ConfigError: a run has no metrics, or they share no step.
    """
    curves = [_curves_of(run, steps) for run in (first, second)]
    losses, norms, evaluated = ([curve[name] for curve in curves] for name in _COMPARED)
    common = sorted(losses[0].keys() & losses[1].keys())
    if not common:
        raise ConfigError(
            f"{first} and {second} have no logged step in common",
            expected="two runs that logged the same steps",
            fix="--log.every 1 in both",
        )
    evaluations = sorted(evaluated[0].keys() & evaluated[1].keys())
    pairs = [(step, LOSS, losses) for step in common]
    pairs += [(step, GRADIENT_NORM, norms) for step in common]
    # An evaluation shows the last update too, which no loss of a step does.
    pairs += [(step, _EVALUATION, evaluated) for step in evaluations]
    comparison = Comparison(
        [
            compare_number(
                bound, *(run.get(step, math.nan) for run in runs), place=f"step {step}"
            )
            for step, bound, runs in sorted(pairs, key=itemgetter(0))
        ]
    )
    missing = [
        *_missing(losses[1], losses[0], of=second),
        *_missing(losses[0], losses[1], of=first),
    ]
    comparison.differences += missing
    worst = comparison.worst(LOSS.quantity)
    lines = [
        f"{len(common)} steps in common, {common[0]} to {common[-1]}",
        f"largest difference of the loss: {worst.figure:.1e} nats, at {worst.place}",
        f"largest relative difference of the gradient norm: {comparison.worst(GRADIENT_NORM.quantity).figure:.1e}",
    ]
    if evaluations:
        worst = comparison.worst(_EVALUATION.quantity)
        lines.append(
            f"{len(evaluations)} evaluations in common, after steps {evaluations[0]} to {evaluations[-1]}: "
            f"largest difference of their loss {worst.figure:.1e} nats, at {worst.place}"
        )
    if (difference := comparison.first) is not None:
        lines.append(f"the first difference: {difference}")
    if missing:
        lines.append("to compare only the steps before it: --steps N")
    return [
        *lines,
        "the runs follow one another" if comparison.holds else "the runs differ",
    ], comparison.holds


def _curves_of(run: Path, steps: int | None) -> dict[str, dict[int, float]]:
    """What is compared, of the valid steps."""
    path = run / METRICS
    if not path.exists():
        raise ConfigError(
            f"{run} has no {METRICS}",
            expected="the folders of two runs",
            fix="threefold verify --against RUN_A RUN_B",
        )
    metrics = Metrics(path)
    # A torn last line is that of a run that was killed, and belongs to no step.
    if wrong := [damage for damage in metrics.damaged if damage.line != metrics.lines.torn]:
        raise ConfigError(
            f"{path}, line {wrong[0].line}: {wrong[0].what}",
            expected="lines as the run wrote them: a damaged file proves nothing",
            fix=f"restore {path}, or compare another run",
        )
    return {
        name: {
            step: value
            for step, value in zip(*map(list, metrics.points(name)), strict=True)
            if steps is None or step <= steps
        }
        for name in _COMPARED
    }


def _missing(curve: dict[int, Any], other: dict[int, Any], *, of: Path) -> list[Difference]:
    """The steps that a run should have logged, as the other one did, and did not."""
    logged = sorted(curve)
    begin = max(min(curve), min(other))
    # The distance of most steps from the next; the first and the last step are logged wherever they are.
    gaps = Counter(later - earlier for earlier, later in pairwise(logged))
    every = max(gaps, key=lambda gap: (gaps[gap], gap), default=1)
    lost = [step for step in other if step > begin and step % every == 0 and step not in curve]
    if not lost and max(other) > max(curve):
        lost = [max(other)]
    if not lost:
        return []
    more = f" and {len(lost) - 1} more steps" if len(lost) > 1 else ""
    detail = f"only the other run logged step {min(lost)}{more}"
    return [Difference("metrics", math.inf, FINITE.limit, str(of), detail)]
