"""Facts about architectures by their model_type alone: all else is read from their config or their classes.

A family is a row: which projections have biases, which norms there are, default weight tying, default targets of
adapters. Sizes come from the config. Parameters of every row are compared with transformers' own modules
(`tests/unit/test_decoder.py`).
"""

from typing import NamedTuple


class Key(NamedTuple):
    """A key of the config, and its value where the config leaves it out."""

    name: str
    default: bool


class Family(NamedTuple):
    """One row.

    Attributes:
        qkv_bias, o_bias, mlp_bias, head_bias: of attention's projections, of its output's, of the MLP's, of the head.
        mlp: `gated` (gate, up and down), `fused` (gate and up in one), or `plain` (up and down).
        norm: `rms`, `rms_float32` (multiplied by its weight in float32), `layer` (weight and bias), `layer_no_bias`,
            or `none` (no parameters).
        num_norms: of a layer, over the hidden states.
        qk_norm: of queries and keys: `head`, over a head; `all`, over all heads; `each`, a weight for each head.
        kv_heads, head_dim: where the config has none; None: as many as heads, hidden size / heads.
        tied: whether the head is the embedding, where the config does not say.
        sliding: `all` layers have the window, those of `layer_types`, or `none`.
        full_every: where there are no layer_types, every n-th layer sees all keys.
        experts, expert_width: the keys of their number and width; empty: there are none.
        expert_bias, sinks: biases of experts and router; a sink for each head.
        float32_routing: what weighs the experts' results is float32 whatever the model's type is.
        written_out: attention is computed operator by operator (caps, sinks), which keeps all of its scores.
        fused_qkv: query, key and value are one projection.
        plan: whether tp splits it as Llama: by columns and rows, nothing else.
        adapted: the projections that peft adapts where none are named; empty: not known.
    """

    qkv_bias: Key | bool = False
    o_bias: Key | bool = False
    mlp_bias: Key | bool = False
    head_bias: Key | bool = False
    mlp: str = "gated"
    norm: str = "rms"
    num_norms: int = 2
    qk_norm: str = ""
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    sliding: str = "none"
    full_every: int = 0
    experts: str = ""
    expert_width: str = ""
    expert_bias: bool = False
    sinks: bool = False
    float32_routing: bool = False
    written_out: bool = False
    fused_qkv: bool = False
    plan: bool = True
    adapted: tuple[str, ...] = ()


_QV = ("q_proj", "v_proj")
_ATTENTION = Key("attention_bias", False)
_MLP = Key("mlp_bias", False)
_LLAMA = Family(qkv_bias=_ATTENTION, o_bias=_ATTENTION, mlp_bias=_MLP)
_GLM = Family(
    qkv_bias=Key("attention_bias", True), mlp="fused", kv_heads=2, head_dim=128, plan=False
)
_GEMMA = Family(
    qkv_bias=_ATTENTION,
    o_bias=_ATTENTION,
    norm="rms_float32",
    head_dim=256,
    tied=True,
    plan=False,
    adapted=_QV,
)
_COHERE = Family(
    qkv_bias=_ATTENTION,
    o_bias=_ATTENTION,
    norm="layer_no_bias",
    num_norms=1,
    tied=True,
    plan=False,
)
_OLMO2 = Family(
    qkv_bias=_ATTENTION, o_bias=_ATTENTION, norm="rms_float32", qk_norm="all", plan=False
)

FAMILIES = {
    "llama": _LLAMA._replace(adapted=_QV),
    "mistral": Family(kv_heads=8, sliding="all", adapted=_QV),
    "ministral3": Family(kv_heads=8, head_dim=128, sliding="all"),
    "qwen2": Family(qkv_bias=True, kv_heads=32, sliding="layer_types", adapted=_QV),
    "qwen3": Family(
        qkv_bias=_ATTENTION, o_bias=_ATTENTION, qk_norm="head", kv_heads=32, head_dim=128, sliding="layer_types",
        adapted=_QV,
    ),
    "arcee": _LLAMA._replace(mlp="plain", plan=False),
    "cohere": _COHERE._replace(qk_norm="each"),
    "cohere2": _COHERE._replace(sliding="layer_types", full_every=4),
    "cwm": Family(sliding="layer_types"),
    "ernie4_5": Family(
        *(Key("use_bias", False),) * 3, kv_heads=2, head_dim=128, tied=True, plan=False
    ),
    "exaone4": Family(norm="rms", qk_norm="head", kv_heads=32, sliding="layer_types", full_every=4, plan=False),
    "gemma": _GEMMA._replace(kv_heads=16),
    "gemma2": _GEMMA._replace(kv_heads=4, num_norms=4, sliding="layer_types", full_every=2, written_out=True),
    "gemma3_text": _GEMMA._replace(kv_heads=4, num_norms=4, qk_norm="head", sliding="layer_types", full_every=6),
    "glm": _GLM,
    "glm4": _GLM._replace(num_norms=4),
    "granite": _LLAMA._replace(plan=False),
    "helium": Family(qkv_bias=_ATTENTION, mlp_bias=_MLP, kv_heads=20, head_dim=128, plan=False),
    "hunyuan_v1_dense": _LLAMA._replace(mlp_bias=False, qk_norm="head", plan=False),
    "nemotron": _LLAMA._replace(mlp="plain", norm="layer", plan=False),
    "olmo": Family(qkv_bias=_ATTENTION, o_bias=_ATTENTION, norm="none", plan=False),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(sliding="layer_types", full_every=4),
    "phi": Family(
        True, True, True, True, mlp="plain", norm="layer", num_norms=1, plan=False, adapted=(*_QV, "fc1", "fc2")
    ),
    "phi3": Family(mlp="fused", fused_qkv=True, sliding="all", plan=False),
    "seed_oss": Family(
        qkv_bias=Key("attention_bias", True), o_bias=Key("attention_out_bias", False), mlp_bias=_MLP,
        kv_heads=8, head_dim=128, plan=False,
    ),
    "smollm3": _LLAMA._replace(kv_heads=4, tied=True, sliding="layer_types"),
    "stablelm": Family(qkv_bias=Key("use_qkv_bias", False), norm="layer", kv_heads=32, plan=False, adapted=_QV),
    "starcoder2": Family(
        *(Key("use_bias", True),) * 3, mlp="plain", norm="layer", kv_heads=2, tied=True, sliding="all", plan=False
    ),
    # Of experts.
    "mixtral": Family(
        kv_heads=8, sliding="all", experts="num_local_experts", expert_width="intermediate_size", float32_routing=True
    ),
    "qwen2_moe": Family(
        qkv_bias=Key("qkv_bias", True), kv_heads=16, sliding="layer_types",
        experts="num_experts", expert_width="moe_intermediate_size", plan=False,
    ),
    "qwen3_moe": Family(
        qkv_bias=_ATTENTION, o_bias=_ATTENTION, qk_norm="head", kv_heads=4,
        experts="num_experts", expert_width="moe_intermediate_size",
    ),
    "olmoe": Family(
        qkv_bias=_ATTENTION, o_bias=_ATTENTION, qk_norm="all", experts="num_experts", expert_width="intermediate_size",
        plan=False,
    ),
    "gpt_oss": Family(
        Key("attention_bias", True), Key("attention_bias", True), kv_heads=8, head_dim=64, sliding="layer_types",
        full_every=2, experts="num_local_experts", expert_width="intermediate_size", expert_bias=True, sinks=True,
        written_out=True, plan=False,
    ),
    "granitemoe": Family(
        qkv_bias=_ATTENTION, o_bias=_ATTENTION, experts="num_local_experts", expert_width="intermediate_size",
        plan=False,
    ),
}  # fmt: skip
# Whose weights had one hash on dp 1, 2 and 4 with train.reduce exact, in both types (tests/ranks/test_bits.py).
EXACT = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "olmo2",
    "phi3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
)
