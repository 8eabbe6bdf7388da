"""The state of a run as flat, named tensors, and the part of each that this rank holds and writes.

`model.` and a name: the weights. `optimizer.exp_avg.` (`exp_avg_sq.`, `step.`) and the same name: AdamW's moments, and
so for any optimizer (`moments`). `ema.` and a name: a moving average of weights. `random.cpu.3`: the random state of
rank 3. Names and shapes do not depend on a mesh, so a state saved on one mesh can be read on another. Placements
determine what each rank holds; every rank knows them all, so no message is needed.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.checkpoint.optimizer_state import optimizer_state
from threefold.checkpoint.tensor_index import Box, Index, boxes_of
from threefold.checkpoint.tensors import (
    TYPE_NAMES,
    TensorPart,
    in_file_order,
    read_box,
    read_whole,
)
from threefold.data.order.permutation import seed_of
from threefold.errors import CheckpointError, first_line
from threefold.mesh.mesh import Mesh
from threefold.model import noise
from threefold.model.model import Model
from threefold.model.weight_check import is_adapter

# (stride, size) of each axis that a tensor is split over, in ranks.
Axes = tuple[tuple[int, int], ...]


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, held: Container[str] = ()
) -> dict[str, Tensor]:
    """Returns weights and moments as live tensors: copying into them changes the run; `held` as in both."""
    return {**model_state(model, held), **optimizer_state(model, optimizer, held)}


def model_state(model: nn.Module, held: Container[str] = ()) -> dict[str, Tensor]:
    """Returns the model's tensors under `model.` and their names, tied ones once.

    With adapters, returns only these, other trained tensors, and those also `held`, by such names: the rest still has
    the original values, in the model's own files. Parts that an architecture itself freezes (BLT's patcher) are in
    no other file of the run.
    """
    parameters = list(model.named_parameters())
    stored = set(model.state_dict(keep_vars=True))
    tensors = [*parameters, *(pair for pair in model.named_buffers() if pair[0] in stored)]
    has_adapters = any(is_adapter(name) for name, _ in parameters)
    return {
        f"model.{name}": tensor.detach()
        for name, tensor in tensors
        if not has_adapters
        or tensor.requires_grad
        or is_adapter(name)
        or f"model.{name}" in held
    }


def averaged_name(name: str) -> str:
    """The name in a checkpoint of a weight's moving average."""
    return f"ema.{name}"


def index_of(checkpoint: Checkpoint, *, ema: bool = False) -> Index:
    """Returns where a checkpoint's tensors lie; with `ema`, the weights are their moving averages.

    Raises:
        CheckpointError: it has no moving average.
    """
    index, prefix = Index.read(checkpoint.state), averaged_name("")
    if not ema:
        return index
    averages = {
        f"model.{name.removeprefix(prefix)}": entry
        for name, entry in index.entries.items()
        if name.startswith(prefix)
    }
    if not averages:
        raise CheckpointError(
            f"{checkpoint.path} has no moving average of the weights",
            expected="a run with optimizer.ema",
            fix="leave --ema out",
        )
    return Index({**index.entries, **averages})


def random_state(mesh: Mesh) -> dict[str, Tensor]:
    """Returns a copy of this rank's random states."""
    state = {f"random.cpu.{mesh.rank}": torch.get_rng_state()}
    if mesh.on_cuda:
        state[f"random.cuda.{mesh.rank}"] = torch.cuda.get_rng_state(mesh.device)
    return state


def restore_random_state(folder: Path, index: Index, mesh: Mesh) -> None:
    """Restores this rank's random states; those that were not saved stay as they are.

    Raises:
        CheckpointError: one is not a state of torch's generator.
    """
    for name in random_state(mesh):
        if (entry := index.entries.get(name)) is None:
            continue
        try:
            if name.startswith("random.cpu."):
                torch.set_rng_state(read_whole(folder, entry))
            else:
                torch.cuda.set_rng_state(read_whole(folder, entry), mesh.device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{name} in {folder} is not a state of torch's random numbers: {first_line(error)}",
                expected="the random states that `threefold train` writes",
                fix="use another checkpoint",
            ) from error


def restore_or_draw_random(
    checkpoint: Checkpoint, manifest: Mapping[str, Any], index: Index, model: Model
) -> None:
    """Ends the reading of a checkpoint with this rank's random states, drawn anew on another mesh; every rank calls it.

    The saved ones do not apply to another mesh, and those of step 1 must not repeat either.
    """
    mesh = model.mesh
    if tuple(manifest["mesh"]) == mesh.topology.sizes:
        restore_random_state(checkpoint.state, index, mesh)
    else:
        places = noise.places(mesh, model.tensor.sequence_group)
        torch.manual_seed(
            seed_of("a resume on another mesh", manifest["seed"], checkpoint.step, *places)
        )
    # Until every rank has read the checkpoint, no rank may start anything that could remove it.
    mesh.decide("resumed", "", lambda parts: "")


@dataclass(frozen=True)
class Holding:
    """A box of a tensor that this rank holds.

    Attributes:
        shape: of the complete tensor.
        box: in the complete tensor.
        inside: where the box is in the rank's part of the tensor.
        writer: this rank, of those that hold the box, writes it.
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

    A DTensor may live on any DeviceMesh with named axes; a plain tensor is complete on every rank. Ranks that hold the
    same box take turns to write, so that each writes about as much; every rank computes the same turns, without a
    message.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    by_kind: dict[Any, tuple[tuple[int, ...], list[tuple[Box, tuple[slice, ...]]]]] = {}
    held = []
    for name, tensor in state.items():
        # Layers have the same boxes: compute them once.
        kind = (
            (tensor.shape, tensor.placements, tensor.device_mesh)
            if isinstance(tensor, DTensor)
            else tensor.shape
        )
        if kind not in by_kind:
            by_kind[kind] = (
                holders(sharded_axes(tensor), mesh.rank, mesh.world_size),
                boxes_held(tensor),
            )
        sharers, boxes = by_kind[kind]
        written = loads.setdefault(sharers, [0] * len(sharers))
        turn = written.index(min(written))
        written[turn] += tensor.numel() * tensor.element_size()
        shape, writes = tuple(tensor.shape), sharers[turn] == mesh.rank
        held += [Holding(name, shape, box, inside, writes) for box, inside in boxes]
    return held


def boxes_held(tensor: Tensor) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes of a tensor that this rank holds, and where each is in its part of the tensor."""
    return [(box, inside.slices) for box, inside in boxes_of(_indices(tensor))]


def parts(state: Mapping[str, Tensor], held: Sequence[Holding], mesh: Mesh) -> list[TensorPart]:
    """Returns what this rank writes of a state, with its random states, in file order, as live views."""
    alone = [
        TensorPart(name, tuple(values.shape), Box((0,), tuple(values.shape)), values)
        for name, values in random_state(mesh).items()
    ]
    return in_file_order([*own_parts(state, held), *alone])


def own_parts(state: Mapping[str, Tensor], held: Sequence[Holding]) -> list[TensorPart]:
    """Returns what this rank writes of a state, in file order, as live views."""
    return in_file_order(
        TensorPart(each.name, each.shape, each.box, each.values(state))
        for each in held
        if each.writer
    )


def sharded_axes(tensor: Tensor) -> Axes:
    """The axes that a tensor is split over, empty if every rank holds all of it.

    Along an axis of a DeviceMesh, ranks are a stride apart, so a rank's place on it is a digit of the rank's number.
    That gives the place of every rank, even outside the tensor's own mesh.
    """
    axes: list[tuple[int, int]] = []
    if isinstance(tensor, DTensor):
        ranks = tensor.device_mesh.mesh
        for dim, placed in enumerate(tensor.placements):
            if not placed.is_replicate() and ranks.size(dim) > 1:
                line = (
                    ranks.movedim(dim, 0).flatten(1)[:, 0].tolist()
                    if ranks.ndim > 1
                    else ranks.tolist()
                )
                stride, size = line[1] - line[0], len(line)
                assert [rank // stride % size for rank in line] == list(range(size)), (
                    f"{line} is not regular"
                )
                axes.append((stride, size))
    return tuple(axes)


def place_on(axes: Axes, rank: int) -> tuple[int, ...]:
    """Which part of such a tensor a rank holds: its place on each of the axes."""
    return tuple(rank // stride % size for stride, size in axes)


def holders(axes: Axes, rank: int, world_size: int) -> tuple[int, ...]:
    """Returns the ranks that hold the same part of such a tensor as `rank`, in ascending order."""
    own = place_on(axes, rank)
    return tuple(other for other in range(world_size) if place_on(axes, other) == own)


def _indices(tensor: Tensor) -> list[Sequence[int]]:
    """Returns, for each dim, the complete tensor's indices that this rank holds, ascending."""
    if not isinstance(tensor, DTensor):
        return [range(size) for size in tensor.shape]
    held = [torch.arange(size) for size in tensor.shape]
    names, place = tensor.device_mesh.mesh_dim_names, tensor.device_mesh.get_coordinate()
    assert names is not None and place is not None
    splits: list[tuple[int, Any]] = [
        pair for pair in enumerate(tensor.placements) if not pair[1].is_replicate()
    ]
    # A strided shard before another split of the same dim is FSDP's: it cut the rest of that split into plain chunks.
    late = [
        (axis, p)
        for axis, p in splits
        if type(p) is not Shard and any(b > axis and q.dim == p.dim for b, q in splits)
    ]
    for axis, placement in [*(split for split in splits if split not in late), *reversed(late)]:
        dim = placement.dim
        if type(placement) is Shard or (axis, placement) in late:
            chunks = held[dim].chunk(tensor.device_mesh.size(axis))
            held[dim] = chunks[place[axis]] if place[axis] < len(chunks) else held[dim][:0]
        else:
            held[dim] = _split_as_weights(
                held[dim], tensor.device_mesh[names[axis]], placement, tensor.ndim
            )
    local = tuple(tensor.to_local().shape)
    sizes = tuple(len(indices) for indices in held)
    assert sizes == local, (
        f"{tensor.placements} of {tuple(tensor.shape)} gave {sizes}, the rank holds {local}"
    )
    return [_as_range(indices) for indices in held]


def _split_as_weights(indices: Tensor, axis: DeviceMesh, placement: Any, ndim: int) -> Tensor:
    # A placement of packed projections splits the indices as it split the weights.
    shape = [1] * ndim
    shape[placement.dim] = len(indices)
    with torch.device("cpu"):
        split = distribute_tensor(indices.view(shape), axis, [placement], src_data_rank=None)
    return split.to_local().flatten().cpu()


def _as_range(indices: Tensor) -> Sequence[int]:
    first, last = (int(indices[0]), int(indices[-1])) if len(indices) else (0, -1)
    return range(first, last + 1) if last - first + 1 == len(indices) else indices.tolist()


def damage_found(checkpoint: Checkpoint, mesh: Mesh) -> str | None:
    """Returns the damage of a checkpoint, or None, on every rank; the ranks share the reading of its files."""
    own = checkpoint.damage(share=(mesh.rank, mesh.world_size))
    return mesh.decide("damage", own, lambda damages: next(filter(None, damages), None))


def fit(
    state: Mapping[str, Tensor],
    index: Index,
    *,
    fix: str = "use the model of the run, or another folder for a new one",
) -> None:
    """Checks that a checkpoint holds the tensors of `state`.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or type.
    """
    wanted = {
        name: f"{TYPE_NAMES[tensor.dtype]} {list(tensor.shape)}"
        for name, tensor in state.items()
        if tensor.numel()  # of an empty one there is nothing in a file
    }
    held = {name: f"{entry.dtype} {list(entry.shape)}" for name, entry in index.entries.items()}
    if wrong := [name for name in wanted if held.get(name) != wanted[name]]:
        more = f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"the checkpoint has {held.get(wrong[0], 'nothing')} for {wrong[0]}, the model {wanted[wrong[0]]}{more}",
            expected="the tensors of the same model and optimizer",
            fix=fix,
        )


def read_into(state: Mapping[str, Tensor], folder: Path, index: Index, mesh: Mesh) -> None:
    """Fills this rank's part of `state` from the files in `folder`, in place; call `fit` first."""
    with torch.no_grad():
        for held in holdings(state, mesh):
            values = held.values(state)
            read_box(folder, index.entries[held.name], held.box, values)
            # It writes into memory, where torch counts nothing.
            torch.autograd.graph.increment_version(values)


def read_weights(model: nn.Module, folder: Path, index: Index) -> None:
    """Fills a complete model in one process, in place; CheckpointError if the checkpoint is another model's."""
    state = model_state(model, index.entries)
    fit(state, index)
    for name, tensor in state.items():
        read_box(
            folder, index.entries[name], Box((0,) * tensor.ndim, tuple(tensor.shape)), tensor
        )
