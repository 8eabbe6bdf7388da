"""Reduced configs: every kind of layer stays, and transformers builds and runs a model of them."""

from __future__ import annotations

import json
import time
from math import gcd
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from architectures import NAMES, NOT_RUN, config_of
from threefold.checkpoint.manifest import (
    architecture_of,
    architecture_problems,
    read_architecture,
)
from threefold.model.reduced import VOCABULARY, WINDOW, lengths_of, reduced

# One of each kind: attention, windows, latent attention, experts, states, parts, tables of positions.
SAMPLE = (
    *(
        "llama",
        "gemma2",
        "gemma3n_text",
        "gemma4_text",
        "phi3",
        "gpt2",
        "gpt_neo",
        "falcon",
        "bloom",
        "bart",
        "mpt",
    ),
    *(
        "deepseek_v3",
        "deepseek_v4",
        "glm_moe_dsa",
        "mixtral",
        "qwen3_next",
        "llama4",
        "dbrx",
        "ernie4_5_moe",
    ),
    *(
        "mamba2",
        "jamba",
        "zamba2",
        "falcon_h1",
        "granitemoehybrid",
        "rwkv",
        "xlstm",
        "recurrent_gemma",
        "reformer",
    ),
)


class Remote(PretrainedConfig):
    """As a model's own code writes one: no fields, and a key that nobody knows."""

    model_type = "remote"

    def __init__(
        self,
        hidden_size: int = 512,
        num_hidden_layers: int = 9,
        mystery_size: int = 77,
        **values: Any,
    ):
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = 8
        self.mystery_size = mystery_size
        super().__init__(**values)


def run(config: PretrainedConfig) -> tuple[int, float]:
    """(parameters, seconds of forward and backward) of transformers' own model."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    began = time.thread_time()
    logits = model(input_ids=torch.arange(3, 67).reshape(2, 32), use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    assert logits.shape[:2] == (2, 32)
    assert logits.isfinite().all()
    return sum(
        parameter.numel() for parameter in model.parameters()
    ), time.thread_time() - began


@pytest.mark.parametrize("name", SAMPLE)
def test_transformers_runs_it(name: str) -> None:
    parameters, seconds = run(reduced(config_of(name)))
    assert parameters < 1e6
    assert seconds < 2


@pytest.mark.examples
@pytest.mark.parametrize("name", SAMPLE)
def test_transformers_runs_it_for_8_ranks(name: str) -> None:
    """Heads, experts and widths are those that 8 ranks can divide, so larger ones."""
    parameters, seconds = run(reduced(config_of(name), ranks=8))
    assert parameters < 6e6
    assert seconds < 2


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_RUN])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_transformers_runs_every_architecture(name: str, ranks: int) -> None:
    parameters, seconds = run(reduced(config_of(name), ranks=ranks))
    # Parts for images and sound have fixed widths, and heads are as wide as kernels want.
    assert parameters < 6.5e6
    assert seconds < 2


@pytest.mark.examples
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_RUN])
def test_every_config_reads_back(name: str) -> None:
    config = reduced(config_of(name))
    assert architecture_problems(config) == []
    again = read_architecture(json.loads(json.dumps(architecture_of(config))))
    assert type(again) is type(config)
    assert architecture_of(again) == architecture_of(config)


@pytest.mark.parametrize("name", SAMPLE)
def test_config_reads_back_and_reduces_to_itself(name: str) -> None:
    small = reduced(config_of(name))
    assert architecture_of(read_architecture(architecture_of(small))) == architecture_of(small)
    assert type(small) is type(config_of(name))
    twice = reduced(small)
    assert (
        twice.num_hidden_layers <= small.num_hidden_layers
        if hasattr(small, "num_hidden_layers")
        else True
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(32, 32), (32, 8), (9, 3), (14, 2), (71, 1), (12, 4), (1, 1), (40, 10)],
)
def test_heads_divide_by_what_the_real_ones_do(heads: int, kv_heads: int, ranks: int) -> None:
    real = AutoConfig.for_model(
        "llama", num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * 64
    )
    small = reduced(real, ranks=ranks)
    assert gcd(small.num_key_value_heads, ranks) == gcd(kv_heads, ranks) or kv_heads == 1
    assert gcd(small.num_attention_heads, ranks) == gcd(heads, ranks)
    assert (small.num_attention_heads == small.num_key_value_heads) == (heads == kv_heads)
    assert (small.num_key_value_heads == 1) == (kv_heads == 1)
    assert gcd(small.intermediate_size, ranks) == gcd(real.intermediate_size, ranks)


def test_every_kind_of_layer_stays() -> None:
    small = reduced(AutoConfig.for_model("gemma3_text"))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    small = reduced(AutoConfig.for_model("glm_moe_dsa"))
    assert set(small.mlp_layer_types) == {"dense", "sparse"}
    small = reduced(AutoConfig.for_model("deepseek_v3"))
    assert small.num_hidden_layers == 2
    assert small.first_k_dense_replace == 1
    small = reduced(AutoConfig.for_model("gemma3n_text"))
    kinds = {
        (kind, n >= small.num_hidden_layers - small.num_kv_shared_layers)
        for n, kind in enumerate(small.layer_types)
    }
    assert len(kinds) == 4
    small = reduced(AutoConfig.for_model("qwen2_moe", decoder_sparse_step=2))
    assert (small.decoder_sparse_step, small.num_hidden_layers) == (2, 4)
    small = reduced(AutoConfig.for_model("gemma4_text"))
    assert {layer.head_dim for layer in small.per_layer_config} == {16, 32}


def test_structure_stays_and_sizes_shrink() -> None:
    real = AutoConfig.for_model(
        "qwen2", tie_word_embeddings=True, use_sliding_window=True, sliding_window=4096, max_window_layers=4,
        attention_dropout=0.1, eos_token_id=[151643, 151645], pad_token_id=151643,
    )  # fmt: skip
    small = reduced(real)
    assert small.tie_word_embeddings
    assert small.sliding_window == WINDOW
    assert set(small.layer_types) == set(real.layer_types)
    assert small.vocab_size == VOCABULARY
    assert all(0 <= token < VOCABULARY for token in [*small.eos_token_id, small.pad_token_id])
    assert small.eos_token_id[0] == small.pad_token_id != small.eos_token_id[1]
    assert small.attention_dropout == 0.0
    assert not small.use_cache


def test_rotary_embeddings_meet_both_of_their_regimes() -> None:
    factors = {
        "short_factor": [1.0 + n / 48 for n in range(48)],
        "long_factor": [2.0 + n / 48 for n in range(48)],
    }
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        **factors,
        "original_max_position_embeddings": 4096,
    }
    small = reduced(
        AutoConfig.for_model("phi3", max_position_embeddings=131072, rope_parameters=rope),
        seq_len=32,
    )
    assert small.max_position_embeddings >= 32
    assert small.rope_parameters["original_max_position_embeddings"] == 16
    head = small.hidden_size // small.num_attention_heads
    assert (
        len(small.rope_parameters["short_factor"])
        == len(small.rope_parameters["long_factor"])
        == head // 2
    )
    run(small)


def test_code_of_a_model_s_own_keeps_what_nobody_knows() -> None:
    small = reduced(Remote(mystery_size=99, layer_types=["full_attention"] * 8 + ["conv"]))
    assert isinstance(small, Remote)
    assert (small.mystery_size, small.layer_types, small.num_hidden_layers) == (
        99,
        ["full_attention", "conv"],
        2,
    )
    assert small.hidden_size < 512


@pytest.mark.parametrize("name", ["gemma3", "qwen4_exp", "emu3"])
def test_parts_of_a_model_shrink_each(name: str) -> None:
    small = reduced(config_of(name))
    assert type(small) is type(config_of(name))
    assert small.get_text_config().vocab_size == VOCABULARY
    run(small)


# As published: the sizes, switches and rotary embeddings of real models.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **{
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
        },
        **{
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "vocab_size": 128256,
        },
        "eos_token_id": [128001, 128008, 128009],
        "rope_theta": 500000.0,
        "rope_scaling": {
            **{
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "rope_type": "llama3",
            },
            "original_max_position_embeddings": 8192,
        },
    },
    "Qwen2.5-7B": {
        **{
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
        },
        **{
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_window_layers": 28,
            "sliding_window": 131072,
        },
        **{"use_sliding_window": False, "vocab_size": 152064, "rope_theta": 1000000.0},
    },
    "Phi-3.5-mini": {
        **{
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
        },
        **{
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "sliding_window": 262144,
            "vocab_size": 32064,
        },
        **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096},
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [2.0] * 48,
            "short_factor": [1.0] * 48,
        },
    },
    "DeepSeek-V3": {
        **{
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
        },
        **{
            "moe_intermediate_size": 2048,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
        },
        **{
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_group": 8,
        },
        **{
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "topk_group": 4,
        },
        **{"first_k_dense_replace": 3, "max_position_embeddings": 163840, "vocab_size": 129280},
        "rope_scaling": {
            **{
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "original_max_position_embeddings": 4096,
        },
    },
    "gpt-oss-20b": {
        **{
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
        },
        **{
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
        },
        **{
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "vocab_size": 201088,
            "pad_token_id": 199999,
        },
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "rope_scaling": {
            **{
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
            "original_max_position_embeddings": 4096,
        },
    },
    "Qwen3-Next-80B": {
        **{
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
        },
        **{
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
        **{
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "partial_rotary_factor": 0.25,
        },
        **{
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "full_attention_interval": 4,
        },
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("ranks", [1, 4])
def test_published_configs(name: str, ranks: int) -> None:
    values = dict(PUBLISHED[name])
    real = AutoConfig.for_model(values.pop("model_type"), **values)
    small = reduced(real, ranks=ranks)
    parameters, _ = run(small)
    assert parameters < 1e6
    kinds = [key for key in ("layer_types", "mlp_layer_types") if getattr(real, key, None)]
    assert all(set(getattr(small, key)) == set(getattr(real, key)) for key in kinds)
    assert small.rope_parameters.keys() == real.rope_parameters.keys()
    assert {key for key, value in real.to_dict().items() if value is None} == {
        key for key, value in small.to_dict().items() if value is None
    }


def test_places_in_a_row_are_told_from_sizes() -> None:
    assert (
        lengths_of(
            AutoConfig.for_model("mamba2", time_step_limit=(0.0, float("inf")), chunk_size=48)
        ).count(48)
        == 1
    )
    lengths = lengths_of(
        AutoConfig.for_model(
            "llama4_text", hidden_size=1234, floor_scale=77, attention_chunk_size=99
        )
    )
    assert {77, 99} <= set(lengths) and 1234 not in lengths


def test_queries_are_scaled_inside_the_probes_rows_where_they_are_in_the_runs() -> None:
    real = AutoConfig.for_model("llama4_text", floor_scale=8192)
    assert reduced(real, seq_len=32, real_seq_len=8191).floor_scale == 8192
    assert reduced(real, seq_len=32, real_seq_len=8192).floor_scale < 32
