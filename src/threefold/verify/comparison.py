"""The mesh compared with one process: values and tolerances; and two finished runs compared the same way.

A few steps run on the mesh and in one process, in float32, on the same rows; losses, gradient norms, the first step's
gradients and the layers' outputs are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from threefold.errors import ConfigError
from threefold.jsonl import read_metrics
from threefold.mesh.topology import Topology

# In float32, as the documentation promises: in nats, and relative to the single process.
LOSS_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-3
GRADIENT_TOLERANCE = 1e-3
OUTPUT_TOLERANCE = 1e-3
# A gradient that is zero but for rounding (of a key's bias) has no relative difference: the least that one is compared
# with, as a share of the largest.
SMALLEST_GRADIENT = 1e-4


@dataclass(frozen=True)
class Options:
    """What to compare: steps, layers (None: all), random weights instead of the named ones; and whether to probe."""

    steps: int = 3
    layers: int | None = None
    random: bool = False
    admission: bool = True


@dataclass
class Comparison:
    """Mesh and single process side by side.

    Attributes:
        losses, norms: (mesh, alone) of each step.
        gradients: largest relative difference in each group of parameters (layers taken together).
        departed_layer: number of the first layer whose output differs, from 0, or None.
        admission: what the probes of the architecture found, or why they refuse it.
        admitted: whether they hold.
    """

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    departed_layer: int | None = None
    admission: str = ""
    admitted: bool = True

    @property
    def loss_difference(self) -> float:
        return max(abs(mesh - alone) for mesh, alone in self.losses)

    @property
    def norm_difference(self) -> float:
        return max(abs(mesh - alone) / max(alone, 1e-12) for mesh, alone in self.norms)

    @property
    def gradient_difference(self) -> float:
        return max(self.gradients.values())

    @property
    def holds(self) -> bool:
        return (
            self.admitted
            and self.loss_difference <= LOSS_TOLERANCE
            and self.norm_difference <= NORM_TOLERANCE
            and self.gradient_difference <= GRADIENT_TOLERANCE
        )


def group_of(parameter: str) -> str:
    """The parameter's name without its layer number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", parameter)


def table(found: Comparison) -> list[str]:
    """The comparison as lines to print."""
    lines = ["step   loss, mesh   loss, alone   difference   norm, mesh   norm, alone   relative difference"]
    for number, ((loss, alone), (norm, norm_alone)) in enumerate(zip(found.losses, found.norms, strict=True), 1):
        relative = abs(norm - norm_alone) / max(norm_alone, 1e-12)
        lines.append(
            f"{number:>4}   {loss:>10.6f}   {alone:>11.6f}   {abs(loss - alone):>10.1e}   {norm:>10.5f}   "
            f"{norm_alone:>11.5f}   {relative:>19.1e}"
        )
    lines.append("largest relative difference of the first step's gradients, by group of parameters:")
    for name, difference in sorted(found.gradients.items(), key=lambda item: -item[1])[:12]:
        mark = "  <- differs" if difference > GRADIENT_TOLERANCE else ""
        lines.append(f"  {difference:.1e}  {name}{mark}")
    if found.departed_layer is not None:
        lines.append(f"the first layer whose output differs: layer {found.departed_layer} (from 0)")
    return [*lines, *found.admission.splitlines()]


def diagnose(topology: Topology, compare: Callable[[Topology], Comparison | int]) -> str:
    """Finds which axis differs, by trying each one alone."""
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
        found = compare(smaller)
        (right if not isinstance(found, int) and found.holds else wrong).append(f"{axis} ({smaller})")
    if wrong:
        also = f"; correct alone: {', '.join(right)}" if right else ""
        return f"the mesh differs from the single process: {' and '.join(wrong)}{also}"
    return f"the mesh differs from the single process only if axes are combined; correct alone: {', '.join(right)}"


def compare_runs(first: Path, second: Path) -> tuple[list[str], bool]:
    """Lines that compare the metrics of two runs step by step, and whether they are within tolerance.

    Raises:
        ConfigError: a run has no metrics, or they share no step.
    """
    curves = []
    for run in (first, second):
        path = run / "metrics.jsonl"
        if not path.exists():
            fix = "threefold verify --against RUN_A RUN_B"
            raise ConfigError(f"{run} has no metrics.jsonl", expected="the folders of two runs", fix=fix)
        curves.append({line["step"]: line for line in read_metrics(path) if "loss" in line})
    steps = sorted(curves[0].keys() & curves[1].keys())
    if not steps:
        what = f"{first} and {second} have no logged step in common"
        raise ConfigError(what, expected="two runs that logged the same steps", fix="--log.every 1 in both")
    found = Comparison(
        [(curves[0][step]["loss"], curves[1][step]["loss"]) for step in steps],
        [(curves[0][step]["grad_norm"], curves[1][step]["grad_norm"]) for step in steps],
        {"(not recorded)": 0.0},
    )
    worst = max(steps, key=lambda step: abs(curves[0][step]["loss"] - curves[1][step]["loss"]))
    lines = [
        f"{len(steps)} steps in common, {steps[0]} to {steps[-1]}",
        f"largest difference of the loss: {found.loss_difference:.1e} nats, at step {worst}",
        f"largest relative difference of the gradient norm: {found.norm_difference:.1e}",
        "the runs follow one another" if found.holds else "the runs differ",
    ]
    return lines, found.holds
