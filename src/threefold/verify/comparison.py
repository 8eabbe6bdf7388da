"""`threefold verify`: the mesh against one process, on the user's own model.

A few steps run on the mesh and in one process, in float32, on the same rows; losses, gradient norms, the first step's
gradients and the layers' outputs are compared. Where they depart, each axis is tried alone to say which one is wrong.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from threefold.config.loading import Loaded
from threefold.config.schema import Config
from threefold.errors import EXIT_FAILED, ConfigError
from threefold.mesh import environment, local_ranks
from threefold.mesh.topology import Topology, resolve

# In float32, as the documentation promises them: nats, and relative to the single process.
LOSS_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-3
GRADIENT_TOLERANCE = 1e-3
OUTPUT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Options:
    """How much is compared: steps, layers (None: all), and random weights instead of the named ones."""

    steps: int = 3
    layers: int | None = None
    random: bool = False


@dataclass
class Comparison:
    """Mesh and single process side by side.

    Attributes:
        losses, norms: (mesh, alone) of each step.
        gradients: largest relative difference in each group of parameters (layers taken together).
        departed_layer: number of the first layer whose output departs, from 0, or None.
    """

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    departed_layer: int | None = None

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
            self.loss_difference <= LOSS_TOLERANCE
            and self.norm_difference <= NORM_TOLERANCE
            and self.gradient_difference <= GRADIENT_TOLERANCE
        )

    def lines(self) -> list[str]:
        """The comparison as a table for people."""
        found = ["step   loss, mesh   loss, alone   difference   norm, mesh   norm, alone   relative difference"]
        for number, ((loss, alone), (norm, norm_alone)) in enumerate(zip(self.losses, self.norms, strict=True), 1):
            relative = abs(norm - norm_alone) / max(norm_alone, 1e-12)
            found.append(
                f"{number:>4}   {loss:>10.6f}   {alone:>11.6f}   {abs(loss - alone):>10.1e}   {norm:>10.5f}   "
                f"{norm_alone:>11.5f}   {relative:>19.1e}"
            )
        found.append("largest relative difference of the first step's gradients, by group of parameters:")
        for name, difference in sorted(self.gradients.items(), key=lambda item: -item[1])[:12]:
            mark = "  <- departs" if difference > GRADIENT_TOLERANCE else ""
            found.append(f"  {difference:.1e}  {name}{mark}")
        if self.departed_layer is not None:
            found.append(f"the first layer whose output departs: layer {self.departed_layer} (from 0)")
        return found


def group_of(parameter: str) -> str:
    """The parameter's name with its layer number left out."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", parameter)


def verify_command(loaded: Loaded, options: Options) -> int:
    """Verifies the mesh of the config and returns the exit code: 0 it holds, 1 it departs."""
    info = environment.current()
    if info.launcher is not None:
        topology, _ = resolve(loaded.config.mesh, launched_world_size=info.world_size, num_devices=None)
        from threefold.verify.mesh_side import verify_rank

        return verify_rank(loaded.config, options, topology, None)
    from threefold.run.start import PRELOAD, topology_here

    local_ranks.preload(PRELOAD)
    topology, why = topology_here(loaded.config)
    print(f"mesh {topology} on {topology.world_size} ranks ({why}) against one process, float32, {options.steps} steps")
    found = on_ranks(loaded.config, options, topology)
    if isinstance(found, int):
        return found
    print("\n".join(found.lines()))
    if found.holds:
        print("the mesh follows the single process")
        return 0
    print(diagnose(topology, lambda smaller: on_ranks(loaded.config, options, smaller)))
    return EXIT_FAILED


def diagnose(topology: Topology, compare: Callable[[Topology], Comparison | int]) -> str:
    """Which axis departs, found by trying each one of the mesh alone."""
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
            return f"the mesh departs from the single process: the {axis} axis, the only one it has"
        found = compare(smaller)
        (right if not isinstance(found, int) and found.holds else wrong).append(f"{axis} ({smaller})")
    if wrong:
        return f"the mesh departs from the single process: {' and '.join(wrong)}" + (
            f"; alone it is right: {', '.join(right)}" if right else ""
        )
    return f"the mesh departs from the single process only where axes meet; alone each is right: {', '.join(right)}"


def on_ranks(config: Config, options: Options, topology: Topology) -> Comparison | int:
    """The comparison made on local ranks, or the exit code of a failed attempt."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="threefold-verify-") as folder:
        answer = Path(folder) / "comparison.json"
        if topology.world_size == 1:
            from threefold.verify.mesh_side import verify_rank

            code = verify_rank(config, options, topology, str(answer))
        else:
            arguments = (config, options, topology, str(answer))
            code = local_ranks.start_ranks(_rank_entry, arguments, num_ranks=topology.world_size)
        if not answer.exists():
            return code or EXIT_FAILED
        return read_comparison(answer)


def read_comparison(path: Path) -> Comparison:
    """What `write_comparison` wrote."""
    values = json.loads(path.read_text())
    return Comparison(
        [tuple(pair) for pair in values["losses"]],
        [tuple(pair) for pair in values["norms"]],
        values["gradients"],
        values["departed_layer"],
    )


def write_comparison(found: Comparison, path: Path) -> None:
    """Writes a comparison as JSON."""
    path.write_text(json.dumps(vars(found)))


def _rank_entry(config: Config, options: Options, topology: Topology, answer: str) -> None:
    from threefold.verify.mesh_side import verify_rank

    sys.exit(verify_rank(config, options, topology, answer))


def compare_runs(first: Path, second: Path) -> tuple[list[str], bool]:
    """Lines that compare the metrics of two runs step by step, and whether they are within tolerance.

    Raises:
        ConfigError: a run has no metrics, or they share no step.
    """
    from threefold.jsonl import read_metrics

    curves = []
    for run in (first, second):
        path = run / "metrics.jsonl"
        if not path.exists():
            raise ConfigError(
                f"{run} has no metrics.jsonl",
                expected="the folders of two runs",
                fix="threefold verify --against RUN_A RUN_B",
            )
        curves.append({line["step"]: line for line in read_metrics(path) if "loss" in line})
    steps = sorted(curves[0].keys() & curves[1].keys())
    if not steps:
        raise ConfigError(
            f"{first} and {second} have no logged step in common",
            expected="two runs that logged the same steps",
            fix="--log.every 1 in both",
        )
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
        "the runs follow one another" if found.holds else "the runs depart from one another",
    ]
    return lines, found.holds
