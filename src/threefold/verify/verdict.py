"""The report of `threefold verify`: the comparison as a table, and which axis of the mesh differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from threefold.mesh.topology import Topology
from threefold.verify.comparison import GRADIENT_TOLERANCE, Comparison


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
    return lines


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
