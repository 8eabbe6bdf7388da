"""The gradient that is made in the forward is autograd's of whole logits, at the cost of one product of the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from threefold.model.head_gradient import Bend, sums_of
from threefold.training.loss import TokenLoss

TOKENS, HIDDEN, VOCABULARY = 29, 12, 37
SIZE, CHUNKS = 10, 3
BENDS = {"plain": Bend(), "scaled": Bend(0.25), "capped": Bend(cap=1.5), "both": Bend(0.5, 1.5)}


def example(
    *, bias: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, nn.Linear, Tensor]:
    draws = torch.Generator().manual_seed(4)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    for parameter in head.parameters():
        nn.init.normal_(parameter, generator=draws)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=draws)
    labels[::5] = -100
    hidden = torch.randn(TOKENS, HIDDEN, generator=draws)
    return hidden.to(dtype).requires_grad_(), head.to(dtype), labels


@pytest.mark.parametrize(
    "loss", [TokenLoss(), TokenLoss(label_smoothing=0.2), TokenLoss(z_loss=0.3)], ids=str
)
@pytest.mark.parametrize("bend", BENDS.values(), ids=BENDS)
@pytest.mark.parametrize("size", [1, 7, TOKENS])
def test_gradient_is_that_of_whole_logits(bend: Bend, loss: TokenLoss, size: int) -> None:
    hidden, head, labels = example(bias=True)
    expected, entropy = loss(bend.logits(head(hidden)), labels)
    given: Any = [hidden, *head.parameters()]
    by_autograd = torch.autograd.grad(expected * 0.3, given)
    sums = sums_of(hidden, head, labels, loss, bend=bend, size=size)
    torch.testing.assert_close(sums[:2], (expected.detach(), entropy), check_stride=False)
    torch.testing.assert_close(sums[2], loss.of_each(bend.logits(head(hidden)), labels)[1])
    for found, gradient in zip(
        torch.autograd.grad(sums[0] * 0.3, given), by_autograd, strict=True
    ):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-5)


class Watched(TorchDispatchMode):
    """How many matrix products ran inside, and the most elements that any operation gave."""

    products, numel = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        self.products += function.overloadpacket.__name__ in ("mm", "addmm", "addmm_")
        if isinstance(found, Tensor) and not function.is_view:
            self.numel = max(self.numel, found.numel())
        return found


@pytest.mark.parametrize(
    ("frozen", "products"),
    [((), 3), (("weight",), 2), (("hidden",), 2), (("weight", "hidden"), 1)],
    ids=str,
)
def test_head_is_computed_once_and_what_is_frozen_has_no_gradient(
    frozen: tuple[str, ...], products: int
) -> None:
    hidden, head, labels = example()
    head.weight.requires_grad_("weight" not in frozen)
    hidden.requires_grad_("hidden" not in frozen)
    with Watched() as seen:
        objective, *_ = sums_of(hidden, head, labels, TokenLoss(), bend=Bend(), size=SIZE)
        if objective.requires_grad:
            objective.backward()
    assert seen.products == products * CHUNKS
    assert (hidden.grad is None, head.weight.grad is None) == (
        "hidden" in frozen,
        "weight" in frozen,
    )


def test_no_gradient_is_made_where_none_is_wanted() -> None:
    hidden, head, labels = example()
    with torch.no_grad(), Watched() as seen:
        sums_of(hidden, head, labels, TokenLoss(), bend=Bend(), size=SIZE)
    assert seen.products == CHUNKS


def test_no_more_than_a_chunk_of_logits_exists() -> None:
    hidden, head, labels = example()
    with Watched() as seen:
        sums_of(hidden, head, labels, TokenLoss(), bend=Bend(cap=2.0), size=3)[0].backward()
    assert seen.numel == VOCABULARY * HIDDEN  # the weight's gradient


def test_factor_of_backward_is_not_rounded_to_what_was_kept() -> None:
    """A global count of target tokens has more digits than bfloat16: each gradient would be off by the same share."""
    factor = 1 / 1.003
    gradients = []
    for scale in (1.0, factor):
        hidden, head, labels = example(dtype=torch.bfloat16)
        (sums_of(hidden, head, labels, TokenLoss(), bend=Bend(), size=8)[0] * scale).backward()
        assert hidden.grad is not None and head.weight.grad is not None
        gradients.append(
            torch.cat([hidden.grad.flatten(), head.weight.grad.flatten()]).double()
        )
    whole, scaled = gradients
    assert scaled.abs().sum() / whole.abs().sum() == pytest.approx(factor, rel=5e-4)


def test_a_second_backward_is_an_error() -> None:
    hidden, head, labels = example()
    objective, *_ = sums_of(hidden, head, labels, TokenLoss(), bend=Bend(), size=8)
    objective.backward(torch.tensor(0.5), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        objective.backward(torch.tensor(0.5))


def test_a_label_beyond_the_vocabulary_is_an_error() -> None:
    hidden, head, labels = example()
    labels[3] = VOCABULARY
    with pytest.raises((IndexError, RuntimeError)):
        sums_of(hidden, head, labels, TokenLoss(), bend=Bend(), size=8)
