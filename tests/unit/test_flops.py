"""Operations that a token meets: published counts, what torch counts, and the keys that a token sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from architectures import NAMES, NOT_RUN, config_of
from threefold.commands import main
from threefold.config.schema import LoraConfig
from threefold.model import load, lora
from threefold.model.flops import KeysSeen, flops_of
from threefold.plan.accelerators import ACCELERATORS, by_name, peak_flops
from threefold.plan.adapters import adapted
from threefold.plan.decoder import decoder_of
from threefold.plan.operations import Flops, causal_keys

_LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
_LLAMA_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 4,
}
_GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
    "sliding_window": 128,
}  # fmt: skip
# Config, then billions of parameters: all of them, and those that a token meets, as the models' cards and papers have
# them; where they leave the embeddings out or count them in, that is said.
PUBLISHED: dict[str, tuple[dict[str, Any], float, float, str]] = {
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
            "tie_word_embeddings": True,
        },
        0.6, 0.44, "without embeddings",
    ),
    "Qwen2.5-7B": (
        {
            "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        },
        7.61, 6.53, "without embeddings",
    ),
    "Mixtral-8x7B": (
        {**_LLAMA_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
        46.7, 12.9, "with embeddings",
    ),
    "Qwen3-30B-A3B": (
        {
            **_QWEN3_MOE, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        },
        30.5, 3.3, "with embeddings",
    ),
    "Qwen3-235B-A22B": (
        {
            **_QWEN3_MOE, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
            "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
        },
        235.0, 22.0, "with embeddings",
    ),
    "gpt-oss-20b": ({**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32}, 20.91, 3.61, "with the head"),
    "gpt-oss-120b": ({**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}, 116.83, 5.13, "with the head"),
    "DeepSeek-V3": ({"model_type": "deepseek_v3"}, 671.0, 37.0, "with the head"),
    "DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
            "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
            "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "first_k_dense_replace": 1,
        },
        15.7, 2.4, "with the head",
    ),
    "OLMoE-1B-7B": (
        {
            "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
            "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        6.9, 1.3, "with embeddings",
    ),
}  # fmt: skip


def outline(values: dict[str, Any]) -> Any:
    return load.outline(AutoConfig.for_model(**{**values}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    values, total, met, which = PUBLISHED[name]
    model = outline(values)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    found = flops_of(model).trained
    if which == "without embeddings":
        found -= head.numel()
    elif which == "with embeddings" and head is not embedding:
        found += embedding.numel()
    # The cards round to as many digits; norms and biases, which are not matrices, are below them.
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(
        total, rel=0.01
    )
    assert found / 1e9 == pytest.approx(met, rel=0.03)


@pytest.mark.parametrize(
    ("values", "length", "gflop"),
    [(_LLAMA_8B, 8192, 57.9), (_LLAMA_8B, 4096, 51.5), (_LLAMA_1B, 4096, 9.03)],
)
def test_published_operations(values: dict[str, Any], length: int, gflop: float) -> None:
    """As torchtitan counts them."""
    assert flops_of(outline(values)).per_token(causal_keys(length)) / 1e9 == pytest.approx(
        gflop, rel=2e-3
    )


_SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
COUNTED_BY_TORCH: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2},
    "llama, tied": {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": {**_SMALL, **_HEADS},
    "gpt_neox": {**_SMALL, "num_attention_heads": 4},
    "gpt2": {"vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4},
    "deepseek_v3": {
        **_SMALL, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED_BY_TORCH)
def test_what_torch_counts(name: str) -> None:
    """A forward and a backward with eager attention, which computes all keys of a row for each token."""
    config = AutoConfig.for_model(name.partition(",")[0], **COUNTED_BY_TORCH[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    tokens = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(tokens, use_cache=False).logits.sum().backward()
    # Rotary angles are a small product too.
    assert flops_of(model).per_token(causal_keys(64)) == pytest.approx(
        counter.get_total_flops() / 128, rel=2e-3
    )


def test_experts_that_are_not_chosen_cost_nothing() -> None:
    values = {
        **_SMALL,
        **_HEADS,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
    }
    few = flops_of(outline({**values, "num_experts": 8, "num_experts_per_tok": 2}))
    many = flops_of(outline({**values, "num_experts": 64, "num_experts_per_tok": 2}))
    assert many.trained - few.trained == 2 * 128 * (64 - 8)  # the routers of two layers


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    model = outline({**_SMALL, **_HEADS, "model_type": "qwen3"})
    whole = flops_of(model)
    pytest.importorskip("peft")
    lora.insert(model, LoraConfig(r=4))
    found = flops_of(model)
    assert found.frozen == whole.trained and 0 < found.trained < whole.trained / 10
    keys = causal_keys(64)
    assert found.per_token(keys) == 4 * found.frozen + 6 * found.trained + whole.of_attention(
        keys
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_RUN])
def test_attention_of_every_family_is_found(name: str) -> None:
    """One for each layer that has any, with a window where its config names one for that layer."""
    model = load.outline(config_of(name))
    found = flops_of(model)
    # What a model keeps fixed itself.
    assert found.trained > 0 and found.frozen < 0.1 * found.trained
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if kinds and set(kinds) <= {"full_attention", "sliding_attention"}:
        windowed = sum(
            count for each, count in found.attention.items() if each.window is not None
        )
        assert windowed == kinds.count("sliding_attention"), found.attention
        assert sum(found.attention.values()) == len(kinds)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_keys_of_a_row(window: int | None, length: int) -> None:
    seen = [min(position + 1, window or length) for position in range(length)]
    expected = sum(2 * keys - 1 for keys in seen) / length
    assert causal_keys(length)(window) == pytest.approx(expected)
    if window is None or window >= length:
        assert causal_keys(length)(window) == length


def test_keys_of_documents() -> None:
    flops = flops_of(
        outline({**_SMALL, **_HEADS, "model_type": "mistral", "sliding_window": 4})
    )
    assert {each.window for each in flops.attention} == {4}
    keys = KeysSeen(flops)
    assert keys(4) == 0
    keys.read(np.array([[0, 1, 2, 3, 4, 5, 0, 1], [0, 0, 0, 1, 2, 3, 4, 5]]))
    seen = [1, 2, 3, 4, 4, 4, 1, 2, 1, 1, 1, 2, 3, 4, 4, 4]
    assert keys(4) == pytest.approx(sum(2 * each - 1 for each in seen) / 16)
    whole = KeysSeen(Flops(1, 0, {next(iter(flops.attention))._replace(window=None): 1}))
    whole.read(np.tile(np.arange(32), (3, 1)))
    assert whole(None) == causal_keys(32)(None) == 32


def test_devices_are_told_by_their_names() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12, "NVIDIA H200": 989e12,
        "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA L40S": 362e12, "NVIDIA L40": 181e12, "NVIDIA L4": 121e12,
        "NVIDIA A10G": 70e12, "NVIDIA A10": 125e12, "NVIDIA GB200": 2500e12, "NVIDIA B200": 2250e12,
        "NVIDIA A40": 149.7e12,
    }  # fmt: skip
    assert {name: peak_flops(name) for name in names} == names
    assert peak_flops("a device nobody named") is None
    assert len(ACCELERATORS) >= 15 and by_name("H100-80GB") is ACCELERATORS["h100-80gb"]
    # A device that is given by its sign is found as itself.
    assert [
        key for key, each in ACCELERATORS.items() if peak_flops(each.sign) != each.bfloat16
    ] == []


def test_plan_prints_what_a_token_costs(tmp_path: Path) -> None:
    main._load(main._COMMANDS)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_LLAMA_1B))
    asked = [
        "plan",
        str(path),
        "--gpus",
        "8",
        "--gpu",
        "h200",
        "--data.seq_len",
        "4096",
        "--train.global_batch",
        "8",
    ]
    printed = CliRunner().invoke(main.app, asked).output
    assert "llama: 1,235,814,400 parameters on 8 x h200" in printed
    assert "7.41 GFLOP = 6 x 1,235,746,816 trained parameters of matrices" in printed
    assert "1.61 GFLOP = 6 x 16 layers x 32 heads x (64 + 64) x 4,096 keys" in printed
    assert "a token costs 9.03 GFLOP, forward and backward" in printed
    plans = json.loads(CliRunner().invoke(main.app, [*asked, "--json"]).output)
    assert plans[0]["flops_per_token"] == pytest.approx(9.025e9, rel=1e-3)


def test_frozen_weights_of_an_estimate_cost_less() -> None:
    """As counted from the modules of the model with its adapters."""
    whole = decoder_of(_LLAMA_1B)
    found = adapted(whole, LoraConfig(r=4, target_modules="all-linear")).flops
    assert found.frozen == whole.flops.trained and 0 < found.trained < 0.02 * found.frozen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{path}", "--log.every", "3"), "--log.every has no effect on a step"),
        (("{path}", "--gpu", "h1000"), "--gpu h1000 is not known"),
        (("{path}/none.json",), "cannot be read"),
        (("{other}",), "is not an object"),
        (("{nameless}",), "has no model_type"),
    ],
)
def test_wrong_requests(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    main._load(main._COMMANDS)
    contents = {"path": json.dumps(_LLAMA_1B), "other": "[]", "nameless": "{}"}
    paths = {name: tmp_path / f"{name}.json" for name in contents}
    for name, content in contents.items():
        paths[name].write_text(content)
    error = (
        CliRunner()
        .invoke(main.app, ["plan", *(argument.format(**paths) for argument in arguments)])
        .exception
    )
    assert error is not None and message in str(error)
