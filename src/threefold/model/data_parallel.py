"""Copies and shards of the model over the data ranks.

`dp_shard` chooses: 1 is DDP, dp is FSDP2, between is HSDP. With cp > 1 the shards are shared over cp as well. DDP is
torch's own for a whole model in float32, else FSDP2's replicate axis: FSDP2 casts the weights in bfloat16 and sums the
gradients in float32, as `working_copy` does for one process. All of them average gradients over the dp x cp
ranks; `step` multiplies that away, because the loss is already divided by the global count of target tokens.
"""

import inspect
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from threefold.config.schema import Config
from threefold.errors import Problem
from threefold.mesh.mesh import Mesh
from threefold.model.collectives import local_part
from threefold.model.exact.sums import ExactSums
from threefold.model.head import below_head, kind_of
from threefold.model.load import layers_of
from threefold.plan import choices


def problems(config: Config, *, device: str) -> Iterator[Problem]:
    """Settings of memory that have no effect on this device; empty if there are none."""
    train = config.train
    memory = "an accelerator with memory of its own"
    if config.mesh.cpu_offload and device == "cpu":
        what = "mesh.cpu_offload = true has no effect on a CPU"
        yield Problem(what, memory, "leave mesh.cpu_offload out")
    if train.activation_checkpointing == "offload" and device == "cpu":
        what = "train.activation_checkpointing = offload has no effect on a CPU"
        yield Problem(what, memory, "--train.activation_checkpointing full")


def gathering(
    model: nn.Module, mesh: Mesh, config: Config, dtype: torch.dtype
) -> tuple[str, str] | None:
    """(what, why) of when whole weights exist, to be printed, before the model is sharded; None: they always do."""
    if mesh.size("fsdp") == 1:
        return None
    size = _gathered_bytes(model, dtype)
    kept, why = choices.kept_whole(size, device_of(mesh), offloaded=config.mesh.cpu_offload)
    layers = layers_of(model)
    units = len(_units(layers)) + len(_ends(model, layers)) + 1
    how = (
        f"{units} units, one ahead of its turn"
        if units > 1
        else "one unit, too small to be gathered by layers"
    )
    sizes = f"{size / 2**20:,.1f} MiB of weights at {dtype.itemsize} bytes a number, {how}"
    return (
        f"weights: gathered {'once a step' if kept else 'in forward and in backward'}",
        f"{sizes}; {why}",
    )


def _gathered_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    return sum(
        local_part(parameter).numel() * dtype.itemsize for parameter in model.parameters()
    )


def device_of(mesh: Mesh) -> choices.Device:
    """This rank's device, as choices depend on it."""
    if not mesh.on_cuda:
        return choices.Device.here(mesh.device.type)
    memory_bytes = torch.cuda.get_device_properties(mesh.device).total_memory
    bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return choices.Device.here("cuda", memory_bytes)._replace(bfloat16=bfloat16)


def shard(
    model: nn.Module,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    cpu_offload: bool = False,
    kept: Collection[nn.Parameter] = (),
    exact: bool = False,
    ends: bool = False,
) -> ExactSums | None:
    """Applies FSDP2 in place over (dp_replicate, fsdp): to each layer, small ones together, the ends, and the rest.

    Layer inputs are not cast: `_units` depends on the mesh, and the arithmetic must not.

    Args:
        cpu_offload: keep shards, gradients and moments in the host's memory.
        kept: parameters that each rank holds as they are, and whose gradients `training.gradients` averages.
        exact: leave the summing of gradients to the returned object, over copies too.
        ends: gather the embedding separately, and the last norm with the head, whose forward is never run.
    """
    axes = (
        ("dp_replicate", "fsdp") if mesh.topology.dp_replicate > 1 and not exact else ("fsdp",)
    )
    cast = dtype if dtype != torch.float32 else None
    policy = MixedPrecisionPolicy(
        param_dtype=cast, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    keep = choices.kept_whole(
        _gathered_bytes(model, dtype), device_of(mesh), offloaded=cpu_offload
    ).value
    settings: dict[str, Any] = {
        "mesh": mesh.sharding_mesh[axes],
        "mp_policy": policy,
        "ignored_params": {*kept},
    }
    if cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.on_cuda)
    layers = layers_of(model)
    units = _units(layers)
    for unit in units:
        fully_shard(unit, reshard_after_forward=not keep, **settings)
    first: list[Any] = [unit[0] for unit in units]
    for module, head in _ends(model, layers) if ends else ():
        if head is not None:
            # Its own forward is not run, as the loss reads its weight: a child while FSDP2 looks what belongs together.
            module.add_module("head", head)
        unit = fully_shard(module, reshard_after_forward=False, **settings)
        if head is not None:
            del module.head
            settings["ignored_params"] |= {*head.parameters()}
        else:
            # Otherwise the head of the previous micro-batch is gathered again.
            unit.set_modules_to_backward_prefetch([unit])
        first.append(module)
    fully_shard(model, reshard_after_forward=False, **settings)
    return ExactSums([*first, model], model, mesh) if exact else None


def _ends(model: Any, layers: list[nn.Module]) -> list[tuple[nn.Module, nn.Module | None]]:
    """Modules gathered separately from the layers and the rest: the embedding, and the last norm with the head.

    Small ones stay in the rest; so do both if they share a weight, or if no norm with weights follows the layers.
    """
    if kind_of(model)[0] is None:
        return []
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    inner = below_head(model)
    parts = [each for each in inner.children() if any(True for _ in each.parameters())]  # type: ignore[union-attr]
    holders = [
        place for place, each in enumerate(parts) if not {*layers}.isdisjoint(each.modules())
    ]
    behind = parts[holders[-1] + 1 :] if holders else []
    if (
        head.weight is embedding.weight
        or not behind
        or any(each.ndim > 1 for each in behind[0].parameters())
    ):
        return []
    ends = [(embedding, None), (behind[0], head)]
    return [each for each in ends if sum(map(_bytes, filter(None, each))) >= choices.UNIT_BYTES]


def _units(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Consecutive layers that are gathered and reduced together; remaining ones go with the rest of the model."""
    units: list[list[nn.Module]] = [[]]
    for layer in layers:
        units[-1].append(layer)
        if sum(map(_bytes, units[-1])) >= choices.UNIT_BYTES:
            units.append([])
    return units[:-1]


def _bytes(module: nn.Module) -> int:
    # Bytes of this rank's tp part, before fsdp.
    return sum(local_part(parameter).nbytes for parameter in module.parameters())


def replicate(model: PreTrainedModel, mesh: Mesh) -> DistributedDataParallel:
    """The model under torch's DistributedDataParallel over the dp ranks."""
    devices = [mesh.device.index] if mesh.on_cuda else None
    # Buffers are equal on all ranks and do not change; torch 2.13 renamed the setting and warns at the old name.
    takes = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in takes else "broadcast_buffers"
    wrapped = DistributedDataParallel(
        model,
        device_ids=devices,
        process_group=mesh.group("dp"),
        gradient_as_bucket_view=True,
        **{buffers: False},
    )
    # The parameters whose gradients it waits for.
    wrapped.trained = [each.requires_grad for each in model.parameters()]
    return wrapped


def frozen_in(model: nn.Module) -> str:
    """How many parameters are frozen, and a digest of which, to compare between ranks; empty if none is."""
    frozen = [not each.requires_grad for each in model.parameters()]
    return (
        f" ({sum(frozen)} parameters frozen: {zlib.crc32(bytes(frozen)):x})"
        if any(frozen)
        else ""
    )


@contextmanager
def last_backward(model: nn.Module, last: bool, *, unsharded: bool) -> Iterator[None]:
    """Reduces the gradients of a micro-batch: over shards in each, over copies of the model in the `last` alone.

    Args:
        unsharded: keep whole gradients until the last one, and reduce those once.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or not unsharded)
        model.set_requires_all_reduce(last)
        model.set_is_last_backward(last)
    with (
        model.no_sync()
        if isinstance(model, DistributedDataParallel) and not last
        else nullcontext()
    ):
        yield


def reshard(model: nn.Module) -> None:
    """Gives back what a forward without a backward has gathered; FSDP2 keeps the outermost parameters until then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
