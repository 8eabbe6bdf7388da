"""The kernels of the loss on a CUDA device against its operations there, and the head's gradient against float64."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn

from threefold.model.head_gradient import Bend, sums_of
from threefold.training.loss import TokenLoss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: kernels of the loss are not run"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]
LOSS = TokenLoss(label_smoothing=0.1, z_loss=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 7), (64, 4097), (100, 50257), (1024, 128256)]
)
def test_kernels_are_the_operations(dtype: torch.dtype, tokens: int, width: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(tokens, width, device="cuda") * 4).to(dtype)
    labels = torch.randint(width, (tokens,), device="cuda")
    labels[1::3] = -100
    *expected, gradient_of = LOSS.measure(logits, labels)
    *found, own_gradient_of = replace(LOSS, fused=True).measure(logits, labels)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    counted = (labels != -100)[:, None]
    gradients = [made(torch.float32) * counted for made in (own_gradient_of, gradient_of)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    again = replace(LOSS, fused=True).measure(logits, labels)
    assert torch.equal(again[0], found[0]) and torch.equal(
        again[2](dtype), own_gradient_of(dtype)
    )


def test_a_heads_gradient_is_not_rounded_chunk_by_chunk() -> None:
    torch.manual_seed(0)
    head = nn.Linear(256, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(2048, 256, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(4096, (2048,), device="cuda")
    gradients = []
    for size in (2048, 64):
        head.weight.grad = None
        sums_of(hidden, head, labels, replace(LOSS, fused=True), bend=Bend(), size=size)[
            0
        ].backward()
        assert head.weight.grad is not None
        gradients.append(head.weight.grad)
    # Equal but for the order of float32 sums: a number between two of bfloat16 may fall on either.
    apart = (gradients[0].float() - gradients[1].float()).abs() / gradients[
        0
    ].float().abs().clamp_min(1e-3)
    assert apart.max() <= 2**-7 and (apart > 0).float().mean() <= 0.01
