"""What a model's class freezes is not trained by the reference either, though `from_pretrained` makes it trainable."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM

from architectures import config_of
from threefold.check import reference
from threefold.config.loading import validate
from threefold.model import load
from threefold.model.reduced import reduced


def test_the_reference_trains_what_the_class_trains(tmp_path: Path) -> None:
    config = reduced(config_of("afmoe"))
    built = AutoModelForCausalLM.from_config(config)
    built.save_pretrained(tmp_path)
    frozen = {
        name for name, parameter in built.named_parameters() if not parameter.requires_grad
    }
    assert frozen and all(name.endswith("expert_bias") for name in frozen)
    asked = validate({"model": {"name_or_path": str(tmp_path)}})
    alone = reference._load(asked, load.read_config(asked.model))
    assert {
        name for name, parameter in alone.named_parameters() if not parameter.requires_grad
    } == frozen
