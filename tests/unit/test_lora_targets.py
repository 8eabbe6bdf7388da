"""`all-linear` is every linear layer that peft can place an adapter on, in any architecture, and no expert."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from architectures import config_of
from threefold.checkpoint.manifest import architecture_of
from threefold.config.schema import LoraConfig
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.model import load, lora
from threefold.model.reduced import reduced
from threefold.run.load_model import load_model

KINDS = (
    "deepseek_v3",
    "glm4_moe",
    "qwen3_next",
    "ernie4_5_moe",
    "afmoe",
    "mixtral",
    "gpt_oss",
    "minicpm3",
    "llama",
)


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


def test_a_models_initialisation_passes_over_adapters() -> None:
    """xlstm takes every linear layer in its gates for one that has a bias."""
    config = architecture_of(reduced(config_of("xlstm")))
    mesh = Mesh(Topology(), 0, torch.device("cpu"))
    lora = {"r": 2, "target_modules": "all-linear"}
    model = load_model(mesh=mesh, config=config, lora=lora, admission="off")
    values = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if ".lora_" in name
    }
    assert any("igate" in name for name in values)
    assert all(
        (parameter == 0).all() == (".lora_B." in name) for name, parameter in values.items()
    )
