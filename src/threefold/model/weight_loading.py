"""Storage for a model that was built without it and split, and the weights in it.

Each rank reads its own part of each tensor from memory-mapped safetensors files. Storage is not initialised by itself:
every parameter and every buffer is written here, or there is an error.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel

from threefold.mesh.mesh import Mesh
from threefold.model import weight_check
from threefold.model.collectives import is_sharded, local_part
from threefold.model.weight_check import Weights, is_adapter, original, stored_tensors

_INTEGERS = (torch.int16, torch.int32, torch.int64)


def fill(
    model: PreTrainedModel,
    weights: Weights,
    *,
    mesh: Mesh,
    tp_placements: Mapping[str, Placement],
    first_value: Callable[[str, torch.Size], Tensor],
    offloaded: bool = False,
) -> None:
    """Gives a split model its storage on the mesh's device and reads this rank's part of every tensor.

    A tensor is cut first over tp by its placement, then over fsdp along dim 0, the order in which it was split. Peak
    memory beyond the shards is one tensor.

    Args:
        first_value: (name, shape) -> first values of an adapter's whole weight that `weights` do not have.
    """
    reserve(model, mesh, offloaded=offloaded)
    tied = dict(model.all_tied_weights_keys)
    not_finite, written = [], set()
    fsdp_rank = mesh.topology.coordinates(mesh.rank)[1] * mesh.topology.cp + mesh.cp_rank
    fsdp_size = mesh.size("fsdp")
    with torch.no_grad():
        for name, target in stored_tensors(model):
            stored = original(name)
            if stored not in weights and not is_adapter(name):
                stored = tied[stored]  # of two names of one tensor, the file has the other
            whole = weights[stored]() if stored in weights else first_value(name, target.shape)
            part = _cut(whole, tp_placements.get(name), mesh=mesh)
            if fsdp_size > 1 and is_sharded(target):
                pieces = part.chunk(fsdp_size, dim=0)
                part = pieces[fsdp_rank] if fsdp_rank < len(pieces) else part[:0]
            if (
                part.is_floating_point()
                and part.numel()
                and not all(map(torch.isfinite, part.aminmax()))
            ):
                not_finite.append(stored)
            local_part(target).copy_(part)
            target._is_hf_initialized = True  # type: ignore[union-attr]
            written.add(id(target))
    mesh.decide("finite weights", not_finite, weight_check.refuse_not_finite)
    # Buffers that are not stored (rotary frequencies) are computed by the model's own initialisation.
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for name, module in model.named_modules():
        # Peft's layers, which a model's initialisation may mistake for its own.
        if is_adapter(f"{name}."):
            module._is_hf_initialized = True  # type: ignore[assignment]
    _mark_unwritten(model, written)
    model.initialize_weights()
    # FSDP's class is not transformers' own, and in foreign code it passes over modules without tensors of their own.
    for name in _unwritten(model, written):
        _initialise_around(model, name)
    if left := _unwritten(model, written):
        raise RuntimeError(
            f"{type(model).__name__} has tensors that were never written: {', '.join(left)}"
        )


def reserve(model: PreTrainedModel, mesh: Mesh, *, offloaded: bool) -> None:
    """Storage on the device, or in the host's memory for what FSDP2 fetches from there."""
    model.to_empty(device="cpu" if offloaded else mesh.device)
    for owner in model.modules() if offloaded else ():
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = torch.empty_like(buffer, device=mesh.device)
        for name, each in owner.named_parameters(recurse=False):
            if not is_sharded(each):
                kept = torch.empty_like(each, device=mesh.device)
                owner._parameters[name] = nn.Parameter(kept, requires_grad=each.requires_grad)
    # `to_empty` gave each module separate parameters: tie again those that were tied.
    for name, source in model.all_tied_weights_keys.items():
        path, _, own = name.rpartition(".")
        model.get_submodule(path)._parameters[own] = model.get_parameter(source)


def _mark_unwritten(model: nn.Module, written: set[int]) -> None:
    """Fills the buffers that no file holds with a value that no initialisation leaves in them."""
    for buffer in model.buffers():
        if id(buffer) not in written and buffer.dtype.is_floating_point:
            buffer.fill_(torch.nan)
        elif id(buffer) not in written and buffer.dtype in _INTEGERS:
            buffer.fill_(torch.iinfo(buffer.dtype).min)


def _unwritten(model: nn.Module, written: set[int]) -> list[str]:
    """The tensors with uninitialised memory: a bug of ours, or of the model's own code."""
    left = [
        name for name, parameter in model.named_parameters() if id(parameter) not in written
    ]
    for name, buffer in model.named_buffers():
        if id(buffer) in written:
            continue
        if buffer.dtype.is_floating_point and buffer.isnan().any():
            left.append(name)
        if buffer.dtype in _INTEGERS and (buffer == torch.iinfo(buffer.dtype).min).any():
            left.append(name)
    return left


def _initialise_around(model: PreTrainedModel, name: str) -> None:
    """Runs the initialisation of each module around a tensor, the innermost first, by the model that it belongs to."""
    owner = model
    parts = name.split(".")[:-1]
    for depth in range(len(parts) + 1):
        around = model.get_submodule(".".join(parts[:depth]))
        owner = around if isinstance(around, PreTrainedModel) else owner
    for depth in range(len(parts), -1, -1):
        owner._init_weights(model.get_submodule(".".join(parts[:depth])))


def _cut(whole: Tensor, placement: Placement | None, *, mesh: Mesh) -> Tensor:
    if placement is None:
        return whole
    assert mesh.parameter_mesh is not None
    with torch.device("cpu"):
        return distribute_tensor(
            whole, mesh.parameter_mesh["tp"], [placement], src_data_rank=None
        ).to_local()
