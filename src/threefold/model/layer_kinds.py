"""Which layers of an architecture are alike, and its config with a few of them: the first of each kind.

Configs describe layers in many ways: a list with one entry per layer, a list of layer indices, a number of leading
or trailing layers, a period. Each is a trait; layers with equal traits are of one kind. Differences made only in code
(every fourth layer) show in the modules, whose classes and plain attributes differ.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import nn
from transformers import PretrainedConfig

Values: TypeAlias = dict[str, Any]

DEPTH = {
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_blocks",
    "num_layers_per_stack",
}
# Names in configs and models for the number of experts, and of those used per token.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
_MAX_LAYERS = 6
_MAX_KINDS, _MAX_LEADING = 8, 16
_NUMBER = re.compile(r"(layer|block)_?(idx|id|index|number|num)$")
_PERIOD_LAYERS = 4
_EACH_LAYER = re.compile(
    r"(layer_types|block_types?|attn_layers|attention_layers|indexer_types|no_rope_layers|intermediate_size|_per_layer"
    r"|layer_rope_theta|sparsity_pattern|moe_layer_freq|window_pattern)$"
)
_LAYER_NUMBERS = re.compile(
    r"(only_layers|moe_layers|attention_layers|layer_ids|_idxs|layer_indices)$"
)
_LEADING = {
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",
    "max_window_layers",
}
_PERIODS = {
    "decoder_sparse_step",
    "moe_layer_interval",
    "expert_layer_period",
    "moe_layer_freq",
}


def first_of(values: Values, names: set[str]) -> int | None:
    """The first number under one of the names."""
    return next(
        (values[name] for name in values if name in names and isinstance(values[name], int)),
        None,
    )


def common_number(config: PretrainedConfig, name: str) -> int | None:
    """A config's number; where its layers have their own, the greatest that divides them all; None if it has none."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        values = [
            getattr(config.per_layer_config[layer], name)
            for layer in range(config.num_hidden_layers)
        ]
        return math.gcd(*values) if all(isinstance(value, int) for value in values) else None
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def heads_of(config: PretrainedConfig) -> tuple[int, int] | None:
    """Attention heads, and heads of keys and values; None where they are not known."""
    text = config.get_text_config()
    heads = common_number(text, "num_attention_heads")
    if heads is None:
        return None
    shared = getattr(text, "multi_query", False)
    return heads, 1 if shared else common_number(text, "num_key_value_heads") or heads


def is_each_layer(name: str, value: Any) -> bool:
    """Whether a list can have an entry a layer, by its name."""
    return isinstance(value, list) and bool(_EACH_LAYER.search(name))


def kept_layers(values: Values) -> list[int]:
    """Numbers of the layers to keep: the first of each kind, two at least, and four if there is a period."""
    depth = first_of(values, DEPTH) or 0
    traits = [
        trait
        for name, value in values.items()
        if (trait := _trait(name, value, depth)) is not None
    ]
    kinds = list(zip(*traits, strict=True)) or [()] * depth
    kept = sorted({kinds.index(kind) for kind in set(kinds)})
    if len(kept) > _MAX_LAYERS:  # too many combinations: each trait's values at least
        seen: set[tuple[int, Any]] = set()
        kept = []
        for layer, kind in enumerate(kinds):
            if not seen.issuperset(enumerate(kind)):
                seen.update(enumerate(kind))
                kept.append(layer)
    periodic = any(isinstance(values.get(name), int) and values[name] > 1 for name in _PERIODS)
    others = [layer for layer in range(depth) if layer not in kept]
    return sorted(kept + others[: max(0, (_PERIOD_LAYERS if periodic else 2) - len(kept))])


def leading_layers(whole: Sequence[nn.Module], cut: Sequence[nn.Module]) -> int:
    """Number of a model's first layers that have all its kinds, if those of its cut config lack some; else 0.

    Args:
        whole, cut: the layers of both, in their order.
    """
    kinds = [_behaviour(layer) for layer in whole]
    first = [number for number, kind in enumerate(kinds) if kind not in kinds[:number]]
    lacking = len(first) > len({_behaviour(layer) for layer in cut})
    return (
        first[-1] + 1
        if lacking and len(first) <= _MAX_KINDS and first[-1] < _MAX_LEADING
        else 0
    )


def _behaviour(layer: nn.Module) -> str:
    """The classes and plain attributes of a layer and its modules, but for its own number."""
    return repr(
        [
            (
                name,
                type(module).__name__,
                sorted(
                    (key, value)
                    for key, value in vars(module).items()
                    if isinstance(value, int | float | str)
                    and not (key.startswith("_") or _NUMBER.search(key))
                ),
            )
            for name, module in layer.named_modules()
        ]
    )


def _trait(name: str, value: Any, depth: int) -> list[Any] | None:
    """The value of a key for each layer, comparable; None if the key is not about layers."""
    if is_each_layer(name, value) and len(value) == depth:
        return [repr(each) for each in value]
    if _are_layer_numbers(name, value):
        return [layer in value for layer in range(depth)]
    if name in _LEADING and isinstance(value, int):
        return [layer < value for layer in range(depth)]
    if name == "num_kv_shared_layers" and value:
        return [layer >= depth - value for layer in range(depth)]
    if name == "per_layer_config" and value:
        own = {int(layer): repr(each) for layer, each in value.items()}
        return [own.get(layer) for layer in range(depth)]
    return None


def cut_depth(name: str, value: Any, kept: list[int], depth: int) -> Any:
    """A key's value for the kept layers alone, of a config with `depth` layers."""
    if name in DEPTH and isinstance(value, int):
        return len(kept) if value == depth else min(value, 2)
    if is_each_layer(name, value) and len(value) == depth:
        return [value[layer] for layer in kept]
    if _are_layer_numbers(name, value):
        return [kept.index(layer) for layer in value if layer in kept]
    if name in _LEADING and isinstance(value, int):
        return sum(layer < value for layer in kept)
    if name == "num_kv_shared_layers" and value:
        return sum(layer >= depth - value for layer in kept)
    if name == "moe_layer_end_index" and isinstance(value, int):
        return len(kept) - 1
    if name in _PERIODS and isinstance(value, int):
        return min(value, 2)
    if name == "per_layer_config" and value:
        own = {int(layer): each for layer, each in value.items()}
        return {kept.index(layer): own[layer] for layer in sorted(own) if layer in kept}
    return value


def _are_layer_numbers(name: str, value: Any) -> bool:
    return (
        bool(_LAYER_NUMBERS.search(name))
        and isinstance(value, list)
        and all(isinstance(n, int) for n in value)
    )
