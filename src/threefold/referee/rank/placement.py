"""Which ranks read data of their own and which compute one copy of the model together, as far as the model shows it.

From the wrapper (DistributedDataParallel, FullyShardedDataParallel), from the mesh that `fully_shard` was called with,
and from the placements of the parameters. What does not show is said in `unknown`, and is not judged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_MODEL_AXES = {"tp", "ep", "tensor", "model"}
# Ranks of such an axis hold parts of the same rows.
_SEQUENCE_AXES = {"cp", "sp", "context", "sequence", "ulysses"}

_sharding_meshes: list[Any] = []


def note_mesh(mesh: Any) -> None:
    """`fully_shard` was called with this mesh; None is all ranks."""
    _sharding_meshes.append(mesh)


def of(module: torch.nn.Module) -> dict[str, Any]:
    """What a record says of this rank and its model.

    Returns:
        parameters: the shape of each, and its placements.
        together: the ranks that hold parts of the same parameters.
        data_ranks: the ranks of which each reads rows of its own, this one included, and `how` that is known;
            or `unknown`, the reason why it is not.
    """
    parameters = {}
    together: set[int] = set()
    sharded_axes: set[str] = set()
    all_axes: set[str] = set()
    for name, parameter in module.named_parameters():
        parameters[name] = placed = _placement(parameter)
        together.update(placed.get("ranks", []))
        sharded_axes.update(placed.get("sharded", []))
        all_axes.update(placed.get("axes", []))
    known = {"together": sorted(together), "parameters": parameters}
    if not (dist.is_available() and dist.is_initialized()):
        return {**known, "unknown": "the launcher started several processes, and they have no process group"}
    if hidden := sorted(axis for axis in all_axes if _words(axis) & _SEQUENCE_AXES):
        return {**known, "unknown": f"the axis {hidden[0]!r} may split rows among ranks"}
    return {**known, **_data_ranks(module, sharded_axes)}


def _data_ranks(module: torch.nn.Module, sharded_axes: set[str]) -> dict[str, Any]:
    """`data_ranks` and `how`, or `unknown`."""
    if (ddp := _inner(module, "DistributedDataParallel")) is not None:
        ranks = dist.get_process_group_ranks(ddp.process_group)
        return {"how": "DistributedDataParallel", "data_ranks": ranks}
    if (fsdp := _inner(module, "FullyShardedDataParallel")) is not None:
        ranks = dist.get_process_group_ranks(fsdp.process_group)
        # Hybrid sharding replicates over a group that this one does not show.
        if len(ranks) < dist.get_world_size():
            return {"unknown": "FullyShardedDataParallel shards over a part of the ranks"}
        return {"how": "FullyShardedDataParallel", "data_ranks": ranks}
    if _inner(module, "FSDPModule") is not None:
        if not _sharding_meshes:
            return {"unknown": "fully_shard was called where the referee could not see its mesh"}
        return {"how": "fully_shard", "data_ranks": _largest_mesh()}
    if sharded_axes and all(_words(axis) & _MODEL_AXES for axis in sharded_axes):
        axes = " and ".join(sorted(sharded_axes))
        return {"how": f"parameters are sharded over {axes} only", "data_ranks": [dist.get_rank()]}
    return {"unknown": "the model has no wrapper and no placement that tells how ranks divide the data"}


def _inner(module: torch.nn.Module, class_name: str) -> Any:
    """The outermost module of a class, by its name: the class may not be imported, and is not imported for this."""
    for inner in module.modules():
        if any(base.__name__ == class_name for base in type(inner).__mro__):
            return inner
    return None


def _words(axis: str) -> set[str]:
    return set(axis.lower().split("_"))


def _largest_mesh() -> list[int]:
    largest: list[int] = []
    for mesh in _sharding_meshes:
        ranks = list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()
        largest = max(largest, ranks, key=len)
    return largest


def _placement(parameter: Any) -> dict[str, Any]:
    """The shape of a parameter, and for a DTensor its mesh and placements."""
    shape = list(parameter.shape)
    if not hasattr(parameter, "placements"):
        return {"shape": shape}
    mesh = parameter.device_mesh
    axes = list(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
    pairs = zip(axes, parameter.placements, strict=True)
    return {
        "shape": shape,
        "axes": axes,
        "placements": [str(placement) for placement in parameter.placements],
        "sharded": [axis for axis, placement in pairs if placement.is_shard()],
        "ranks": mesh.mesh.flatten().tolist(),
    }
