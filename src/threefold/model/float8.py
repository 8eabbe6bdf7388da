"""Products of large linear layers in 8-bit floating point (arXiv:2209.05433), by torchao.

The numbers of a tensor (`tensorwise`), or of each of its rows (`rowwise`), share a scale.
Weights, gradients, moments and checkpoints stay as they are; only the three products of a layer use rounded
numbers. A layer is converted if its products save more time than the casts cost: not small ones, nor the head, the
embedding, routers, experts (which are no linear layers) or layers that the model keeps in float32.

Weights of converted layers are gathered by FSDP2 in 8 bits. A shard is rounded before it is sent, by the scale of the
whole weight, as each rank would round the gathered weight: what a layer computes is the same, bit for bit. The largest
numbers of all weights take one all-reduce before a forward. Parameters stay plain float32 shards, for optimizers,
checkpoints and averages. Their local tensors provide the data to gather (`fsdp_pre_all_gather`), FSDP2's
interface for tensor subclasses.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from threefold.config.schema import Config
from threefold.errors import Problem
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model.load import layers_of
from threefold.model.precision import kept_in_float32
from threefold.plan import choices
from threefold.plan.choices import FLOAT8_MULTIPLE, pays

_CAPABILITY = (8, 9)
_ROUTERS = {"gate", "router"}
_WEIGHTS = torch.float8_e4m3fn
_ROUNDED = "rounded before they are sent, by scales of whole weights; of others the shards do not divide the rows"
_ROWWISE = (
    "rows and columns are scaled by themselves, for which a rank needs the weight in bfloat16"
)
_OFFLOADED = "FSDP2 asks nothing of shards that it fetches from the host"


def layers_to_convert(model: PreTrainedModel, recipe: str) -> dict[str, nn.Linear]:
    """The linear layers that `recipe` pays for, by their names."""
    inside = {id(each) for layer in layers_of(model) for each in layer.modules()}
    kept = kept_in_float32(model)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and id(module) in inside
        and f"{name}.weight" not in kept
        and name.rpartition(".")[2] not in _ROUTERS
        and pays(recipe, *module.weight.shape)
    }


def problems(
    config: Config, outline: PreTrainedModel, topology: Topology, *, device: str
) -> Iterator[Problem]:
    """Why the products cannot be made so although train.float8 asks for it; empty if they can."""
    recipe = config.train.float8
    asked = f"train.float8 = {recipe}"
    leave_out = "leave train.float8 out"
    if importlib.util.find_spec("torchao") is None:
        yield Problem(
            f"{asked}, but torchao is not installed",
            "the package that has these products",
            f"pip install 'threefold[torchao]', or {leave_out}",
        )
    if (lacking := _lacking(device)) is not None:
        yield Problem(
            f"{asked} on {lacking}",
            "a CUDA device of capability 8.9 or newer (Ada, Hopper, Blackwell)",
            leave_out,
        )
    elif not (layers := choices.compiled(config, choices.Device.here(device))).value:
        yield Problem(
            f"{asked}, but layers are not compiled: {layers.why}",
            "compiled layers: casts in kernels of their own take longer than the products save",
            f"pip install triton, or {leave_out}",
        )
    if topology.tp > 1:
        yield Problem(
            f"{asked} with mesh.tp = {topology.tp}",
            "whole layers: each tp rank would scale its part of a weight by itself",
            f"--mesh.tp 1   (or {leave_out})",
        )
    if not layers_to_convert(outline, recipe):
        what = f"{asked}, but no layer of {outline.config.model_type!r} is of a size that gains by it"
        expected = "linear layers of more than 1024 outputs (or 4096 inputs), multiples of 16"
        if recipe == "rowwise":
            expected = "linear layers of more than 2048 outputs and 2048 inputs (or 4096 and 1024), multiples of 16"
        yield Problem(what, expected, leave_out)
    places = config.data.seq_len // topology.cp
    if places % FLOAT8_MULTIPLE:
        what = f"{asked} with {places} tokens of a row on a rank"
        rounded = (
            -(-config.data.seq_len // (FLOAT8_MULTIPLE * topology.cp))
            * FLOAT8_MULTIPLE
            * topology.cp
        )
        yield Problem(
            what,
            f"a multiple of {FLOAT8_MULTIPLE}, over which a weight's gradient is summed",
            f"--data.seq_len {rounded}   (or {leave_out})",
        )


def _lacking(device: str) -> str | None:
    """A description of the device, if it has no such products."""
    if device != "cuda":
        return f"a {device}"
    capability = torch.cuda.get_device_capability()
    return (
        None
        if capability >= _CAPABILITY
        else f"a device of capability {capability[0]}.{capability[1]}"
    )


def convert(model: PreTrainedModel, recipe: str, *, emulate: bool = False) -> tuple[str, str]:
    """Lets layers compute so, in place, before they are sharded or compiled; returns what was done, and why.

    Args:
        emulate: round as the kernels do and multiply in the type of the computation, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = layers_to_convert(model, recipe)
    settings: Any = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=emulate
    )
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name in names, config=settings
    )
    every = sum(isinstance(module, nn.Linear) for module in model.modules())
    return (
        f"float8 {recipe}: {len(names)} of {every} linear layers",
        "those whose sizes gain by it",
    )


def without(config: Config) -> Config:
    """The config for everything but training on CUDA: evaluations, probes, comparisons."""
    return config.changed(train={"float8": "none"})


def gather_in_8_bits(
    model: nn.Module, mesh: Mesh, recipe: str, *, offloaded: bool
) -> tuple[str, str]:
    """Lets weights of a sharded model be gathered so; returns what was done, and why.

    Scales are made before each forward: weights may have been changed in any way since the last.
    """
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_utils import amax_to_scale

    converted = [each for each in model.modules() if isinstance(each, Float8Linear)]
    why = _ROWWISE if recipe == "rowwise" else _OFFLOADED if offloaded else ""
    layers = [
        each for each in converted if not why and not each.weight.shape[0] % mesh.size("fsdp")
    ]

    @torch.no_grad()
    def scale(*call: Any) -> None:
        # In a forward after another, without a backward between them, weights may still be whole.
        parts = [
            each.weight._local_tensor for each in layers if isinstance(each.weight, DTensor)
        ]
        if not parts:
            return
        largest = torch.stack(torch._foreach_norm(parts, ord=math.inf))
        mesh.all_reduce("fsdp", largest, dist.ReduceOp.MAX)
        # Rounding keeps order: the largest number, rounded, is the largest of those rounded.
        for part, own in zip(parts, amax_to_scale(largest.bfloat16(), _WEIGHTS), strict=True):
            part.fsdp_pre_all_gather = partial(_rounded, own)
            part.fsdp_post_all_gather = _gathered

    model.register_forward_pre_hook(scale, prepend=True)
    return (
        f"float8 weights: {len(layers)} of {len(converted)} gathered in 8 bits",
        why or _ROUNDED,
    )


def _rounded(
    scale: Tensor, mesh: Any, size: Any, stride: Any, layer: Any, policy: Any
) -> tuple[Any, Any]:
    """The data sent for a shard, and the metadata that its receiver needs."""
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    rounded: Any = hp_tensor_and_scale_to_float8(
        layer.weight._local_tensor.bfloat16(), scale, _WEIGHTS
    )
    return (rounded._data,), (scale, layer.linear_mm_config)


def _gathered(
    numbers: tuple[Tensor], metadata: Any, dtype: torch.dtype, *, out: Any = None
) -> Any:
    """The weight of what was gathered; `out` already holds it, and gets its scale."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    scale, products = metadata
    if out is None:
        return Float8TrainingTensor(
            *numbers, scale, dtype, products, GemmInputRole.WEIGHT
        ), numbers
    out._scale = scale
