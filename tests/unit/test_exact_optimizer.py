"""Optimizers under `train.reduce: exact`: torch's own within rounding, and every number by itself to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from threefold.optim.bfloat16_moments import NarrowAdamW
from threefold.optim.ema import Ema
from threefold.optim.exact import ExactAdamW, ExactNarrowAdamW, ExactSGD

KINDS: list[tuple[Any, Any, dict[str, Any]]] = [
    (ExactAdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
    (ExactNarrowAdamW, NarrowAdamW, {"weight_decay": 0.1, "betas": (0.9, 0.95)}),
    (ExactSGD, torch.optim.SGD, {}),
    (ExactSGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (ExactSGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (ExactSGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
]


def trained(kind: Any, sizes: list[int], arguments: dict[str, Any]) -> Tensor:
    """Weights after five steps, held in shards of these sizes."""
    draws = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(6, sum(sizes), generator=draws)
    shards = [nn.Parameter(each.clone()) for each in start.split(sizes)]
    optimizer = kind(shards, lr=0.01, **arguments)
    for gradient in gradients:
        for shard, own in zip(shards, gradient.split(sizes), strict=True):
            shard.grad = own.clone()
        optimizer.step()
    return torch.cat([shard.detach() for shard in shards])


@pytest.mark.parametrize(("kind", "torchs", "arguments"), KINDS)
def test_it_is_torchs_and_the_shards_leave_no_trace(
    kind: Any, torchs: Any, arguments: dict[str, Any]
) -> None:
    whole = trained(kind, [1003], arguments)
    torch.testing.assert_close(whole, trained(torchs, [1003], arguments), rtol=1e-5, atol=1e-5)
    for sizes in ([1, 1002], [500, 503], [7] * 143 + [2]):
        assert torch.equal(whole, trained(kind, sizes, arguments))


def test_an_average_of_single_roundings_is_the_average() -> None:
    model = nn.Linear(37, 41)
    averages = [Ema(model, 0.9, exact=exact) for exact in (True, False)]
    with torch.no_grad():
        model.weight.mul_(2.0)
    for each in averages:
        each.update(torch.ones(()))
    for exact, fast in zip(*(each.state().values() for each in averages), strict=True):
        torch.testing.assert_close(exact, fast)
