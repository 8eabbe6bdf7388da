"""The meaning of bfloat16: weights and buffers have the dtypes that transformers gives them, the same on every mesh.

A model in bfloat16 has float32 weights, of which FSDP2 gives each forward a copy in bfloat16 (one process keeps it:
`working_copy`), and sums the gradients in float32. What comes in between is transformers' own arithmetic, with no
further cast. Some tensors stay float32: those that transformers lists, and those that its layers take as float32
whatever the others are.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Decay and skip of state-space layers, attention sinks, the routers' balance: layers compute with them in float32.
_BY_NAME = (
    "A_log",
    "D",
    "dt_bias",
    "time_decay",
    "time_first",
    "sinks",
    "e_score_correction_bias",
)
# Listed by deepseek_v4 for float16 alone: it multiplies them by activations in the model's type.
_PRODUCTS = ("compressor",)
_LARGEST_ROUTER = 2**24


def kept_in_float32(model: PreTrainedModel) -> frozenset[str]:
    """Names of the parameters and buffers that stay float32; of a model that is whole yet, on the meta device."""
    strict = (*(model._keep_in_fp32_modules_strict or ()), *_BY_NAME)
    listed = tuple(model._keep_in_fp32_modules or ())
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    kept = {
        name
        for name in names
        if _has(name, strict) or (_has(name, listed) and not _has(name, _PRODUCTS))
    }
    for owner, router in _routers(model):
        if _computes_in_float32(router, model.config.get_text_config().hidden_size):
            kept |= {f"{owner}.{name}" for name, _ in router.named_parameters()}
    return frozenset(kept)


def narrow_buffers(model: PreTrainedModel, like: PreTrainedModel, kept: frozenset[str]) -> None:
    """Gives buffers the types that they have in `like`, the same architecture as transformers builds it in bfloat16."""
    types = {name: buffer.dtype for name, buffer in like.named_buffers()}
    for name, buffer in list(model.named_buffers()):
        if name not in kept and buffer.dtype != types[name]:
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = buffer.to(types[name])


def _has(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(rf"(^|\.){re.escape(each)}(\.|$)", name) for each in patterns)


def _routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose outputs transformers records as routers' logits, by their names."""
    kinds: set[Any] = set()
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get(
            "router_logits"
        ) or ()
        several = recorded if isinstance(recorded, list | tuple) else (recorded,)
        kinds |= {getattr(each, "target_class", each) for each in several}
    yield from (
        (name, module) for name, module in model.named_modules() if type(module) in kinds
    )


@torch.no_grad()
def _computes_in_float32(router: nn.Module, hidden_size: int) -> bool:
    """Whether its own forward takes float32 weights beside activations in bfloat16, and gives the same types then."""
    if sum(parameter.numel() for parameter in router.parameters()) > _LARGEST_ROUTER:
        return False
    buffers = {
        name: torch.zeros_like(each, device="cpu") for name, each in router.named_buffers()
    }

    def types(dtype: torch.dtype) -> list[torch.dtype]:
        own = {
            name: torch.zeros(each.shape, dtype=dtype)
            for name, each in router.named_parameters()
        }
        states = torch.zeros(4, hidden_size, dtype=torch.bfloat16)
        outputs = torch.func.functional_call(router, {**own, **buffers}, (states,))
        return [leaf.dtype for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]

    try:
        return types(torch.float32) == types(torch.bfloat16)
    except Exception:  # it multiplies them by the activations, or takes more than those
        return False
