"""What is said where adapters cannot be trained as asked."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from threefold.config.loading import validate
from threefold.config.schema import LoraConfig
from threefold.errors import CheckpointError, ConfigError
from threefold.model import load, lora

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LLAMA = {"model_type": "llama", "intermediate_size": 32, "num_key_value_heads": 2, **TINY}


def _said(model: dict[str, Any], **asked: Any) -> list[str]:
    architecture = load.read_config(validate({"model": {"config": model}}).model)
    found = lora.problems(
        LoraConfig.model_validate({"r": 4, **asked}),
        lambda: load.build_without_storage(architecture, attention="eager"),
        name=architecture.model_type,
    )
    return str(ConfigError.of(found)).split("\n") if found else []


def test_nothing_is_said_where_all_is_well() -> None:
    assert (
        _said(LLAMA)
        == _said(LLAMA, target_modules="all-linear")
        == _said(LLAMA, target_modules=("o_proj",))
        == []
    )


def test_unknown_projection() -> None:
    what, expected, fix = _said(LLAMA, target_modules=("query",))
    assert what.startswith(
        "model.lora.target_modules = [query] is refused by peft for 'llama': Target modules "
    )
    assert expected == (
        "  expected: names of its linear layers: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert fix == "  fix: --model.lora.target_modules all-linear"


def test_architecture_without_projections_of_its_own() -> None:
    phi3 = {**LLAMA, "model_type": "phi3", "pad_token_id": 0}
    what, expected, _ = _said(phi3)
    assert what.startswith("model.lora.target_modules = null is refused by peft for 'phi3': ")
    assert (
        expected
        == "  expected: names of its linear layers: down_proj, gate_up_proj, o_proj, qkv_proj"
    )


@pytest.mark.parametrize(
    ("model", "target", "name"), [(LLAMA, "embed_tokens", "llama"), (LLAMA, "lm_head", "llama")]
)
def test_layer_that_is_no_linear_layer(model: dict[str, Any], target: str, name: str) -> None:
    assert _said(model, target_modules=(target,)) == [
        f"model.lora.target_modules has {target}, which is not a linear layer inside {name!r}",
        "  expected: projections of the layers; not the embedding, the head or a layer of another kind",
        "  fix: --model.lora.target_modules all-linear",
    ]


def test_architecture_without_linear_layers() -> None:
    assert _said(
        {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ) == [
        "model.lora.r = 4, but 'gpt2' has no linear layers that adapters could be added to",
        "  expected: an architecture whose projections are torch.nn.Linear",
        "  fix: leave model.lora.r out: all weights are trained",
    ]


def test_without_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _said(LLAMA) == [
        "model.lora.r = 4, but peft is not installed",
        "  expected: the package that defines the adapters",
        "  fix: pip install 'threefold[lora]'",
    ]


def test_settings_without_a_rank() -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"model": {"lora": {"alpha": 8}}})
    assert str(caught.value) == (
        "model.lora.alpha has no effect without model.lora.r\n"
        "  expected: the rank of the adapters to train\n"
        "  fix: --model.lora.r 16   (or leave model.lora.alpha out)"
    )


def test_adapters_of_another_kind_are_not_resumed(tmp_path: Path) -> None:
    from threefold.checkpoint.checkpoint_folder import CheckpointFolder
    from threefold.checkpoint.manifest import architecture_of, refuse_other

    trained, asked = (
        validate({"model": {"config": dict(LLAMA), "lora": {"r": 4, "alpha": alpha}}})
        for alpha in (8, 16)
    )
    architecture = load.read_config(trained.model)
    manifest = {
        "config": trained.model_dump(mode="json"),
        "seed": 0,
        "architecture": architecture_of(architecture),
    }
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.begin(5)
    with pytest.raises(CheckpointError) as caught:
        refuse_other(manifest, asked, architecture, checkpoints.commit(5, {}))
    lines = str(caught.value).split("\n")
    assert lines[0].endswith("was made with model.lora.alpha = 8.0, not 16.0")
    assert lines[1:] == [
        "  expected: the adapters of the run: others would not fit, or would mean something else",
        "  fix: --model.lora.alpha 8.0",
    ]
