"""When a device's memory is used up: a snapshot of it in the run's folder, and what would fit instead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from threefold.errors import RunError
from threefold.mesh.mesh import Mesh
from threefold.plan.accelerators import of_memory
from threefold.plan.fit import MORE_RANKS, estimate_of, what_fits
from threefold.plan.memory import peak
from threefold.plan.setup import setup_of
from threefold.run.request import Asked

log = logging.getLogger("threefold")
# Share of the estimate of what did not fit that other settings may need at most; first for those sure to help.
_SHARES = (0.8, 0.99)


class DeviceMemoryError(RunError):
    """A device has no memory left."""

    how = "device"


@contextlib.contextmanager
def explained(asked: Asked, mesh: Mesh, folder: Path) -> Iterator[None]:
    """Turns torch's error, if memory runs out inside, into one that suggests what would fit.

    Raises:
        DeviceMemoryError: in place of torch's OutOfMemoryError; on the rank that ran out.
    """
    if mesh.device.type == "cuda":
        _remember_owners()
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().split("\n")[0].split(". GPU")[0].rstrip(".")
        snapshot = _snapshot(folder.resolve() / "memory" / f"rank-{mesh.rank:04d}.pickle")
        expected, fix = _advice(asked, mesh)
        raise DeviceMemoryError(
            f"rank {mesh.rank} has no memory left: {reason}",
            expected=expected + snapshot,
            fix=fix,
        ) from error


def _advice(asked: Asked, mesh: Mesh) -> tuple[str, str]:
    """(what was expected, what would fit), by the estimate if there is one."""
    device = None
    if mesh.device.type == "cuda":
        device = of_memory(torch.cuda.get_device_properties(mesh.device).total_memory)
    estimate = estimate_of(asked.config, asked.architecture.to_dict(), mesh.topology, device)
    if estimate is None:
        setup = setup_of(asked.config, None, mesh.topology, device)
        return "a step that fits in its device", what_fits(None, setup, 0)
    moment = peak(*estimate)
    state = sum(
        moment.lines.get(line, 0.0) for line in ("weights", "gradients", "moments", "averages")
    )
    expected = (
        f"about {moment.total / 2**30:,.1f} GiB to fit in its device, as estimated for the {moment.name}: "
        f"{state / 2**30:,.1f} GiB of weights, gradients and moments, together with activations and gathered weights"
    )
    fixes = (what_fits(*estimate, share * moment.total) for share in _SHARES)
    return expected, next((fix for fix in fixes if fix != MORE_RANKS), MORE_RANKS)


def _remember_owners() -> None:
    """Lets the allocator keep where in Python each block was asked for that is in use, and nothing of freed ones."""
    try:
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
    except Exception as error:  # a snapshot shows blocks without owners then
        log.warning("the snapshot of a full device will not say who holds what: %s", error)


def _snapshot(path: Path) -> str:
    """Writes the allocator's snapshot, for pytorch.org/memory_viz, and reports its path; threefold never reads it."""
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception as error:  # the run's own error is the one to see
        log.warning("no snapshot of the memory in %s: %s", path, error)
        return ""
    return f"; what it holds is in {path}, for pytorch.org/memory_viz"
