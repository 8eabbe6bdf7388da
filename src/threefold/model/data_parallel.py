"""Copies and shards of the model over the data ranks.

`dp_shard` chooses: 1 is DDP (torch's own if a rank holds a whole model, else FSDP2's replicate axis), dp is FSDP2,
between is HSDP. With cp > 1 the shards are shared over cp as well. All of them average gradients over
the dp x cp ranks; `step` multiplies that away, because the loss is already divided by the global count of target
tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from threefold.config.schema import MeshConfig
from threefold.errors import Problem
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model.collectives import local_part
from threefold.model.load import layers_of

# A collective over less than this is mostly latency.
_UNIT_BYTES = 8 * 1024**2
# A model this small is not sharded again between forward and backward: its gather costs more than its memory.
_KEPT_WHOLE_BYTES = 512 * 1024**2


def choose(topology: Topology) -> tuple[str, str]:
    """Which kind of data parallelism a mesh uses (`none`, `ddp`, `fsdp`), and why."""
    if topology.dp == 1 and topology.cp == 1:
        return "none", "one copy of the model"
    if topology.dp_shard == 1 and topology.cp == 1 and topology.tp == 1:
        return "ddp", "dp_shard is 1: torch's DistributedDataParallel, every rank holds a whole model"
    if topology.dp_shard == 1 and topology.cp == 1:
        return "fsdp", "dp_shard is 1 with tp: FSDP2 replicates what tp has split"
    if topology.dp_replicate > 1:
        sharers = topology.dp_shard * topology.cp
        return "fsdp", f"HSDP: {topology.dp_replicate} replicas of {sharers} shards (dp_shard x cp)"
    return "fsdp", f"FSDP2: {topology.dp_shard * topology.cp} shards (dp_shard x cp)"


def problems(config: MeshConfig, topology: Topology, *, device: str) -> list[Problem]:
    """Settings of sharding that have no effect on this mesh; empty if there are none."""
    kind, why = choose(topology)
    what, expected = "mesh.cpu_offload = true has no effect on a CPU", "an accelerator with memory of its own"
    on_cpu = Problem(what, expected, "leave mesh.cpu_offload out")
    unsharded = [
        Problem(
            f"mesh.{name} = {str(value).lower()}, but nothing is sharded ({why})",
            "weights that are shared by several data ranks",
            f"--mesh.dp_shard {max(2, topology.dp)}   (FSDP2), or leave mesh.{name} out",
        )
        for name, value in (("cpu_offload", config.cpu_offload), ("prefetch", config.prefetch))
        if value and kind != "fsdp"
    ]
    return [on_cpu, *unsharded] if config.cpu_offload and device == "cpu" else unsharded


def shard(
    model: PreTrainedModel, mesh: Mesh, *, dtype: torch.dtype, cpu_offload: bool = False, prefetch: int = 0
) -> None:
    """Applies FSDP2 in place over (dp_replicate, fsdp): to each layer, small ones together, and to the rest.

    Args:
        cpu_offload: keep shards, gradients and moments in the host's memory.
        prefetch: units that are gathered ahead, in forward and in backward; 0: FSDP2 gathers the next one on its own.
    """
    assert mesh.device_mesh is not None
    axes = ("dp_replicate", "fsdp") if mesh.topology.dp_replicate > 1 else ("fsdp",)
    policy = MixedPrecisionPolicy(param_dtype=dtype if dtype != torch.float32 else None, reduce_dtype=torch.float32)
    own_mesh = mesh.device_mesh[axes]
    keep = _bytes(model) <= _KEPT_WHOLE_BYTES and not cpu_offload
    settings: dict[str, Any] = {"mesh": own_mesh, "mp_policy": policy}
    if cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    units = _units(layers_of(model))
    for unit in units:
        fully_shard(unit, reshard_after_forward=not keep, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)
    first: list[Any] = [unit[0] for unit in units]
    for number, layer in enumerate(first if prefetch else ()):
        layer.set_modules_to_forward_prefetch(first[number + 1 : number + 1 + prefetch])
        layer.set_modules_to_backward_prefetch(first[max(0, number - prefetch) : number][::-1])


def _units(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Consecutive layers that are gathered and reduced together; remaining ones go with the rest of the model."""
    units: list[list[nn.Module]] = [[]]
    for layer in layers:
        units[-1].append(layer)
        if sum(map(_bytes, units[-1])) >= _UNIT_BYTES:
            units.append([])
    return units[:-1]


def _bytes(module: nn.Module) -> int:
    # Of this rank's part of what tp has split, before fsdp.
    return sum(local_part(parameter).nbytes for parameter in module.parameters())


def replicate(model: PreTrainedModel, mesh: Mesh) -> DistributedDataParallel:
    """The model under torch's DistributedDataParallel over the dp ranks."""
    devices = [mesh.device.index] if mesh.device.type == "cuda" else None
    # Buffers are equal on all ranks and do not change; torch 2.13 renamed the setting and warns at the old name.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        model, device_ids=devices, process_group=mesh.group("dp"), gradient_as_bucket_view=True, **{buffers: False}
    )


@contextmanager
def last_backward(model: nn.Module, last: bool) -> Iterator[None]:
    """Reduces gradients in the backward of the `last` micro-batch only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
        yield
