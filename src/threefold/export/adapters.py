"""Exports a run's adapters in peft's form, or merged into the model that they were trained on: one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from threefold.checkpoint.boxes import Index
from threefold.checkpoint.layout import Checkpoint
from threefold.checkpoint.manifest import read_manifest, refuse_other_base
from threefold.checkpoint.state import read_weights
from threefold.config.schema import Config
from threefold.model import load, lora
from threefold.model.load import is_adapter


def model_with_adapters(checkpoint: Checkpoint, config: Config, architecture: PretrainedConfig) -> Any:
    """The model that the run began with, whole in float32, and beside it the adapters that the checkpoint has.

    Raises:
        CheckpointError: the weights that the adapters were trained beside are not there any more.
    """
    refuse_other_base(read_manifest(checkpoint), load.fingerprint(config.model), config, checkpoint)
    model = load.whole(config.model, architecture, seed=config.train.seed, dtype=torch.float32)
    lora.insert_whole(model, config.model.lora, seed=config.train.seed)
    read_weights(model, checkpoint.state, Index.read(checkpoint.state))
    return model


def write_adapter(model: Any, config: Config, to: Path) -> list[str]:
    """Writes the adapters to the folder in the form that peft loads; returns the weight files."""
    weights = {
        "base_model.model." + name.replace(f".{lora.ADAPTER}.", "."): parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }
    described = lora.peft_config(config.model.lora, model)
    described.base_model_name_or_path = config.model.name_or_path
    described.revision = config.model.revision
    described.target_modules = sorted(lora.target_names(model))
    described.inference_mode = True
    described.save_pretrained(to)
    save_file(weights, to / "adapter_model.safetensors", metadata={"format": "pt"})
    return ["adapter_model.safetensors"]


def load_with_peft(config: Config, architecture: PretrainedConfig, to: Path) -> Any:
    """The written adapters, loaded by peft beside the model that the run began with."""
    from peft import PeftModel

    base = load.whole(config.model, architecture, seed=config.train.seed, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(to))
