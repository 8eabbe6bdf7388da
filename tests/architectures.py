"""transformers' causal architectures, each as a config that transformers itself can build and run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_THREE_AXES = {
    "full_attention": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [24, 20, 20],
    }
}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 512,
    "indexer_compress_ratio": 4,
}
# Values that real configs have, and without which the default config makes no model.
_COMPLETED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": _THREE_AXES},
    # With its default, one expert a token whose weight is always 1, no gradient reaches its routers.
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 8, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "topk_group": 1,
        "n_group": 1,
        "moe_intermediate_size": 1408,
    },
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8},
    "lfm2_moe": {
        "layer_types": ["conv", "conv", "full_attention"] * 11,
        "num_hidden_layers": 33,
    },
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "xmod": {"default_language": "en_XX"},
}
# What transformers does not build or run from input_ids alone, and why.
NOT_RUN = {
    "gemma3n": "its vision part needs the package timm (gemma3n_text runs)",
    "gemma4_assistant": "a draft model: it reads another model's keys and values",
    "gemma4_unified_assistant": "a draft model: it reads another model's keys and values",
    "musicgen": "its config is of three models, of which the decoder alone is the language model",
    "musicgen_melody": "its config is of three models, of which the decoder alone is the language model",
}


def config_of(model_type: str, **values: Any) -> PretrainedConfig:
    """The default config of an architecture, as a decoder, with what a model of it needs."""
    values = {**_COMPLETED.get(model_type, {}), **values}
    config = AutoConfig.for_model(model_type, **values)
    if "is_decoder" in config.to_dict():
        config = AutoConfig.for_model(model_type, **values, is_decoder=True)
    return config


def perturbed(model: torch.nn.Module, *, seed: int = 0) -> torch.nn.Module:
    """The model with noise on every parameter, as many begin at 0 or 1 and would hide what reads them."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draws) * (
                0.03 if parameter.ndim < 2 else 0.1
            )
            parameter.add_(noise.to(parameter.dtype))
    return model
