"""An architecture's config at reduced depth and width, which keeps every kind of layer, head and position that it has.

Such a model costs milliseconds and behaves like the large one: results of its probes show what a mesh does to the
architecture. Sizes are found by their names in configs, in any class; a key with an unrelated name keeps its value.
"""

import re
from collections.abc import Callable, Sequence
from math import gcd, lcm
from typing import Any

from transformers import PretrainedConfig

from threefold.model.layer_kinds import (
    DEPTH,
    Values,
    cut_depth,
    first_of,
    is_each_layer,
    kept_layers,
)

VOCABULARY = 131  # odd, so that no mesh divides it
# Length of sliding windows and chunks: shorter than a row, and no multiple of a rank's part.
WINDOW = 7
_HEAD_DIM = 16

_HIDDEN = {"hidden_size", "n_embd", "d_model", "emb_dim", "embedding_dim", "dim_model"}
_HEADS = {
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "num_decoder_attention_heads",
    "num_encoder_attention_heads",
    "swa_num_attention_heads",
    "num_attention_heads_per_layer",
}
_KV_HEADS = {
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "kv_n_heads",
    "multi_query_group_num",
    "swa_num_key_value_heads",
    "num_query_groups",
}
_EXPERTS = {
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "zero_expert_num",
    "num_moe_experts",
}
_PICKED = {
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
    "num_selected_experts",
    "moe_router_topk",
}
_POSITIONS = {
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "context_length",
    "model_max_length",
    "max_source_positions",
    "seq_length",
    "max_sequence_length",
}
_WINDOWS = {
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "attention_window_size",
    "local_attention",
    "attention_chunk_size",
    "keep_window_size",
    "index_topk",
    "local_attention_window_len",
}
# Keys for the position in a row or document from which queries are scaled by position.
_FLOORS = {"floor_scale", "log_scaling_n_floor"}
_SIZE = re.compile(
    r"(hidden_size|intermediate_size|_dim|heads|vocab\w*|_id|_rank|layers|experts\w*|theta|base|_width)$"
)
_INITIALIZERS = ("initializer_range", "init_std")
_VOCABULARY = re.compile(r"(^|_)vocab(_size|$)")
# Counts that are small also in a model at its real width.
_COUNTS = _EXPERTS | _PICKED | {"n_group", "num_expert_group", "topk_group"}
_NOISE = re.compile(r"(dropout|pdrop|layerdrop|jitter|mask_(time|feature)_prob)")
_FEED_FORWARD = re.compile(
    r"(intermediate_size|ffn_dim|n_inner|d_inner|dff|dim_ff|feed_forward_size|ffn_hidden_size)"
)


def reduced(
    config: PretrainedConfig,
    *,
    ranks: int = 1,
    seq_len: int = 32,
    real_seq_len: int = 32,
    leading: int = 0,
) -> PretrainedConfig:
    """A copy of an architecture's config with 2 to 4 layers, of each kind that it has at least one, and small widths.

    Heads, key-value heads, experts and the widths between them share the divisors with `ranks` that the real ones have.
    Windows and chunks are shorter than `seq_len`, and a rotary embedding that changes with the length changes inside
    of it. Nothing is random but the weights: every dropout is 0.

    Args:
        ranks: that heads, experts or widths are divided among, over all axes that divide them.
        seq_len: tokens of a row.
        real_seq_len: tokens of a row of the real model: what begins inside it begins inside `seq_len` too.
        leading: number of its first layers that are also kept.
    """
    values = _ReducedSizes(
        config, ranks, leading, seq_len=seq_len, real_seq_len=real_seq_len
    ).values()
    for name, part in vars(config).items():
        if isinstance(part, PretrainedConfig):
            values[name] = reduced(
                part, ranks=ranks, seq_len=seq_len, real_seq_len=real_seq_len, leading=leading
            ).to_dict()
    _OWN.get(config.model_type, lambda values: None)(values)
    return type(config).from_dict(values)


def shallow(config: PretrainedConfig, *, ranks: int = 1, leading: int = 0) -> PretrainedConfig:
    """A copy with the layers of `reduced`, a small vocabulary and few experts; every other size is the real one."""
    values = _RealSizes(config, ranks, leading).values()
    for name, part in vars(config).items():
        if isinstance(part, PretrainedConfig):
            values[name] = shallow(part, ranks=ranks, leading=leading).to_dict()
    # Architectures whose configs place layers by counts or periods.
    if config.model_type in ("dory", "jamba", "zamba", "zamba2"):
        _OWN[config.model_type](values)
    return type(config).from_dict(values)


def lengths_of(config: PretrainedConfig) -> list[int]:
    """The numbers of a config, nested ones too, that a place in a row may be compared with: no sizes, no tokens."""
    return sorted(
        {
            number
            for name, value in config.get_text_config().to_dict().items()
            for number in _numbers(name, value)
            if number > 1
        }
    )


def _numbers(name: str, value: Any) -> list[int]:
    if isinstance(value, dict):
        return [number for own, part in value.items() for number in _numbers(own, part)]
    if isinstance(value, list):
        return [number for part in value for number in _numbers(name, part)]
    if isinstance(value, bool) or not isinstance(value, int | float) or _SIZE.search(name):
        return []
    return [int(value)] if float(value).is_integer() else []


def same_divisors(real: int, of: int, *, least: int) -> int:
    """The smallest number from `least` on that has the same greatest common divisor with `of` as the real one."""
    shared = gcd(real, of)
    return next(
        size for size in range(max(least, 1), least + 2 * of + 1) if gcd(size, of) == shared
    )


class _ReducedSizes:
    """The reduced values of one config, of which each depends on a few found before it."""

    def __init__(
        self,
        config: PretrainedConfig,
        ranks: int,
        leading: int,
        *,
        seq_len: int = 0,
        real_seq_len: int = 0,
    ) -> None:
        self._ranks = ranks
        self._seq_len, self._real_seq_len = seq_len, real_seq_len
        self._real: Values = {
            name: value
            for name, value in config.to_dict().items()
            if not isinstance(vars(config).get(name), PretrainedConfig)
        }
        first = range(min(leading, first_of(self._real, DEPTH) or 0))
        self._layers = sorted({*kept_layers(self._real), *first})
        kv_heads = first_of(self._real, _KV_HEADS)
        heads = first_of(self._real, _HEADS) or kv_heads or 4
        self._heads, self._kv_heads = self._head_pair(heads, kv_heads or heads)
        self._real_hidden = first_of(self._real, _HIDDEN) or 0
        # CUDA's kernels of flex attention take no smaller heads.
        self._hidden = self._heads * _HEAD_DIM
        self._real_head = self._real_hidden // heads
        self._tokens: dict[int, int] = {}

    def values(self) -> Values:
        small = {name: self._reduced(name, value) for name, value in self._real.items()}
        depth = first_of(self._real, DEPTH) or 0
        small = {
            name: cut_depth(name, value, self._layers, depth) for name, value in small.items()
        }
        for layer, own in (small.get("per_layer_config") or {}).items():
            small["per_layer_config"][layer] = self._own_sizes(own)
        self._fit_heads(small)
        self._fit_positions(small)
        return small

    def _head_pair(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """(query heads, key-value heads): all the same, in groups, or one of them for all, as the real ones are."""
        if heads <= kv_heads:
            return (same := same_divisors(heads, self._ranks, least=min(heads, 4))), same
        kv = 1 if kv_heads == 1 else same_divisors(kv_heads, self._ranks, least=2)
        shared = gcd(heads, self._ranks)
        groups = range(2 if kv > 1 else 3, 3 + 2 * self._ranks)
        return kv * next(
            (group for group in groups if gcd(kv * group, self._ranks) == shared), 2
        ), kv

    def _reduced(self, name: str, value: Any) -> Any:
        if (
            _NOISE.search(name)
            and isinstance(value, int | float)
            and not isinstance(value, bool)
        ):
            return type(value)(0)
        if isinstance(value, float) and name in _INITIALIZERS:
            return 0.1
        if name == "use_cache":
            return False
        if re.search(r"token_(id|index)$", name):
            return self._token(value)
        if is_each_layer(name, value):
            return [self._size(name, each) for each in value]
        return self._size(name, value)

    def _token(self, value: Any) -> Any:
        """A special token inside the vocabulary; different ones stay different."""
        if isinstance(value, list):
            return [self._token(each) for each in value]
        if not isinstance(value, int) or value < VOCABULARY // 2:
            return value
        return self._tokens.setdefault(value, VOCABULARY - 1 - len(self._tokens))

    def _size(self, name: str, value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            return value
        return next((size(value) for fits, size in self._rules() if fits(name)), value)

    def _rules(self) -> Sequence[tuple[Callable[[str], Any], Callable[[int], int]]]:
        ranks, hidden = self._ranks, self._hidden
        return (
            (_HIDDEN.__contains__, lambda value: hidden),
            (
                _HEADS.__contains__,
                lambda value: self._head_pair(value, first_of(self._real, _KV_HEADS) or value)[
                    0
                ],
            ),
            (_KV_HEADS.__contains__, lambda value: self._kv_heads),
            (
                _EXPERTS.__contains__,
                lambda value: value if value < 4 else same_divisors(value, ranks, least=4),
            ),
            (_PICKED.__contains__, lambda value: min(value, 2)),
            (_WINDOWS.__contains__, lambda value: min(value, WINDOW)),
            (
                _FLOORS.__contains__,
                lambda value: min(value, WINDOW) if value <= self._real_seq_len else value,
            ),
            (_POSITIONS.__contains__, lambda value: max(2 * self._seq_len, 64)),
            (_VOCABULARY.search, lambda value: min(VOCABULARY, value)),
            (
                re.compile(r"(moe|expert|shared)\w*(intermediate|hidden)_size$").search,
                self._width(32),
            ),
            (_FEED_FORWARD.search, self._width(96)),
            (
                re.compile(
                    r"(embedding_size|embed_dim|proj_dim|hidden_size\w*|_width|_d_ssm)$"
                ).search,
                self._like_hidden,
            ),
            (re.compile(r"q_lora_rank$").search, lambda value: 24),
            (re.compile(r"kv_lora_rank$").search, lambda value: 16),
            (re.compile(r"(_rank|_lowrank)$").search, lambda value: min(value, 8)),
            (re.compile(r"qk_rope_head_dim$").search, lambda value: _HEAD_DIM // 2),
            (re.compile(r"(nope_head_dim|v_head_dim)$").search, lambda value: _HEAD_DIM),
            (
                re.compile(
                    r"(head_dim|_headdim|_d_head|kv_channels|d_head|dim_head|head_size)$"
                ).search,
                self._head_dim,
            ),
            (re.compile(r"(state|state_size)$").search, lambda value: min(value, _HEAD_DIM)),
            (re.compile(r"chunk_size$").search, lambda value: min(value, 8)),
            (
                re.compile(r"^(n_group|num_expert_group|n_groups|\w+_n_?groups)$").search,
                lambda value: min(value, 2),
            ),
            (re.compile(r"^topk_group$").search, lambda value: 1),
            (re.compile(r"shared_experts$").search, lambda value: min(value, 2)),
            # With few heads, all could score a key exactly zero, and the choice of keys would be chance.
            (re.compile(r"(index_n_heads|indexer_n_heads)$").search, self._divided(16)),
            (re.compile(r"mamba_num_heads$").search, self._divided(4)),
            (re.compile(r"linear_num_(key_)?heads$").search, self._divided(2)),
            (re.compile(r"linear_num_value_heads$").search, self._value_heads),
            (
                re.compile(r"(dim|size|width)$").search,
                lambda value: hidden if value == self._real_hidden else value,
            ),
        )

    def _width(self, base: int) -> Callable[[int], int]:
        # Kernels want their rows aligned to 16 numbers, wherever the real ones are.
        return lambda value: same_divisors(value, lcm(self._ranks, 16), least=base)

    def _divided(self, least: int) -> Callable[[int], int]:
        return lambda value: same_divisors(value, self._ranks, least=min(least, value))

    def _value_heads(self, value: int) -> int:
        """Heads of the values in linear attention: each key head serves one of them, or several."""
        real = self._real.get("linear_num_key_heads") or value
        return self._divided(2)(real) * (1 if real == value else 2)

    def _like_hidden(self, value: int) -> int:
        """A width that equals the hidden size, is smaller or larger."""
        real = self._real_hidden
        return self._hidden * (value // real) if value >= real > 0 else self._hidden // 2

    def _head_dim(self, value: int) -> int:
        if value == self._real_head:
            return self._hidden // self._heads
        return 2 * _HEAD_DIM if value > self._real_head > 0 else _HEAD_DIM

    def _own_sizes(self, own: Values) -> Values:
        """One layer's own values, in proportion to the whole model's."""
        sizes: Values = {}
        for name, value in own.items():
            base = self._size(name, self._real.get(name))
            real = self._real.get(name)
            numbers = (
                isinstance(value, int) and isinstance(real, int) and not isinstance(value, bool)
            )
            sizes[name] = (
                max(1, base * value // real) if numbers and real else self._size(name, value)
            )
        return sizes

    def _fit_heads(self, small: Values) -> None:
        """Latent attention: a head's width is the sum of two, and `head_dim` can mean one of them."""
        rope = self._real.get("qk_rope_head_dim")
        nope = self._real.get("qk_nope_head_dim")
        if isinstance(rope, int) and isinstance(small.get("head_dim"), int):
            small["head_dim"] = (
                max(1, self._real["head_dim"] // rope) * small["qk_rope_head_dim"]
            )
        if (
            isinstance(rope, int)
            and isinstance(nope, int)
            and self._real.get("qk_head_dim") == rope + nope
        ):
            small["qk_head_dim"] = small["qk_rope_head_dim"] + small["qk_nope_head_dim"]
            if self._real.get("head_dim") == rope + nope:
                small["head_dim"] = small["qk_head_dim"]
        if isinstance(rotary := self._real.get("rotary_dim"), int):
            real = self._real.get("head_dim") or self._real_head
            head = small.get("head_dim") or self._hidden // self._heads
            small["rotary_dim"] = head if rotary >= real else head // 2

    def _fit_positions(self, small: Values) -> None:
        """Positions that a rotary embedding was first trained for: half a row, so that both of its regimes are met."""
        head = (
            small.get("qk_rope_head_dim")
            or small.get("head_dim")
            or self._hidden // self._heads
        )
        share = small.get("partial_rotary_factor") or 1.0
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(small.get(name), dict):
                small[name] = self._rope(small[name], head=head, share=share)
        if isinstance(small.get("original_max_position_embeddings"), int):
            small["original_max_position_embeddings"] = self._seq_len // 2

    def _rope(self, values: Values, *, head: int, share: float) -> Values:
        share = values.get("partial_rotary_factor") or share
        pairs = max(1, int(head * share) // 2)
        cut: Values = {}
        for name, value in values.items():
            if isinstance(value, dict):
                value = self._rope(value, head=head, share=share)
            elif name == "original_max_position_embeddings" and value:
                value = self._seq_len // 2
            elif name in ("short_factor", "long_factor") and isinstance(value, list):
                value = [value[place * len(value) // pairs] for place in range(pairs)]
            elif name == "mrope_section" and isinstance(value, list):
                value = _sections(value, pairs)
            cut[name] = value
        return cut


class _RealSizes(_ReducedSizes):
    """The sizes of a config, except for depth, vocabulary and number of experts."""

    def values(self) -> Values:
        depth = first_of(self._real, DEPTH) or 0
        small = {name: self._reduced(name, value) for name, value in self._real.items()}
        return {
            name: cut_depth(name, value, self._layers, depth) for name, value in small.items()
        }

    def _reduced(self, name: str, value: Any) -> Any:
        return value if name in _INITIALIZERS else super()._reduced(name, value)

    def _size(self, name: str, value: Any) -> Any:
        return (
            super()._size(name, value) if name in _COUNTS or _VOCABULARY.search(name) else value
        )


def _sections(real: list[int], pairs: int) -> list[int]:
    """Sections of a rotary embedding, in proportion to the real ones and `pairs` wide together."""
    sizes = [part * pairs // sum(real) for part in real]
    sizes[0] += pairs - sum(sizes)
    return sizes


def _dory(values: Values) -> None:
    values.update(
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        n_input_layers=1,
        n_recurrent_layers=2,  # which are run twice
        n_output_layers=1,
    )


def _jamba(values: Values) -> None:
    values.update(
        attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2, expert_layer_offset=1
    )
    values.update(num_hidden_layers=4, mamba_dt_rank=4)


def _mamba(values: Values) -> None:
    values.update(intermediate_size=values["expand"] * values["hidden_size"], time_step_rank=4)


def _mamba2(values: Values) -> None:
    values.update(
        head_dim=_HEAD_DIM, num_heads=values["expand"] * values["hidden_size"] // _HEAD_DIM
    )


def _bamba(values: Values) -> None:
    inner = values.get("mamba_d_ssm") or values["mamba_expand"] * values["hidden_size"]
    values.update(mamba_d_head=_HEAD_DIM, mamba_n_heads=inner // _HEAD_DIM)


def _dbrx(values: Values) -> None:
    values["ffn_config"]["hidden_size"] = values["d_model"]
    values["attn_config"]["kv_n_heads"] = values["num_key_value_heads"]


def _zamba(values: Values) -> None:
    kinds = ["linear_attention", "hybrid"] * 2  # every hybrid layer has the same attention
    values.update(layers_block_type=kinds, hybrid_layer_ids=[1, 3], num_hidden_layers=4)
    if "mamba_headdim" in values:
        values["mamba_headdim"] = (
            values["mamba_expand"] * values["hidden_size"] // values["n_mamba_heads"]
        )


def _reformer(values: Values) -> None:
    # Exactly those of a row.
    hidden = values["hidden_size"]
    positions = values["max_position_embeddings"] // 2
    values.update(max_position_embeddings=positions, axial_pos_shape=[4, positions // 4])
    values.update(axial_pos_embds_dim=[hidden // 4, hidden - hidden // 4])
    values.update(local_attn_chunk_length=8, lsh_attn_chunk_length=8)


def _dots3_note(values: Values) -> None:
    for part in ("vision_config", "audio_config"):
        values[part]["adapter_out_dim"] = values["text_config"]["hidden_size"]


def _qwen4_exp(values: Values) -> None:
    if values["indexer_budget"] is not None:
        values["indexer_budget"] = 2 * values["indexer_compress_ratio"]


def _blt(values: Values) -> None:
    whole = values["global_config"]
    whole["hidden_size"] = values["encoder_config"]["hidden_size"] * values["cross_attn_k"]
    whole["head_dim"] = whole["hidden_size"] // whole["num_attention_heads"]


# Facts that names alone do not show.
_OWN: dict[str, Callable[[Values], None]] = {
    "dory": _dory,
    "jamba": _jamba,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _bamba,
    "granitemoehybrid": _bamba,
    "blt": _blt,
    "dbrx": _dbrx,
    "dots3_note": _dots3_note,
    "qwen4_exp_text": _qwen4_exp,
    "zamba": _zamba,
    "zamba2": _zamba,
    "reformer": _reformer,
}
