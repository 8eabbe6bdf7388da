"""`optimizer.lr: auto`: a number with its reason, for what is trained."""

from __future__ import annotations

from typing import Any

import pytest

from threefold.config.auto_lr import peak_rate, with_rate
from threefold.config.loading import validate


@pytest.mark.parametrize(
    ("model", "rate", "why"),
    [
        ({}, 2e-3, "the weights are random"),
        ({"config": {"model_type": "llama"}}, 2e-3, "the weights are random"),
        ({"name_or_path": "x"}, 2e-5, "the weights are pretrained"),
        ({"name_or_path": "x", "lora": {"r": 4}}, 2e-4, "adapters are trained"),
    ],
)
def test_rate_for_what_is_trained(model: dict[str, Any], rate: float, why: str) -> None:
    config = validate({"model": model})
    assert config.optimizer.lr == "auto"
    assert peak_rate(config) == (rate, why)
    assert with_rate(config, rate).optimizer.lr == rate
    assert config.optimizer.lr == "auto"


def test_given_rate_is_kept() -> None:
    for model in ({}, {"name_or_path": "x"}):
        assert peak_rate(validate({"model": model, "optimizer": {"lr": 0.5}})) == (
            0.5,
            "as given",
        )
