"""Which ranks read their own data and which compute one copy of the model together, as far as the model shows it.

From the wrapper (DistributedDataParallel, FullyShardedDataParallel), from the mesh that `fully_shard` was called with,
from the placements of the parameters, and, of a model without any of these, from the share of the rows that a sampler
deals to each rank. Anything not shown there is reported in `unknown`, and is not judged.
"""

import re
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from .sealed import Values
from .weights import zero_of

_MODEL_AXIS = re.compile("(?i)(^|_)(tp|ep|tensor|model)(_|$)")
# Ranks of such an axis hold parts of the same rows.
_SEQUENCE_AXIS = re.compile("(?i)(^|_)(cp|sp|context|sequence|ulysses)(_|$)")

_sharding_meshes: list[Any] = []


def note_mesh(sharded: Any, module: Any, *args: Any, mesh: Any = None, **kwargs: Any) -> None:
    """`fully_shard` was called with this mesh; None is all ranks."""
    _sharding_meshes.append(mesh)


def of(module: Module, share: tuple[int | None, int | None] = (None, None)) -> Values:
    """The record of this rank and its model.

    Args:
        share: into how many shares the program's sampler divides the rows, and which one this rank reads.

    Returns:
        parameters: their names.
        together: the ranks that hold parts of the same parameters.
        groups: the ranks of each process group that this rank is in.
        splits: an axis of the parameters that may split rows among ranks, by its name.
        data_ranks: the ranks of which each reads its own rows, this one included, and `how` that is known;
            or `unknown`, the reason why it is not.
    """
    parameters: dict[str, Any] = dict(module.named_parameters())
    placed = [
        parameter for parameter in parameters.values() if hasattr(parameter, "placements")
    ]
    together = {rank for each in placed for rank in each.device_mesh.mesh.flatten().tolist()}
    axes = [
        pair
        for each in placed
        for pair in zip(_axes(each.device_mesh), each.placements, strict=True)
    ]
    all_axes = {axis for axis, _ in axes}
    sharded_axes = {axis for axis, how in axes if how.is_shard()}
    record: Values = {"together": sorted(together), "parameters": list(parameters)}
    record["splits"] = min(filter(_SEQUENCE_AXIS.search, all_axes), default=None)
    if not (dist.is_available() and dist.is_initialized()):
        record["unknown"] = (
            "the launcher started several processes, but they have no process group"
        )
        return record
    groups = dist.distributed_c10d._world.pg_group_ranks
    record["groups"] = [sorted(group, key=group.__getitem__) for group in groups.values()]
    try:
        record["how"], record["data_ranks"] = _data_ranks(
            module, sharded_axes, record["together"], len(all_axes), share
        )
    except ValueError as why:
        record["unknown"] = str(why)
    return record


def _data_ranks(
    module: Module,
    sharded_axes: set[str],
    together: list[int],
    num_axes: int,
    share: tuple[int | None, int | None],
) -> tuple[str, list[int]]:
    """How it is known which ranks read their own rows, and these ranks.

    Raises:
        ValueError: it is not.
    """
    if (ddp := _inner(module, "DistributedDataParallel")) is not None:
        return "DistributedDataParallel", dist.get_process_group_ranks(ddp.process_group)
    for name, group in (
        ("FullyShardedDataParallel", "process_group"),
        ("DeepSpeedEngine", "data_parallel_group"),
    ):
        if (wrapper := _inner(module, name)) is not None:
            if name == "DeepSpeedEngine" and zero_of(wrapper) is None:
                raise ValueError(
                    "DeepSpeed shows its gradients only under ZeRO, and not in float16"
                )
            ranks = dist.get_process_group_ranks(getattr(wrapper, group))
            # Hybrid sharding replicates over a group that this one does not show.
            if len(ranks) < dist.get_world_size():
                raise ValueError(f"{name} shards over only some of the ranks")
            return name, ranks
    everyone = list(range(dist.get_world_size()))
    if _inner(module, "FSDPModule") is not None:
        meshes = [
            everyone if mesh is None else mesh.mesh.flatten().tolist()
            for mesh in _sharding_meshes
        ]
        # It may have been called before the referee was there.
        if not meshes and num_axes != 1:
            raise ValueError("fully_shard was called where the referee could not see its mesh")
        return "fully_shard", max(meshes or [together], key=len)
    if sharded_axes and all(map(_MODEL_AXIS.search, sharded_axes)):
        axes = " and ".join(sorted(sharded_axes))
        return f"parameters are sharded over {axes} only", [dist.get_rank()]
    if not together and share == (len(everyone), dist.get_rank()):
        return "the sampler of each rank", everyone
    raise ValueError(
        "the model has no wrapper and no placement that shows how ranks divide the data"
    )


def _inner(module: Module, class_name: str) -> Any:
    """The outermost module of a class, by its name: the class may not be imported, and is not imported for this."""
    named = (
        each
        for each in module.modules()
        if class_name in [base.__name__ for base in type(each).__mro__]
    )
    return next(named, None)


def _axes(mesh: Any) -> list[str]:
    return list(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
