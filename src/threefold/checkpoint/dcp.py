"""Saving and loading the state of a run with torch.distributed.checkpoint, from any mesh to any mesh.

The state is flat: the model's tensors by name, AdamW's moments by the same names, and each rank's random state. It
holds no layout, so what was saved on one mesh is read by another: every rank asks for its own part.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from threefold.mesh.groups import Mesh

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, *, group: dist.ProcessGroup | None
) -> None:
    """Writes this rank's part into `folder`; every rank calls it.

    Args:
        group: a process group of all ranks that can carry CPU tensors; None in a single process.
    """
    state = {**model_state(model), **_optimizer_state(model, optimizer), **_random_state(mesh)}
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    dcp.save(state, storage_writer=writer, process_group=group, no_dist=mesh.device_mesh is None)


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    *,
    same_mesh: bool,
    group: dist.ProcessGroup | None,
) -> None:
    """Reads this rank's part from `folder` into the model and the optimizer, in place; every rank calls it.

    Args:
        same_mesh: the checkpoint was saved on this very mesh, so each rank's random state is its own.
    """
    random_state = _random_state(mesh) if same_mesh else {}
    state = {**model_state(model), **_optimizer_state(model, optimizer), **random_state}
    dcp.load(state, storage_reader=FileSystemReader(folder), process_group=group, no_dist=mesh.device_mesh is None)
    if same_mesh:
        torch.set_rng_state(state[f"random.cpu.{mesh.rank}"])
        if mesh.device.type == "cuda":
            torch.cuda.set_rng_state(state[f"random.cuda.{mesh.rank}"], mesh.device)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Reads the model's tensors alone into a whole model in one process, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a single process is the point
        dcp.load(model_state(model), storage_reader=FileSystemReader(folder), no_dist=True)


def model_state(model: nn.Module) -> dict[str, Any]:
    """The model's tensors under `model.` and their names, tied ones once."""
    stored = set(model.state_dict(keep_vars=True))
    tensors = [*model.named_parameters(), *(pair for pair in model.named_buffers() if pair[0] in stored)]
    return {f"model.{name}": tensor.detach() for name, tensor in tensors}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # Before the first step there is nothing to read into, so the moments are made here as AdamW makes them.
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        moments = optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            moments["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for moment in _MOMENTS:
            value: Tensor = moments[moment]
            state[f"optimizer.{moment}.{name}"] = value.detach()
    return state


def _random_state(mesh: Mesh) -> dict[str, Any]:
    state = {f"random.cpu.{mesh.rank}": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        state[f"random.cuda.{mesh.rank}"] = torch.cuda.get_rng_state(mesh.device)
    return state
