"""A model read from its config without torch: its parameters against transformers' modules, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from architectures import config_of
from threefold.errors import ConfigError
from threefold.model import load
from threefold.model.float8 import layers_to_convert
from threefold.model.flops import flops_of
from threefold.plan.decoder import decoder_of
from threefold.plan.families import FAMILIES
from threefold.plan.operations import longest_row
from threefold.plan.units import units_of

LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_there_are_at_least_25_families() -> None:
    assert len(FAMILIES) >= 25


def _variants(name: str) -> list[dict[str, Any]]:
    """The default config, and one in which every switch of the family is the other way round."""
    family = FAMILIES[name]
    switches = (family.qkv_bias, family.o_bias, family.mlp_bias, family.head_bias)
    turned = {each.name: not each.default for each in switches if not isinstance(each, bool)}
    few = {"num_hidden_layers": 3}
    return [
        few,
        {
            **few,
            **turned,
            "tie_word_embeddings": not family.tied,
            "vocab_size": 1000,
            "pad_token_id": 0,
        },
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_modules(name: str) -> None:
    for values in _variants(name):
        config = config_of(name, **values)
        model = load.outline(config)
        found = decoder_of(config.to_dict())
        assert found.size == sum(each.numel() for each in model.parameters()), values
        assert found.flops.trained == pytest.approx(flops_of(model).trained, rel=1e-9), values


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_8_bits_are_those_of_the_modules(name: str) -> None:
    config = config_of(name, num_hidden_layers=3)
    converted = [
        layer.weight for layer in layers_to_convert(load.outline(config), "tensorwise").values()
    ]
    for shards in (1, 16, 3):
        whole = units_of(decoder_of(config.to_dict()), 1, shards).whole
        assert whole.narrow == sum(
            each.numel() for each in converted if each.shape[0] % shards == 0
        ), shards


@pytest.mark.parametrize(
    "name", [name for name, family in FAMILIES.items() if family.sliding != "none"]
)
def test_windows_are_those_of_the_modules(name: str) -> None:
    values: dict[str, Any] = {"num_hidden_layers": 12, "sliding_window": 64}
    if name in ("qwen2", "qwen3", "qwen2_moe", "smollm3"):
        values |= {"use_sliding_window": True, "max_window_layers": 4}
    config = config_of(name, **values)
    counted = flops_of(load.outline(config)).attention
    told = config.to_dict()
    for given in (told, {key: value for key, value in told.items() if key != "layer_types"}):
        if (
            "layer_types" not in given
            and not FAMILIES[name].full_every
            and FAMILIES[name].sliding == "layer_types"
        ):
            continue  # no config.json of these leaves them out and has windows
        layers = decoder_of(given).layers
        assert {each.window: count for each, count in counted.items()} == {
            window: sum(layer.window == window for layer in layers)
            for window in {layer.window for layer in layers}
        }


_LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' cannot be estimated"),
        ({"model_type": None}, "model_type None cannot be estimated"),
        ({"model_type": "gemma3", "text_config": {}}, "its decoder is one of several parts"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"hidden_size": "128"}, "hidden_size = '128'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        *(
            (
                {"model_type": name, "quantization_config": {"bits": 4}},
                "fix: the config.json of the unquantised model",
            )
            for name in ("llama", "deepseek_v3")
        ),
    ],
)
def test_what_cannot_be_told_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        decoder_of({**_LLAMA, **changed})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"hidden_act": "gelu_new"}, "hidden_act = gelu_new"),
        ({"model_type": "gemma2"}, "the attention of 'gemma2'"),
    ],
)
def test_layers_whose_kept_tensors_are_not_known(changed: dict[str, Any], said: str) -> None:
    (problem,) = decoder_of({**_LLAMA, **changed}).unsure
    assert said in problem.what


@pytest.mark.parametrize(
    ("values", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        # The configs of vicuna-7b-v1.5-16k, and of Qwen2.5 with what its page adds: the length before scaling.
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            16384,
        ),
        ({"max_position_embeddings": 32768, "rope_parameters": YARN}, 131072),
        # And after it, as gpt_oss, DeepSeek-V3, Llama 3.1 and Gemma 3 name it.
        ({"max_position_embeddings": 131072, "rope_parameters": YARN}, 131072),
        (
            {
                "max_position_embeddings": 8192,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            8192,
        ),
        (
            {"max_position_embeddings": 8192, "rope_parameters": {"full_attention": LINEAR}},
            8192,
        ),
        # Its factors would depend on the longest text so far.
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
            },
            4096,
        ),
        ({"max_target_positions": 448}, 448),
        ({}, None),
    ],
)
def test_scaled_positions_make_longer_rows(values: dict[str, Any], longest: int | None) -> None:
    assert longest_row(values) == longest
    assert (
        decoder_of({**_LLAMA, "max_position_embeddings": None, **values}).positions == longest
    )
