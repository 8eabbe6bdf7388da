"""The loss of hidden states through a head, with its gradient computed in the forward.

Chunk by chunk: the logits, the loss, its gradient by the logits, and from that the gradient of the chunk's hidden
states and the chunk's share of the head's. So the head's product is computed once, no more than one chunk of logits
and of their gradient exists at a time, and backward only scales what was kept: the gradient of the hidden states, and
one gradient of the head's weight, summed in float32. A head that is frozen has none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.model.collectives import local_part


class Loss(Protocol):
    """A loss computed from logits [tokens, part of the vocabulary] and labels [tokens]."""

    @property
    def ignored(self) -> int:
        """The label of a token that is not a target."""

    def measure(
        self, logits: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[torch.dtype], Tensor]]:
        """(objective, cross entropy) of each token, and what makes the objective's gradient by the logits.

        That is in float32, or in the requested type.
        The gradient is that of the labels that count; those of the others, `ignored`, are to be left out.
        """

    def of_each(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The objective, differentiable, and the cross entropy of each token."""


@dataclass(frozen=True)
class Bend:
    """A model's operation on the head's product: cap * tanh(product * scale / cap), or only the scale.

    Attributes:
        cap: None: no cap.
    """

    scale: float = 1.0
    cap: float | None = None

    @property
    def is_none(self) -> bool:
        return self.scale == 1 and self.cap is None

    def logits(self, product: Tensor) -> Tensor:
        """[.., vocabulary] -> the same."""
        scaled = product if self.scale == 1 else product * self.scale
        return scaled if self.cap is None else torch.tanh(scaled / self.cap) * self.cap

    def back(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient by the product, in the place of that by the logits."""
        if self.cap is not None:
            gradient.mul_(1 - (logits.float() / self.cap).square())
        return gradient if self.scale == 1 else gradient.mul_(self.scale)


@dataclass(frozen=True)
class _Work:
    """The work on each chunk of `size` tokens, and the gradients needed: of hidden states, weight and bias."""

    loss: Loss
    bend: Bend
    size: int
    wanted: tuple[bool, bool, bool]


def is_product(head: nn.Module) -> bool:
    """Whether a head is a plain product with its weight, which nothing else watches."""
    return type(head) is nn.Linear and not head._forward_hooks and not head._forward_pre_hooks


def sums_of(
    hidden: Tensor, head: nn.Linear, labels: Tensor, loss: Loss, *, bend: Bend, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(the objective, the cross entropy alone): scalar sums over this rank's tokens; then the objective of each token.

    Args:
        hidden: [tokens, hidden].
        head: its weight is whole, or this rank's part of the vocabulary; the hidden states' gradient is then a part.
        labels: int64 [tokens].
        size: tokens at a time.
    """
    tensors = (hidden, local_part(head.weight), local_part(head.bias))
    grows = torch.is_grad_enabled()
    wanted = tuple(grows and each is not None and each.requires_grad for each in tensors)
    summed: Any = _SumsByChunks.apply(*tensors, labels, _Work(loss, bend, size, wanted))  # type: ignore[arg-type]
    return summed[0], summed[1], summed[2]


Kept: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


class _SumsByChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        work: _Work,
    ) -> tuple[Tensor, Tensor, Tensor]:
        objective, each, kept = _by_chunks(hidden, weight, bias, labels, work)
        ctx.save_for_backward(*kept)
        together = torch.cat(each)
        cross_entropy = together.sum()
        ctx.mark_non_differentiable(cross_entropy, together)
        ctx.set_materialize_grads(False)
        return objective, cross_entropy, together

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as nothing else holds them: a second backward through them is an error of torch's.
        return (
            *(
                None if kept is None else _scaled_(kept, gradients[0])
                for kept in ctx.saved_tensors
            ),
            None,
            None,
        )


def _by_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, work: _Work
) -> tuple[Tensor, list[Tensor], Kept]:
    device = hidden.device
    dtype = (
        torch.get_autocast_dtype(device.type)
        if torch.is_autocast_enabled(device.type)
        else weight.dtype
    )
    cast = weight.to(dtype)
    cast_bias = None if bias is None else bias.to(dtype)
    of_hidden, of_weight, of_bias = work.wanted
    by_hidden = torch.empty_like(hidden) if of_hidden else None
    by_weight: Tensor | None = None
    by_bias = (
        torch.zeros_like(bias, dtype=torch.float32) if bias is not None and of_bias else None
    )
    objective = torch.zeros((), device=device)
    each_entropy = []
    for place, (part, own) in enumerate(
        zip(hidden.split(work.size), labels.split(work.size), strict=True)
    ):
        states = part.to(dtype)
        logits = work.bend.logits(F.linear(states, cast, cast_bias))
        each, entropies, gradient_of = work.loss.measure(logits, own)
        objective = objective + each.sum()
        each_entropy.append(entropies)
        if not any(work.wanted):
            continue
        gradient = work.bend.back(
            gradient_of(dtype if work.bend.is_none else torch.float32), logits
        )
        del logits, gradient_of
        # Left out beside the products, not in a pass over the logits: 0 and 1 round nothing.
        counted = (own != work.loss.ignored).to(dtype)[:, None]
        if by_bias is not None:
            by_bias += (gradient * counted).sum(0, dtype=torch.float32)
        gradient = gradient.to(dtype)
        if by_hidden is not None:
            torch.mul(gradient @ cast, counted, out=by_hidden[place * work.size :][: len(part)])
        if of_weight:
            by_weight = _with_product(by_weight, gradient.t(), states * counted)
    kept_weight = None if by_weight is None else by_weight.to(weight.dtype)
    return objective, each_entropy, (by_hidden, kept_weight, by_bias)


def _with_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right in float32, in the place of `total`."""
    # Whose products can be float32 as they are summed.
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    if total is None:
        return (left @ right).float()
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def _scaled_(kept: Tensor, factor: Tensor) -> Tensor:
    """kept * factor, in its place; the factor is not rounded to the type of what was kept."""
    if kept.dtype == factor.dtype:
        return kept.mul_(factor)
    for part in kept.split(1 + 2**22 // max(1, kept[:1].numel())):
        part.copy_(part * factor.view((1,) * kept.ndim))
    return kept
