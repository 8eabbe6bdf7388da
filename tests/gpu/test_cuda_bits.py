"""With `train.deterministic`, a CUDA device repeats a run and a resume bit for bit. Skipped without a device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: no bits of one are compared"
    ),
]


def test_a_second_run_and_a_resumed_one_are_the_first() -> None:
    from gpu_rows import bits

    found = bits(deterministic=True, tiny=False)
    assert found["same_in_a_second_run"] == found["same_when_resumed"] == found["steps"]
