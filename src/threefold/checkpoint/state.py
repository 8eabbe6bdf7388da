"""The state of a run as flat, named tensors, and the part of each that this rank holds and writes.

`model.` and a name: the weights. `optimizer.exp_avg.` (`exp_avg_sq.`, `step.`) and the same name: AdamW's moments.
`random.cpu.3`: the random state of rank 3. Names and shapes do not depend on a mesh, so a state saved on one mesh can
be read on another. Placements determine which rank holds what. Every rank knows them all, so no message is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from threefold.checkpoint.boxes import Box, Index, boxes_of
from threefold.checkpoint.tensors import Part, dtype_name, in_file_order, read_box, read_whole
from threefold.errors import CheckpointError
from threefold.mesh.mesh import Mesh

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
# A model is split over tp first; fsdp splits what is left (`model.build`).
_SPLIT_ORDER = ("tp", "fsdp", "dp_replicate")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns weights and moments as live tensors: copying into them changes the run."""
    return {**model_state(model), **_optimizer_state(model, optimizer)}


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the model's tensors under `model.` and their names, tied ones once.

    If some parameters are frozen, returns only the others: the frozen ones still have the model's original values.
    """
    parameters = list(model.named_parameters())
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    stored = set(model.state_dict(keep_vars=True)) if len(trained) == len(parameters) else set()
    tensors = [*trained, *(pair for pair in model.named_buffers() if pair[0] in stored)]
    return {f"model.{name}": tensor.detach() for name, tensor in tensors}


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    # Before the first step, the moments do not exist yet, so they are created here as AdamW creates them.
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        moments = optimizer.state[parameter]
        if not moments:
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            moments["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for moment in _MOMENTS:
            state[f"optimizer.{moment}.{name}"] = moments[moment].detach()
    return state


def random_state(mesh: Mesh) -> dict[str, Tensor]:
    """Returns a copy of this rank's random states."""
    state = {f"random.cpu.{mesh.rank}": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        state[f"random.cuda.{mesh.rank}"] = torch.cuda.get_rng_state(mesh.device)
    return state


def set_random_state(state: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Restores the random states that `random_state` returned; states that were not saved stay as they are."""
    if (saved := state.get(f"random.cpu.{mesh.rank}")) is not None:
        torch.set_rng_state(saved)
    if mesh.device.type == "cuda" and (saved := state.get(f"random.cuda.{mesh.rank}")) is not None:
        torch.cuda.set_rng_state(saved, mesh.device)


@dataclass(frozen=True)
class Holding:
    """A box of a tensor that this rank holds.

    Attributes:
        shape: of the whole tensor.
        box: the box in the whole tensor.
        inside: where the box lies in the rank's part of the tensor.
        writer: of the ranks that hold the box, this one writes it.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    inside: tuple[slice, ...]
    writer: bool

    def values(self, state: Mapping[str, Tensor]) -> Tensor:
        """Returns a live view of the box."""
        tensor = state[self.name]
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor)[self.inside]


def holdings(state: Mapping[str, Tensor], mesh: Mesh) -> list[Holding]:
    """Returns every box that this rank holds of a state; the same for every state of this model on this mesh.

    Ranks that hold the same box take turns to write, so that each writes about the same amount. All ranks compute the
    same turns, without communication.
    """
    loads: dict[tuple[str, ...], list[int]] = {}
    known: dict[Any, list[tuple[Box, tuple[slice, ...]]]] = {}
    found = []
    for name, tensor in state.items():
        copies, own = _copies(tensor, mesh)
        written = loads.setdefault(copies, [0] * math.prod(mesh.size(axis) for axis in copies))
        turn = written.index(min(written))
        written[turn] += tensor.numel() * tensor.element_size()
        # Layers are alike, so their boxes are computed once.
        kind = (tensor.shape, tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else tensor.shape
        if kind not in known:
            known[kind] = [(box, _slices(inside)) for box, inside in boxes_of(_indices(tensor))]
        shape = tuple(tensor.shape)
        found += [Holding(name, shape, box, inside, own == turn) for box, inside in known[kind]]
    return found


def parts(state: Mapping[str, Tensor], held: Sequence[Holding], mesh: Mesh) -> list[Part]:
    """Returns what this rank writes of a state, plus its random states, in file order, as live views."""
    own = [Part(each.name, each.shape, each.box, each.values(state)) for each in held if each.writer]
    for name, values in random_state(mesh).items():
        own.append(Part(name, tuple(values.shape), Box((0,), tuple(values.shape)), values))
    return in_file_order(own)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))


def _copies(tensor: Tensor, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """Returns the axes along which ranks hold the same box, and this rank's number among those ranks."""
    split: set[str] = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        split = {axis for axis, placed in zip(names, tensor.placements, strict=True) if not placed.is_replicate()}
    replicate, shard, cp, tp = mesh.topology.coordinates(mesh.rank)
    places = {"dp_replicate": replicate, "fsdp": shard * mesh.topology.cp + cp, "tp": tp}
    same = tuple(axis for axis in places if axis not in split and mesh.size(axis) > 1)
    number = 0
    for axis in same:
        number = number * mesh.size(axis) + places[axis]
    return same, number


def _indices(tensor: Tensor) -> list[Sequence[int]]:
    """Returns, for each dim, the whole tensor's indices that this rank holds, ascending."""
    if not isinstance(tensor, DTensor):
        return [range(size) for size in tensor.shape]
    held = [torch.arange(size) for size in tensor.shape]
    placements = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    for axis in _SPLIT_ORDER:
        if axis in placements and not placements[axis].is_replicate():
            dim: int = placements[axis].dim
            split = _split_over_tp if axis == "tp" else _split_over_fsdp
            held[dim] = split(held[dim], tensor.device_mesh[axis], placements[axis], tensor.ndim)
    local = tuple(tensor.to_local().shape)
    found = tuple(len(indices) for indices in held)
    assert found == local, f"{tensor.placements} of {tuple(tensor.shape)} gave {found}, the rank holds {local}"
    return [_as_range(indices) for indices in held]


def _split_over_tp(indices: Tensor, axis: DeviceMesh, placement: Any, ndim: int) -> Tensor:
    # The placement may be a plain shard or one of packed projections. It splits the indices as it split the weights.
    shape = [1] * ndim
    shape[placement.dim] = len(indices)
    with torch.device("cpu"):
        split = distribute_tensor(indices.view(shape), axis, [placement], src_data_rank=None)
    return split.to_local().flatten().cpu()


def _split_over_fsdp(indices: Tensor, axis: DeviceMesh, placement: Any, ndim: int) -> Tensor:
    shards = indices.chunk(axis.size())
    rank = axis.get_local_rank()
    return shards[rank] if rank < len(shards) else indices[:0]


def _as_range(indices: Tensor) -> Sequence[int]:
    if not len(indices):
        return range(0)
    first, last = int(indices[0]), int(indices[-1])
    return range(first, last + 1) if last - first + 1 == len(indices) else indices.tolist()


def fit(state: Mapping[str, Tensor], index: Index) -> None:
    """Checks that a checkpoint holds what `state` needs.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or type.
    """
    wanted = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in state.items()}
    held = {name: (entry.dtype, entry.shape) for name, entry in index.entries.items()}
    wrong = [name for name in wanted if held.get(name) != wanted[name]]
    if wrong:
        found = held.get(wrong[0])
        raise CheckpointError(
            f"the checkpoint has {_described(found) if found else 'nothing'} for {wrong[0]}, the model "
            f"{_described(wanted[wrong[0]])}" + (f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""),
            expected="the tensors of the same model and optimizer",
            fix="use the model of the run, or --log.dir ANOTHER_FOLDER for a new one",
        )


def _described(tensor: tuple[str, tuple[int, ...]]) -> str:
    return f"{tensor[0]} {list(tensor[1])}"


def read_into(state: Mapping[str, Tensor], folder: Path, index: Index, mesh: Mesh) -> None:
    """Fills this rank's part of `state` from the files in `folder`, in place; call `fit` first."""
    with torch.no_grad():
        for held in holdings(state, mesh):
            read_box(folder, index.entries[held.name], held.box, held.values(state))


def read_weights(model: nn.Module, folder: Path, index: Index) -> None:
    """Fills a whole model in one process, in place; CheckpointError if the checkpoint is another model's."""
    state = model_state(model)
    fit(state, index)
    for name, tensor in state.items():
        read_box(folder, index.entries[name], Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor)


def read_random_state(folder: Path, index: Index, mesh: Mesh) -> dict[str, Tensor]:
    """Returns this rank's random states as saved; omits those that were not saved."""
    found = {}
    for name in random_state(mesh):
        if (entry := index.entries.get(name)) is not None:
            found[name] = read_whole(folder, entry)
    return found
