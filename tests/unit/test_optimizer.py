"""The learning rate against its formula written out by hand, and weight decay on matrices alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from threefold.config.schema import OptimizerConfig
from threefold.training.optimizer import adamw, learning_rate

SCHEDULES = ("constant", "linear", "cosine")


def rates(num_steps: int, **keys: Any) -> list[float]:
    config = OptimizerConfig(**keys)
    return [learning_rate(step, num_steps=num_steps, config=config) for step in range(1, num_steps + 1)]


def test_constant_by_hand() -> None:
    assert rates(6, lr=1.0, warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_by_hand() -> None:
    """Two steps up to the full rate, then four equal steps down to the lowest."""
    found = rates(6, lr=1.0, warmup_steps=2, schedule="linear", min_lr=0.2)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_by_hand() -> None:
    half_root = math.sqrt(0.5)
    found = rates(6, lr=1.0, warmup_steps=2, schedule="cosine")
    assert found == pytest.approx([0.5, 1.0, 0.5 + half_root / 2, 0.5, 0.5 - half_root / 2, 0.0])
    found = rates(6, lr=1.0, warmup_steps=2, schedule="cosine", min_lr=0.5)
    assert found == pytest.approx([0.5, 1.0, 0.75 + half_root / 4, 0.75, 0.75 - half_root / 4, 0.5])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warmup_the_first_step_has_the_full_rate(schedule: str) -> None:
    found = rates(5, lr=2e-3, warmup_steps=0, schedule=schedule, min_lr=1e-4)
    assert found[0] == 2e-3
    assert found == rates(5, lr=2e-3, warmup_steps=1, schedule=schedule, min_lr=1e-4)
    assert rates(1, lr=2e-3, warmup_steps=0, schedule=schedule) == [2e-3]


@settings(deadline=None)
@given(
    num_steps=st.integers(1, 200),
    warmup=st.integers(0, 250),
    schedule=st.sampled_from(SCHEDULES),
    lr=st.floats(1e-6, 1.0),
    lowest=st.floats(0.0, 1.0),
)
def test_shape_of_every_schedule(num_steps: int, warmup: int, schedule: str, lr: float, lowest: float) -> None:
    """Up in equal steps to the full rate and there in step `warmup`; then never up; the last step is the lowest."""
    min_lr = lr * lowest
    found = rates(num_steps, lr=lr, warmup_steps=warmup, schedule=schedule, min_lr=min_lr)
    rising, after = found[:warmup], found[max(0, warmup - 1) :]
    assert rising == pytest.approx([lr * step / warmup for step in range(1, len(rising) + 1)])
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))
    if num_steps > max(1, warmup):
        assert after[0] == lr
        assert found[-1] == (lr if schedule == "constant" else min_lr)


def test_later_end_does_not_change_the_warmup() -> None:
    keys = {"lr": 1.0, "warmup_steps": 5, "schedule": "cosine"}
    assert rates(10, **keys)[:5] == rates(1000, **keys)[:5]


class Tiny(nn.Module):
    """Matrices, vectors, a scalar and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layer = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_decay_falls_on_matrices_only() -> None:
    model = Tiny()
    optimizer = adamw(model, OptimizerConfig(lr=0.5, weight_decay=0.25, betas=(0.8, 0.9), eps=1e-6))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: decay.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert found == {
        "embedding.weight": 0.25,
        "layer.weight": 0.25,
        "layer.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "scale": 0.0,
        "frozen": None,
    }
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decay) == 6
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-6)


def test_first_step_is_adamw_by_hand() -> None:
    """Both moments are corrected, so the first step is lr * sign of the gradient; the decay is not part of it."""
    model = Tiny()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = adamw(model, OptimizerConfig(lr=0.1, weight_decay=0.5, eps=1e-12))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, -3.0)
    optimizer.step()
    torch.testing.assert_close(model.layer.weight.detach(), before["layer.weight"] * (1 - 0.1 * 0.5) + 0.1)
    torch.testing.assert_close(model.layer.bias.detach(), before["layer.bias"] + 0.1)
    torch.testing.assert_close(model.frozen.detach(), before["frozen"])
