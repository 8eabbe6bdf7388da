"""`optimizer.lr: auto`: a number with its reason, for what is trained."""

from __future__ import annotations

from typing import Any

import pytest

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
    assert config.peak_rate == (rate, why)
    assert config.with_rate(rate).optimizer.lr == rate
    assert config.optimizer.lr == "auto"


def test_given_rate_is_kept() -> None:
    for model in ({}, {"name_or_path": "x"}):
        assert validate({"model": model, "optimizer": {"lr": 0.5}}).peak_rate == (
            0.5,
            "as given",
        )
