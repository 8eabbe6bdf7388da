"""Which forwards are understood, and how many tokens' logits exist at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from threefold.model.head import chunk_tokens, operations


def _model(model_type: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", ["head"]),
        ("gpt2", ["head"]),
        ("gpt_neox", ["head"]),
        ("mixtral", ["head"]),
        ("gemma2", ["head", "cap"]),
        ("granite", ["head", "divide"]),
        ("cohere", ["head", "multiply"]),
    ],
)
def test_known_heads_are_understood(model_type: str, expected: list[str]) -> None:
    assert operations(_model(model_type))[0] == expected


def test_unknown_head_keeps_its_own_forward() -> None:
    steps, why = operations(_model("falcon"))
    assert steps is None
    assert why == "its forward has `lm_logits = self.lm_head(hidden_states)`"


def test_chunks_hold_256_mebibytes() -> None:
    assert chunk_tokens("auto", tokens=4096, vocabulary=257) == 4096
    assert chunk_tokens("auto", tokens=4096, vocabulary=128_256) == 2**28 // (4 * 128_256)
    assert chunk_tokens(100, tokens=4096, vocabulary=257) == 100
    assert chunk_tokens(0, tokens=4096, vocabulary=10**9) == 4096
