"""Copies and shards of the model over the data ranks.

`dp_shard` chooses: 1 is DDP, dp is FSDP2, between is HSDP. With cp > 1 the shards are shared over cp as well. DDP is
torch's own for a whole model in float32, else FSDP2's replicate axis: FSDP2 casts the weights in bfloat16 and sums the
gradients in float32, so it does on every mesh, one process among them. All of them average gradients over the dp x cp
ranks; `step` multiplies that away, because the loss is already divided by the global count of target tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from threefold.config.schema import Config
from threefold.errors import Problem
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model.collectives import local_part
from threefold.model.exact_sums import ExactSums
from threefold.model.load import layers_of
from threefold.model.precision import DTYPES

# A collective over less than this is mostly latency.
_UNIT_BYTES = 8 * 1024**2
# A model this small is not sharded again between forward and backward: its gather costs more than its memory. On CUDA
# a part of the device's memory, if that is more.
_KEPT_WHOLE_BYTES = 512 * 1024**2
_KEPT_WHOLE_PART = 1 / 32


def choose(topology: Topology, *, cast: bool = False, offloaded: bool = False, exact: bool = False) -> tuple[str, str]:
    """Which kind of data parallelism a mesh uses (`none`, `ddp`, `fsdp`), and why.

    Args:
        cast: whether it computes in another type than that of the weights.
        offloaded: whether shards are kept in the host's memory (`mesh.cpu_offload`).
        exact: whether gradients are summed as integers (`train.reduce`).
    """
    one_copy = topology.dp_shard == 1 and topology.cp == 1
    reasons = (("bfloat16", cast), ("mesh.cpu_offload", offloaded), ("train.reduce exact", exact))
    asked = [what for what, wanted in reasons if wanted]
    if topology.dp == 1 and topology.cp == 1:
        if asked:
            return "fsdp", f"FSDP2 on a mesh of one, for {' and '.join(asked)}; nothing is sent"
        return "none", "one copy of the model"
    if exact and topology.dp_replicate > 1:
        return (
            "fsdp",
            f"{topology.dp_replicate} copies of {topology.dp_shard} shards; train.reduce exact sums over copies",
        )
    if one_copy and topology.tp == 1 and not asked:
        return "ddp", "dp_shard is 1: torch's DistributedDataParallel, every rank holds a whole model"
    if one_copy:
        why = "with tp: FSDP2 replicates what tp has split" if topology.tp > 1 else f"{asked[0]}: FSDP2 replicates it"
        return "fsdp", f"dp_shard is 1 {why}"
    if topology.dp_replicate > 1:
        sharers = topology.dp_shard * topology.cp
        return "fsdp", f"HSDP: {topology.dp_replicate} replicas of {sharers} shards (dp_shard x cp)"
    return "fsdp", f"FSDP2: {topology.dp_shard * topology.cp} shards (dp_shard x cp)"


def problems(config: Config, topology: Topology, *, device: str) -> list[Problem]:
    """Settings of memory and of sharding that have no effect on this mesh; empty if there are none."""
    found, train = [], config.train
    memory = "an accelerator with memory of its own"
    if config.mesh.cpu_offload and device == "cpu":
        what = "mesh.cpu_offload = true has no effect on a CPU"
        found.append(Problem(what, memory, "leave mesh.cpu_offload out"))
    if train.activation_checkpointing == "offload" and device == "cpu":
        what = "train.activation_checkpointing = offload has no effect on a CPU"
        found.append(Problem(what, memory, "--train.activation_checkpointing full"))
    shards = topology.dp_shard * topology.cp
    if config.mesh.prefetch and shards == 1:
        fix = f"--mesh.dp_shard {topology.dp}   (FSDP2), or leave mesh.prefetch out"
        what = f"mesh.prefetch = {config.mesh.prefetch}, but nothing is gathered: mesh.dp_shard and mesh.cp are 1"
        expected = "weights that are shared by several data ranks"
        found.append(Problem(what, expected, fix if topology.dp > 1 else "leave mesh.prefetch out"))
    if train.accumulate == "unsharded" and (shards == 1 or num_micro_batches(config, topology) == 1):
        lacking = "mesh.dp_shard and mesh.cp are 1" if shards == 1 else "a step has one micro-batch"
        what = f"train.accumulate = unsharded has no effect: {lacking}"
        expected = "gradients that several ranks share, and several micro-batches a step"
        found.append(Problem(what, expected, "leave train.accumulate out"))
    return found


def num_micro_batches(config: Config, topology: Topology) -> int:
    """Micro-batches that a dp rank accumulates in a step."""
    rows = config.train.global_batch // topology.dp
    return 1 if config.train.micro_batch == "auto" else rows // config.train.micro_batch


def accumulation(model: nn.Module, config: Config, mesh: Mesh) -> tuple[str, str] | None:
    """(what, why) of gradients between micro-batches, to be printed, before the model is sharded; None: there are none.

    In bytes of a rank, and in reductions over shards in a step, of which each unit of `shard` makes one.
    """
    count, shards = num_micro_batches(config, mesh.topology), mesh.size("fsdp")
    if count == 1 or shards == 1:
        return None
    trained = {each for each in model.parameters() if each.requires_grad}
    in_units = [trained & {each for layer in unit for each in layer.parameters()} for unit in _units(layers_of(model))]
    units = sum(map(bool, in_units)) + bool(trained.difference(*in_units))
    whole = sum(local_part(each).numel() * 4 for each in trained) / 2**20
    prices = {"sharded": (whole / shards, units * count), "unsharded": (whole, units)}
    chosen = config.train.accumulate
    size, reductions = prices.pop(chosen)
    ((other, (other_size, other_reductions)),) = prices.items()
    own = f"{size:,.1f} MiB of gradients on a rank, {reductions} reductions a step"
    price = f"{other_size:,.1f} MiB and {other_reductions}"
    return f"accumulation: {chosen}", f"{count} micro-batches, {own} ({other}: {price})"


def gathering(model: nn.Module, mesh: Mesh, config: Config) -> tuple[str, str] | None:
    """(what, why) of when whole weights exist, to be printed, before the model is sharded; None: they always do."""
    if mesh.size("fsdp") == 1:
        return None
    size, most = _gathered_bytes(model, DTYPES[config.model.dtype]), _most_kept_bytes(mesh)
    units = len(_units(layers_of(model))) + 1
    ahead = config.mesh.prefetch or 1
    how = f"{units} units, {ahead} ahead of its turn" if units > 1 else "one unit, too small to be gathered by layers"
    sizes = f"{size / 2**20:,.1f} MiB of gathered weights, {how}"
    if config.mesh.cpu_offload:
        return "weights: gathered in forward and in backward", f"{sizes}; shards are in the host's memory"
    if size <= most:
        return "weights: gathered once a step", f"{sizes}; up to {most / 2**20:,.0f} MiB stay from forward to backward"
    return "weights: gathered in forward and in backward", f"{sizes}; more than {most / 2**20:,.0f} MiB do not stay"


def _gathered_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    return sum(local_part(parameter).numel() * dtype.itemsize for parameter in model.parameters())


def _most_kept_bytes(mesh: Mesh) -> float:
    if mesh.device.type != "cuda":
        return _KEPT_WHOLE_BYTES
    memory = torch.cuda.get_device_properties(mesh.device).total_memory
    return max(_KEPT_WHOLE_BYTES, _KEPT_WHOLE_PART * memory)


def shard(
    model: nn.Module,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    cpu_offload: bool = False,
    prefetch: int = 0,
    kept: Collection[nn.Parameter] = (),
    exact: bool = False,
) -> ExactSums | None:
    """Applies FSDP2 in place over (dp_replicate, fsdp): to each layer, small ones together, and to the rest.

    What layers are given is not cast: `_units` is not the same on every mesh, and the arithmetic must be.

    Args:
        cpu_offload: keep shards, gradients and moments in the host's memory.
        prefetch: units that are gathered ahead, in forward and in backward; 0: FSDP2 gathers the next one on its own.
        kept: parameters that each rank holds as they are, and whose gradients `training.gradients` averages.
        exact: leave the sums of gradients to what is returned, over copies too.
    """
    axes = ("dp_replicate", "fsdp") if mesh.topology.dp_replicate > 1 and not exact else ("fsdp",)
    cast = dtype if dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32, cast_forward_inputs=False)
    keep = _gathered_bytes(model, dtype) <= _most_kept_bytes(mesh) and not cpu_offload
    settings: dict[str, Any] = {"mesh": mesh.sharding_mesh[axes], "mp_policy": policy, "ignored_params": {*kept}}
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
    return ExactSums([*first, model], model, mesh) if exact else None


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether FSDP2 has a tensor, of which ranks hold parts, or one rank all of it."""
    return isinstance(tensor, DTensor) and "fsdp" in (tensor.device_mesh.mesh_dim_names or ())


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
def last_backward(model: nn.Module, last: bool, *, unsharded: bool = False) -> Iterator[None]:
    """Reduces the gradients of a micro-batch: over shards in each, over copies of the model in the `last` alone.

    Args:
        unsharded: keep whole gradients until the last one, and reduce those once.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or not unsharded)
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext():
        yield


def reshard(model: nn.Module) -> None:
    """Gives back what a forward without a backward has gathered; FSDP2 keeps the outermost parameters until then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
