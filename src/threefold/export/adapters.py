"""Exports a run's adapters in peft's form, or merged into the model that they were trained on: one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from threefold.config.schema import Config
from threefold.errors import RunError
from threefold.model import load, lora


def model_with_adapters(config: Config, architecture: PretrainedConfig) -> Any:
    """Returns the model that the run began with, whole in float32, with untrained adapters inserted."""
    model = load.whole(config.model, architecture, seed=config.train.seed, dtype=torch.float32)
    lora.insert_whole(model, config.model.lora, seed=config.train.seed)
    return model


def write_adapter(model: Any, config: Config, to: Path) -> list[str]:
    """Writes the adapters to the folder in the form that peft loads; returns the weight files."""
    weights = {
        "base_model.model." + name.replace(f".{lora.ADAPTER}.", "."): parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
        if lora.is_adapter(name)
    }
    described = lora.peft_config(config.model.lora, model)
    described.base_model_name_or_path = config.model.name_or_path
    described.revision = config.model.revision
    described.target_modules = sorted(lora.target_names(model))
    described.inference_mode = True
    described.save_pretrained(to)
    save_file(weights, to / "adapter_model.safetensors", metadata={"format": "pt"})
    return ["adapter_model.safetensors"]


def check_adapter(model: Any, config: Config, architecture: PretrainedConfig, to: Path, probe: Any) -> str:
    """Loads the folder with peft onto a fresh base model, and compares logits.

    Raises:
        RunError: they differ.
    """
    from peft import PeftModel

    expected: Tensor = probe(model.eval())
    base = load.whole(config.model, architecture, seed=config.train.seed, dtype=torch.float32)
    found: Tensor = probe(PeftModel.from_pretrained(base, str(to)).eval())
    if not torch.equal(found, expected):
        raise RunError(
            f"{to} reloads to other logits than the run's: they differ by up to "
            f"{(found - expected).abs().max().item():.3g}",
            expected="equal logits; the folder has been removed",
            fix="report it with the model's config; --no-verify writes the folder all the same",
        )
    return "reloaded by peft: equal logits"
