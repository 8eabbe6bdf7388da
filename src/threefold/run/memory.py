"""When a device's memory is used up: a snapshot of it in the run's folder, and what would fit instead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch

from threefold.config.schema import Config
from threefold.errors import RunError
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import load
from threefold.run.request import Asked

log = logging.getLogger("threefold")
_LESS_ACTIVATIONS = {"none": "selective", "selective": "full", "full": "offload"}


@contextlib.contextmanager
def explained(asked: Asked, mesh: Mesh, folder: Path) -> Iterator[None]:
    """Turns torch's error, if memory runs out inside, into one that says what would fit.

    Raises:
        RunError: in place of torch's OutOfMemoryError; on the rank that ran out.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        config, topology, rank = asked.config, mesh.topology, mesh.rank
        snapshot = _snapshot(folder.resolve() / "memory" / f"rank-{rank:04d}.pickle")
        reason = str(error).strip().split("\n")[0].split(". GPU")[0].rstrip(".")
        outline = load.outline(asked.architecture, trust_remote_code=config.model.trust_remote_code)
        state = state_bytes(config, topology, sum(each.numel() for each in outline.parameters()))
        first, *others = what_fits(config, topology, state_share=state / _device_bytes())
        raise RunError(
            f"rank {rank} has no memory left: {reason}",
            expected=f"{state / 2**30:,.1f} GiB of weights, gradients and moments to fit in its device, together with "
            f"activations and gathered weights{snapshot}",
            fix=first + (f"   (then {', '.join(others)})" if others else ""),
        ) from error


def state_bytes(config: Config, topology: Topology, num_parameters: int) -> float:
    """Bytes of a rank for float32 weights, their gradients and AdamW's moments; adapters alone have the latter two."""
    moments = 4 if config.optimizer.moments == "bfloat16" else 8
    trained = 0 if config.model.lora.r else 4 + moments
    return num_parameters * (4 + trained) / (topology.dp_shard * topology.cp * topology.tp)


def what_fits(config: Config, topology: Topology, *, state_share: float) -> list[str]:
    """Settings to paste, what saves most for its price first; only those that are not used up yet.

    Args:
        state_share: of the device's memory that weights, gradients and moments take.
    """
    activations = [*_of_rows(config, topology), *_of_layers(config)]
    state = list(_of_state(config, topology))
    found = [*state, *activations] if state_share > 0.5 else [*activations, *state]
    if config.train.accumulate == "unsharded":
        found.insert(0, "--train.accumulate sharded")
    longer = f"--data.seq_len {config.data.seq_len // 2}, whose rows are shorter"
    return found or [f"--mesh.tp {2 * topology.tp}   (more ranks for a layer)", longer]


def _of_rows(config: Config, topology: Topology) -> Iterator[str]:
    rows = config.train.global_batch // topology.dp
    now = rows if config.train.micro_batch == "auto" else config.train.micro_batch
    if now > 1:
        yield f"--train.micro_batch {max(each for each in range(1, now) if rows % each == 0)}"


def _of_layers(config: Config) -> Iterator[str]:
    if less := _LESS_ACTIVATIONS.get(config.train.activation_checkpointing):
        yield f"--train.activation_checkpointing {less}"


def _of_state(config: Config, topology: Topology) -> Iterator[str]:
    if topology.dp_shard < topology.dp:
        yield f"--mesh.dp_shard {topology.dp}"
    optimizer = config.optimizer
    if (optimizer.name, optimizer.moments) == ("adamw", "float32") and not config.model.lora.r:
        yield "--optimizer.moments bfloat16"
    if not config.mesh.cpu_offload and optimizer.name not in ("muon", "adafactor"):
        yield "--mesh.cpu_offload true"


def _device_bytes() -> float:
    if not torch.cuda.is_available():
        return float("inf")
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _snapshot(path: Path) -> str:
    """Writes what the allocator holds, for pytorch.org/memory_viz, and says where; threefold never reads it."""
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception as error:  # the run's own error is the one to see
        log.warning("no snapshot of the memory in %s: %s", path, error)
        return ""
    return f"; what it holds is in {path}, for pytorch.org/memory_viz"
