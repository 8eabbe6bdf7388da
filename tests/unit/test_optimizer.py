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

from threefold.config.optimizer import GroupConfig, OptimizerConfig
from threefold.optim.build import build_optimizer, rates_of
from threefold.optim.classes import kernel_of
from threefold.optim.ema import Ema
from threefold.optim.muon import Muon
from threefold.optim.schedule import learning_rate

SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")


def rates(num_steps: int, **keys: Any) -> list[float]:
    config = OptimizerConfig(**keys)
    return [
        learning_rate(step, num_steps=num_steps, config=config)
        for step in range(1, num_steps + 1)
    ]


def test_constant_by_hand() -> None:
    assert rates(6, lr=1.0, warmup_steps=4, schedule="constant") == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
    ]


def test_linear_by_hand() -> None:
    """Two steps up to the full rate, then four equal steps down to the lowest."""
    found = rates(6, lr=1.0, warmup_steps=2, schedule="linear", min_lr=0.2)
    assert found == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_by_hand() -> None:
    half_root = math.sqrt(0.5)
    found = rates(6, lr=1.0, warmup_steps=2, schedule="cosine")
    assert found == pytest.approx(
        [0.5, 1.0, 0.5 + half_root / 2, 0.5, 0.5 - half_root / 2, 0.0]
    )
    found = rates(6, lr=1.0, warmup_steps=2, schedule="cosine", min_lr=0.5)
    assert found == pytest.approx(
        [0.5, 1.0, 0.75 + half_root / 4, 0.75, 0.75 - half_root / 4, 0.5]
    )


def test_wsd_by_hand() -> None:
    """Up, constant, and down over the last steps, by equal steps or by the root of what is done."""
    keys: dict[str, Any] = {"lr": 1.0, "warmup_steps": 2, "schedule": "wsd", "decay_steps": 4}
    assert rates(9, **keys, min_lr=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    )
    found = rates(9, **keys, decay_shape="1-sqrt")
    assert found == pytest.approx(
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0]
    )
    assert rates(3, lr=1.0, warmup_steps=2, schedule="wsd", decay_steps=99) == pytest.approx(
        [0.5, 1.0, 0.0]
    )


def test_inverse_square_root_by_hand() -> None:
    found = rates(8, lr=1.0, warmup_steps=2, schedule="inverse_sqrt")
    assert found == pytest.approx([0.5, *(math.sqrt(2 / step) for step in range(2, 9))])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warmup_the_first_step_has_the_full_rate(schedule: str) -> None:
    keys: dict[str, Any] = {"lr": 2e-3, "schedule": schedule, "decay_steps": 2}
    found = rates(5, warmup_steps=0, min_lr=1e-4, **keys)
    assert found[0] == 2e-3
    assert found == rates(5, warmup_steps=1, min_lr=1e-4, **keys)
    assert rates(1, warmup_steps=0, **keys) == [2e-3]


@settings(deadline=None)
@given(
    num_steps=st.integers(1, 200),
    warmup=st.integers(0, 250),
    schedule=st.sampled_from(SCHEDULES),
    lr=st.floats(1e-6, 1.0),
    lowest=st.floats(0.0, 1.0),
)
def test_shape_of_every_schedule(
    num_steps: int, warmup: int, schedule: str, lr: float, lowest: float
) -> None:
    """Up in equal steps to the full rate and there in step `warmup`; then never up; the last step is the lowest."""
    min_lr = lr * lowest
    found = rates(
        num_steps, lr=lr, warmup_steps=warmup, schedule=schedule, min_lr=min_lr, decay_steps=7
    )
    rising, after = found[:warmup], found[max(0, warmup - 1) :]
    assert rising == pytest.approx([lr * step / warmup for step in range(1, len(rising) + 1)])
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))
    if num_steps > max(1, warmup):
        assert after[0] == lr
        root = lr * math.sqrt(max(1, warmup) / num_steps)
        assert found[-1] == {"constant": lr, "inverse_sqrt": root}.get(schedule, min_lr)


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
    optimizer = build_optimizer(
        model, OptimizerConfig(lr=0.5, weight_decay=0.25, betas=(0.8, 0.9), eps=1e-6)
    )
    decay = {
        id(p): group["weight_decay"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
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
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5, eps=1e-12))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, -3.0)
    optimizer.step()
    torch.testing.assert_close(
        model.layer.weight.detach(), before["layer.weight"] * (1 - 0.1 * 0.5) + 0.1
    )
    torch.testing.assert_close(model.layer.bias.detach(), before["layer.bias"] + 0.1)
    torch.testing.assert_close(model.frozen.detach(), before["frozen"])


def test_groups_by_pattern() -> None:
    """The first pattern that is found counts; the others stay as they are; rates follow the run's."""
    asked = (
        {"match": "layer", "lr": 0.05, "name": "slow"},
        {"match": "weight", "weight_decay": 0.5},
    )
    groups = tuple(GroupConfig(**each) for each in asked)
    model = Tiny()
    optimizer = build_optimizer(
        model, OptimizerConfig(lr=0.5, weight_decay=0.25, groups=groups)
    )
    found = {
        id(p): (g["weight_decay"], g["lr_share"])
        for g in optimizer.param_groups
        for p in g["params"]
    }
    assert {name: found.get(id(parameter)) for name, parameter in model.named_parameters()} == {
        "embedding.weight": (0.5, 1.0),
        "layer.weight": (0.25, 0.1),
        "layer.bias": (0.0, 0.1),
        "norm.weight": (0.5, 1.0),
        "norm.bias": (0.0, 1.0),
        "scale": (0.0, 1.0),
        "frozen": None,
    }
    assert rates_of(optimizer).keys() == {"lr_slow"}


def test_moving_average_by_hand() -> None:
    """Of what is trained; a step that was skipped leaves it as it is, to the bit."""
    model = Tiny()
    ema = Ema(model, 0.75)
    first = {name: average.clone() for name, average in ema.state().items()}
    assert "ema.frozen" not in first and torch.equal(first["ema.scale"], model.scale.detach())
    with torch.no_grad():
        model.scale += 4.0
    ema.update(torch.tensor(1.0))
    assert ema.state()["ema.scale"].item() == 2.0
    before = ema.state()["ema.scale"].clone()
    ema.update(torch.tensor(0.0))
    assert torch.equal(ema.state()["ema.scale"], before)


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_muon_is_torchs_bit_for_bit_in_bfloat16(adjust: str | None) -> None:
    """On matrices that are wide, tall and square; what is [experts, m, n] as one matrix for each expert."""
    draw = torch.Generator().manual_seed(1)
    shapes = (8, 4), (4, 8), (6, 6), (3, 4, 6)
    ours = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    whole = [nn.Parameter(each.detach().clone()) for each in ours[:3]]
    experts = [nn.Parameter(each.clone()) for each in ours[3].detach()]
    muon = Muon([{"params": ours}], lr=0.02, adjust_lr_fn=adjust)
    torchs = torch.optim.Muon([*whole, *experts], lr=0.02, adjust_lr_fn=adjust)
    for _ in range(3):
        for parameter in ours:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        gradients: list[Any] = [each.grad for each in ours]
        for gradient, other in zip(
            [*gradients[:3], *gradients[3]], [*whole, *experts], strict=True
        ):
            other.grad = gradient.clone()
        muon.step()
        torchs.step()
    assert all(
        torch.equal(a, b)
        for a, b in zip([*ours[:3], *ours[3]], [*whole, *experts], strict=True)
    )


def test_muon_leaves_a_frozen_matrix_and_its_momentum_as_they_are() -> None:
    matrices = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    muon = Muon([{"params": matrices}], lr=0.02)
    for number in range(3):
        matrices[0].requires_grad_(number == 0)
        for each in matrices:
            each.grad = torch.eye(4) if each.requires_grad else None
        muon.step()
        if not number:
            frozen = matrices[0].detach().clone()
            momentum = muon.state[matrices[0]]["momentum_buffer"].clone()
    assert torch.equal(matrices[0], frozen) and not torch.equal(matrices[1], frozen)
    assert torch.equal(muon.state[matrices[0]]["momentum_buffer"], momentum)


@pytest.mark.parametrize(
    ("kind", "device", "sharded", "expected"),
    [
        (torch.optim.AdamW, "cuda", True, {"fused": True}),
        (torch.optim.AdamW, "cpu", False, {"fused": True}),
        (torch.optim.Adam, "cuda", True, {"fused": True}),
        (torch.optim.SGD, "cuda", True, {"foreach": True}),
        (torch.optim.SGD, "cuda", False, {}),  # torch takes it by itself
        (torch.optim.SGD, "cpu", True, {}),
        (torch.optim.RMSprop, "cuda", True, {"foreach": True}),
        (torch.optim.Rprop, "cuda", True, {}),  # DTensor has no such operation for it
        (Muon, "cuda", True, {}),
    ],
)
def test_kernel_of_an_optimizer(
    kind: Any, device: str, sharded: bool, expected: dict[str, bool]
) -> None:
    assert kernel_of(kind, device=device, sharded=sharded) == expected


def test_optimizers_are_built_with_their_kernel() -> None:
    for name in ("adamw", "torch.optim.Adam"):
        assert build_optimizer(nn.Linear(2, 2), OptimizerConfig(name=name)).param_groups[0][
            "fused"
        ]
