"""A sample is asked beside training: what cannot write one is said in three parts, and never as a traceback."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threefold.errors import RunError
from threefold.export.generation import continued


class _Model:
    def __init__(self, *works_with: bool) -> None:
        self.config, self._works_with = SimpleNamespace(model_type="some"), works_with

    def generate(self, ids: torch.Tensor, *, use_cache: bool, **_: Any) -> torch.Tensor:
        if use_cache not in self._works_with:
            raise ValueError("this cache has\nno length")
        return torch.cat([ids, torch.tensor([[5 + use_cache]])], dim=1)


def test_without_a_cache_where_the_cache_fails() -> None:
    assert continued(_Model(True, False), [1, 2], num_tokens=1, end_id=0) == [6]
    assert continued(_Model(False), [1, 2], num_tokens=1, end_id=0) == [5]


def test_what_cannot_generate_is_said() -> None:
    with pytest.raises(
        RunError,
        match="'some' cannot write a sample: ValueError: this cache has no length\n  expected",
    ):
        continued(_Model(), [1], num_tokens=1, end_id=0)
