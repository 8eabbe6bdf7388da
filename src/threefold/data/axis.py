"""The dp axis of this process: how many ranks read different samples, and this one's place among them.

It comes from a mesh (threefold's or torch's), else from the process group's world. cp and tp ranks of one dp rank have
the same place on it.
"""

from __future__ import annotations

from typing import Any

import torch

from threefold.errors import ConfigError

_DP_DIMS = ("dp", "dp_replicate", "dp_shard")


def data_axis(mesh: Any | None = None) -> tuple[int, int]:
    """(number of dp ranks, this one) of the given mesh, else the active one, else the world; else a ConfigError."""
    from threefold.mesh.mesh import active_mesh

    if mesh is not None:
        return _axis_of_mesh(mesh)
    mesh, world_size = active_mesh(), 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world_size = torch.distributed.get_world_size()
    if mesh is not None:
        size = mesh.topology.world_size
        if world_size not in (0, size):
            raise ConfigError(
                f"threefold.init_mesh made a mesh of {size}, and the process group has {world_size} ranks",
                expected="one place for this process: with the mesh's, several ranks would read the same samples",
                fix="call threefold.init_mesh() after torch.distributed.init_process_group(), or close the mesh before",
            )
        return _axis_of_mesh(mesh)
    if world_size:
        return world_size, torch.distributed.get_rank()
    raise ConfigError(
        "DistributedSampler does not know its rank: there is no mesh and no process group",
        expected="a mesh or a process group first; without one every rank would read every sample",
        fix="call threefold.init_mesh() before, or pass num_replicas=1, rank=0 for a single process",
    )


def place_on_axis(num_replicas: int | None, rank: int | None, mesh: Any) -> tuple[int, int]:
    """(number of dp ranks, this one) from the given numbers, the mesh or the world, in this order."""
    if mesh is not None and (num_replicas is not None or rank is not None):
        raise ConfigError(
            "DistributedSampler got mesh= together with num_replicas= or rank=",
            expected="one of them: the mesh's dp axis already gives the number of replicas and the rank",
            fix="leave out num_replicas and rank",
        )
    if num_replicas is None or rank is None:
        size, place = data_axis(mesh)
        num_replicas = size if num_replicas is None else num_replicas
        rank = place if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ConfigError(
            f"DistributedSampler got rank = {rank} with num_replicas = {num_replicas}",
            expected=f"a rank from 0 to {max(num_replicas - 1, 0)}",
            fix="pass this process's place on the dp axis as rank, or leave out both",
        )
    return num_replicas, rank


def _axis_of_mesh(mesh: Any) -> tuple[int, int]:
    if hasattr(mesh, "dp_size"):
        return mesh.dp_size, mesh.dp_rank
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    dims = [name for name in names if name in _DP_DIMS]
    if not dims or "fsdp" in names:
        raise ConfigError(
            f"the mesh given to DistributedSampler has the dims ({', '.join(names)})",
            expected=f"dims among {', '.join(_DP_DIMS)}: only these show which ranks read different samples",
            fix="pass the mesh that threefold.init_mesh returned, or num_replicas= and rank=",
        )
    size, rank = 1, 0
    for name in dims:
        along = mesh.size(names.index(name))
        size, rank = size * along, rank * along + mesh.get_local_rank(name)
    return size, rank
