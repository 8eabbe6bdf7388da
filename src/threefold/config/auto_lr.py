"""The value of `optimizer.lr: auto`: a rate for the weights that the run begins with."""

from __future__ import annotations

from threefold.config.schema import Config, ModelConfig

RANDOM, PRETRAINED, ADAPTERS = 2e-3, 2e-5, 2e-4


def automatic_rate(model: ModelConfig) -> tuple[float, str]:
    """Returns the peak learning rate for the trained weights, and the reason."""
    if model.lora.r:
        return ADAPTERS, "adapters are trained"
    if model.name_or_path is not None:
        return PRETRAINED, "the weights are pretrained"
    return RANDOM, "the weights are random"


def peak_rate(config: Config) -> tuple[float, str]:
    """Returns optimizer.lr as a number, and the reason for it."""
    asked = config.optimizer.lr
    return automatic_rate(config.model) if asked == "auto" else (asked, "as given")


def with_rate(config: Config, lr: float) -> Config:
    """Returns the config with `lr` as its peak learning rate."""
    return config.changed(optimizer={"lr": lr})
