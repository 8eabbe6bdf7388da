"""The loss of one process against float64 written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from threefold.data.rows.concat import IGNORED
from threefold.training.loss import TokenLoss


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return TokenLoss()(logits.flatten(0, -2), labels.flatten())[0]


def by_hand(logits: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """(sum of -log softmax(logits)[label], its gradient: softmax minus one at the label), in float64."""
    total, gradient = 0.0, torch.zeros_like(logits, dtype=torch.float64)
    for place in labels.ne(IGNORED).nonzero().tolist():
        row = logits[tuple(place)].double()
        powers = (row - row.max()).exp()
        label = int(labels[tuple(place)])
        total -= float((powers[label] / powers.sum()).log())
        gradient[tuple(place)] = powers / powers.sum()
        gradient[tuple(place)][label] -= 1
    return total, gradient


def example(scale: float, ignored: float) -> tuple[Tensor, Tensor]:
    """Logits [3, 7, 11] and labels [3, 7] of which a share is ignored."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 7, 11, generator=generator) * scale
    labels = torch.randint(11, (3, 7), generator=generator)
    labels[torch.rand(3, 7, generator=generator) < ignored] = IGNORED
    return logits, labels


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_sum_and_gradient_follow_the_definition(scale: float, ignored: float) -> None:
    logits, labels = example(scale, ignored)
    expected, expected_gradient = by_hand(logits, labels)
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, labels)
    loss.backward()
    assert loss.shape == () and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), expected_gradient, rtol=1e-5, atol=1e-6)


def test_all_labels_ignored_is_zero_with_a_zero_gradient() -> None:
    """A dp rank whose rows are all filled up still takes part in the step: zero, not nan."""
    logits, labels = example(1.0, 1.0)
    logits.requires_grad_()
    loss = cross_entropy_sum(logits, torch.full_like(labels, IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and not logits.grad.any()


def test_ignored_rows_do_not_count() -> None:
    logits, labels = example(3.0, 0.0)
    labels[1] = IGNORED
    kept = cross_entropy_sum(logits[[0, 2]], labels[[0, 2]])
    torch.testing.assert_close(cross_entropy_sum(logits, labels), kept)


def test_sum_is_additive_over_micro_batches() -> None:
    logits, labels = example(3.0, 0.4)
    parts = sum(
        cross_entropy_sum(logits[row : row + 1], labels[row : row + 1]) for row in range(3)
    )
    torch.testing.assert_close(cross_entropy_sum(logits, labels), parts)


def test_half_precision_logits_are_summed_in_float32() -> None:
    """The sum of bfloat16 terms would keep 8 bits; only the logits themselves are rounded."""
    logits, labels = example(3.0, 0.0)
    rounded = logits.bfloat16()
    loss = cross_entropy_sum(rounded, labels)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_hand(rounded, labels)[0], rel=1e-6)


def test_large_logits_stay_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])
    assert cross_entropy_sum(logits, torch.tensor([[0]])).item() == 0.0
    assert cross_entropy_sum(logits, torch.tensor([[1]])).item() == pytest.approx(2e4)
