"""Which attention a model uses: ours, or its own; and which of torch's fused kernels computes ours without a mask.

Most architectures ask transformers' attention interface for a function by name; they get ours, and boolean masks.
The others compute attention in their own layers (bloom, falcon, gpt_neo), derive a mask from the one passed to them
(deepseek_v4, for keys that it adds), or add a term that ours does not know (inkling). These keep their own attention,
and take the same masks as numbers to add to the scores. Their layers see the keys that they hold, so cp ranks cannot
split their rows.

`scaled_dot_product_attention` tries its kernels in a fixed order, flash first. Here the order is a reasoned choice, by
device, type and size; a kernel that cannot serve a call is skipped, so the choice affects time and never the result.
"""

import copy
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedModel

from threefold.model.layer_kinds import common_number
from threefold.plan.families import FAMILIES

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_EAGER = ("module", "query", "key", "value")
# Further arguments of architectures' own attention functions that ours supports.
_KNOWN = {
    *_EAGER,
    "attention_mask",
    "scaling",
    "dropout",
    "softcap",
    "s_aux",
    "sliding_window",
    "kwargs",
}
_DERIVED_MASK = re.compile(
    r"\battention_mask = ([^\n]*|[\w.]+\([^()]*)\battention_mask\b|attention_mask=(?!attention_mask\b|None\b)\w"
)
_OF_TRANSFORMERS = ("eager", "sdpa")  # names for which a layer derives a mask, and for no other
_JOINED_KEYS = re.compile(
    r"\battention_mask = ((torch\.cat|F\.pad)\(|[\w.]+\([^()]*\bposition_ids\b)"
)
# The head sizes that flash and cuDNN have, the latter's backward included.
_FLASH_HEAD, _CUDNN_HEAD = 256, 128
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def drops_weights(config: PretrainedConfig) -> bool:
    """Whether the model drops attention weights in training."""
    return bool(getattr(config.get_text_config(), "attention_dropout", 0.0))


def own_attention(model: nn.Module) -> str | None:
    """Why a model must keep its own attention; None if all its attention is asked for by name."""
    asking = list(_asking(model))
    for kind, method in asking:
        if _OF_TRANSFORMERS in method.__code__.co_consts or _DERIVED_MASK.search(
            inspect.getsource(method)
        ):
            return f"{kind.__name__} derives a mask of its own from the one that it is given"
        if added := _added_terms(method):
            return f"{kind.__name__} adds {added} to the scores"
    return None if asking else f"{type(model).__name__} computes attention in layers of its own"


def asks_for_attention(model: nn.Module) -> bool:
    """Whether any layer of it asks for attention by name."""
    return next(_asking(model), None) is not None


def layer_with_joined_keys(model: nn.Module) -> str | None:
    """The class of a layer that adds keys for several tokens of a row, or picks blocks of keys by places in the row."""
    return next(
        (
            kind.__name__
            for kind, how in _asking(model)
            if _JOINED_KEYS.search(inspect.getsource(how))
        ),
        None,
    )


def _asking(model: nn.Module) -> Iterator[tuple[type, Any]]:
    """The classes of the model's layers with their methods that ask for attention by name."""
    for kind in {
        type(module)
        for module in text_modules(model)
        if not isinstance(module, PreTrainedModel)
    }:
        yield from (
            (kind, method) for method in methods(kind) if _INTERFACE in method.__code__.co_names
        )


def text_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that tokens run through: not those of models inside that read images or sounds."""
    yield model
    for child in model.children():
        # A wrapper (bart's) passes on whatever it is given.
        kind: Any = type(child)
        if not isinstance(child, PreTrainedModel) or {"input_ids", "args"} & arguments_of(kind):
            yield from text_modules(child)


@cache
def arguments_of(kind: type[nn.Module]) -> frozenset[str]:
    """The names of what the forward of a module's class takes."""
    return frozenset([*inspect.signature(kind.forward).parameters][1:])


def methods(kind: type) -> Iterator[Any]:
    """The functions of a class and of its bases, as they were written; not those of torch and of all models."""
    for owner in kind.__mro__:
        if owner is PreTrainedModel or owner.__module__.startswith("torch."):
            return
        for each in vars(owner).values():
            method = inspect.unwrap(each) if callable(each) else each
            if inspect.isfunction(method):
                yield method


def _added_terms(method: Any) -> str:
    """Arguments of the attention function beside a layer that ours does not support."""
    near = (method.__globals__.get(name) for name in method.__code__.co_names)
    takes = [[*inspect.signature(each).parameters] for each in near if inspect.isfunction(each)]
    terms = {name for names in takes if tuple(names[:4]) == _EAGER for name in names} - _KNOWN
    return ", ".join(sorted(terms))


def use(model: PreTrainedModel, name: str) -> None:
    """Lets a model that was built with eager attention take masks, and attention unless it keeps its own, by `name`."""
    if own_attention(model) is None:
        for config in _configs(model, nn.Module):
            config._attn_implementation = name
        return
    # Masks are made by the models inside, under the name in their config; their layers read the config they were given.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config = copy.deepcopy(module.config)
    for config in _configs(model, PreTrainedModel):
        config._attn_implementation = name


def _configs(model: nn.Module, kind: type[nn.Module]) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, kind) and isinstance(
            getattr(module, "config", None), PretrainedConfig
        ):
            yield module.config


def head_size(config: PretrainedConfig) -> int | None:
    """The size of a query and of a key of one head; None if the config does not say."""
    text = config.get_text_config()
    names = (
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "head_dim",
        "hidden_size",
        "num_attention_heads",
    )
    nope, rope, own, hidden, heads = (common_number(text, name) for name in names)
    if nope is not None and rope is not None:
        return nope + rope
    return hidden // heads if own is None and hidden and heads else own


def choose(
    capability: tuple[int, int],
    *,
    dtype: str,
    head_dim: int,
    halved: bool,
    deterministic: bool = False,
) -> tuple[str, str]:
    """(`cudnn`, `flash` or `efficient`, why) for causal attention on a CUDA device.

    Args:
        capability: of the device, as torch gives it.
        dtype: that attention computes in, `bfloat16` or `float32`.
        head_dim: of a query and a key.
        halved: queries are two chunks of a row, each over the keys up to its end (cp ranks that gather keys).
        deterministic: every call must give the same bits.
    """
    if dtype == "float32":
        return "efficient", "flash and cuDNN have no float32"
    if head_dim > _FLASH_HEAD or capability < (8, 0):
        limit = (
            f"heads of {head_dim}"
            if head_dim > _FLASH_HEAD
            else f"capability {capability[0]}.{capability[1]}"
        )
        return "efficient", f"flash and cuDNN do not serve {limit}"
    if halved:
        return (
            "flash",
            "its causal order ends at the last key, as that of a chunk of a row does",
        )
    if deterministic:
        return (
            "flash",
            "its backward can give the same bits every time, which cuDNN's cannot (pytorch#182551)",
        )
    if capability[0] != 9:
        return (
            "flash",
            f"cuDNN is faster on capability 9 only; this is {capability[0]}.{capability[1]}",
        )
    if head_dim > _CUDNN_HEAD or head_dim % 8:
        return "flash", f"cuDNN's backward does not serve heads of {head_dim}"
    return (
        "cudnn",
        "1.7 to 2.3 times as fast as flash on capability 9, by transformers' measurements (#48163)",
    )


@contextmanager
def first(kernel: str) -> Iterator[None]:
    """Inside, in forward and in backward, `cudnn` is tried first; the others keep torch's order."""
    if kernel != "cudnn":
        yield
        return
    with sdpa_kernel(_CUDNN_FIRST, set_priority=True):
        yield


def unserved(config: PretrainedConfig) -> str:
    """Parts of a model that attention by lengths does not compute, or may not; empty if it computes all."""
    family = FAMILIES.get(config.get_text_config().model_type)
    head_dim = head_size(config)
    if not family or family.written_out:
        return "its layers ask for more than plain attention, or are not known by name"
    return (
        ""
        if head_dim in range(8, _FLASH_HEAD + 1, 8)
        else f"flash does not serve heads of {head_dim}"
    )
