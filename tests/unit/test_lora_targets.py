"""`all-linear` is every linear layer that peft can place an adapter on, in any architecture, and no expert."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import AutoConfig

from threefold.config.schema import LoraConfig
from threefold.model import load, lora
from threefold.model.reduced import reduced

KINDS = ("deepseek_v3", "glm4_moe", "qwen3_next", "ernie4_5_moe", "afmoe", "mixtral", "gpt_oss", "minicpm3", "llama")


@pytest.mark.parametrize("kind", KINDS)
def test_all_linear_is_accepted_and_leaves_experts_out(kind: str) -> None:
    architecture = reduced(AutoConfig.for_model(kind))
    asked = LoraConfig(r=4, target_modules="all-linear")
    assert lora.problems(asked, lambda: load.outline(architecture), name=kind) == []
    model = load.outline(architecture)
    lora.insert(model, asked)
    names = lora.target_names(model)
    assert any("attn" in name or "attention" in name for name in names)
    assert all(type(model.get_submodule(name).base_layer) is nn.Linear for name in names)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
