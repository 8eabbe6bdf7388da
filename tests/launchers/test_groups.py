"""Every group of a mesh has the mesh's own time limit, and a second mesh in one process meets anew."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from launchers.processes import free_port, rank
from ranks.spawn import run_ranks
from threefold.mesh.mesh import init_mesh


def _limits() -> dict[str, timedelta]:
    mesh = init_mesh(dp=2, tp=2, device="cpu", timeout_s=7.0)
    groups = {name: mesh.group(name) for name in ("dp", "tp", "loss", "world")}
    return {
        name: group._get_backend(torch.device("cpu")).options._timeout
        for name, group in groups.items()
        if group is not None
    }


def test_every_group_has_the_meshs_limit() -> None:
    for limits in run_ranks(_limits, 4):
        world = limits.pop("world")
        assert limits == dict.fromkeys(("dp", "tp", "loss"), timedelta(seconds=7))
        assert world == timedelta(seconds=60)  # the tests' own group, which was there before


def _twice(port: int) -> list[float]:
    """Leaves the tests' own group, and makes two of its own from a launcher's variables, one after the other."""
    number = dist.get_rank()
    dist.destroy_process_group()
    os.environ.update(rank(number, 2, port))
    sums = []
    for _ in range(2):
        mesh = init_mesh(dp=2, device="cpu", timeout_s=30.0)
        value = torch.tensor([float(number + 1)])
        dist.all_reduce(value, group=mesh.group("dp"))
        sums.append(value.item())
        mesh.close()
    return sums


def test_second_mesh_of_a_process_meets_anew() -> None:
    assert run_ranks(_twice, 2, free_port()) == [[3.0, 3.0], [3.0, 3.0]]
