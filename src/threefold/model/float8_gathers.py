"""Weights of converted layers, gathered by FSDP2 in 8 bits.

A shard is rounded before it is sent, by the scale of the whole weight, as each rank would round the gathered weight:
what a layer computes is the same, bit for bit. The largest numbers of all weights take one all-reduce before a forward.
Parameters stay plain float32 shards, for optimizers, checkpoints and averages. What is gathered of them is asked of
their local tensors (`fsdp_pre_all_gather`), as FSDP2 asks tensors of a class of their own.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from threefold.mesh.mesh import Mesh

_WEIGHTS = torch.float8_e4m3fn
_ROUNDED = "rounded before they are sent, by scales of whole weights; of others the shards do not divide the rows"
_ROWWISE = (
    "rows and columns are scaled by themselves, for which a rank needs the weight in bfloat16"
)
_OFFLOADED = "FSDP2 asks nothing of shards that it fetches from the host"


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
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.group("fsdp"))
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
    """What is sent of a shard, and what its receiver has to know."""
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    rounded: Any = hp_tensor_and_scale_to_float8(
        layer.weight._local_tensor.bfloat16(), scale, _WEIGHTS
    )
    return (rounded._data,), (scale, layer.linear_mm_config)


def _gathered(
    numbers: tuple[Tensor], known: Any, dtype: torch.dtype, *, out: Any = None
) -> Any:
    """The weight of what was gathered; `out` has it already, and is given its scale."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    scale, products = known
    if out is None:
        return Float8TrainingTensor(
            *numbers, scale, dtype, products, GemmInputRole.WEIGHT
        ), numbers
    out._scale = scale
