"""Cross entropy over target tokens, also for logits split over the vocabulary, and optional terms added to it.

Sums, not means: the loss of a step is the sum divided by the number of target tokens of the whole global batch (labels
of -100 do not count), and only `step` knows that count. Computed in float32 for logits of any type.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from threefold.data.rows.concat import IGNORED
from threefold.errors import Problem
from threefold.model.layer_kinds import CHOSEN_EXPERTS, NUM_EXPERTS


@dataclass(frozen=True)
class TokenLoss:
    """The loss of some tokens, as sums.

    Attributes:
        group: the ranks that hold the other parts of the vocabulary (the tp axis), or None.
        vocabulary_start: first entry of this rank's part.
        vocabulary: entries of the whole vocabulary; needed on parts.
        label_smoothing: share of the target's probability that is spread over the vocabulary (arXiv:1512.00567).
        z_loss: weight of the squared logarithm of the softmax' sum (PaLM, arXiv:2204.02311, section 5).
        ignored: the label of a token that is not a target.
        fused: sums whose gradient is made with them are those of `loss_kernel`, for CUDA.
    """

    group: dist.ProcessGroup | None = None
    vocabulary_start: int | None = None
    vocabulary: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignored: int = IGNORED
    fused: bool = False

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(the objective, the cross entropy alone): scalar sums over the labels that are not -100.

        Args:
            logits: [tokens, vocabulary], or this rank's [tokens, part of the vocabulary].
            labels: int64 [tokens].
        """
        objective, cross_entropy = self.of_each(logits, labels)
        return objective.sum(), cross_entropy.sum()

    def of_each(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Like the sums, but for each token: [tokens], 0 where the label is -100."""
        losses: tuple[Tensor, Tensor] = _OfEach.apply(logits, labels, self)  # type: ignore[assignment]
        return losses

    def measure(
        self, logits: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[torch.dtype], Tensor]]:
        """(objective, cross entropy) of each token, [tokens], and what makes the objective's gradient by the logits.

        That is [tokens, part of the vocabulary], once, for the labels that count; for the others it is to be left out.
        It is float32, or from kernels in the requested type. Not differentiable.
        """
        by_kernel = self.fused and logits.shape[1] > 0
        objective, cross_entropy, saved = self._measured(logits, labels, by_kernel)
        if by_kernel:
            return objective, cross_entropy, partial(self._gradient_by_kernel, saved)
        return objective, cross_entropy, lambda _: self._gradient(saved)

    def _measured(
        self, logits: Tensor, labels: Tensor, by_kernel: bool = False
    ) -> tuple[Tensor, Tensor, _Found]:
        # logits: (tokens, part of the vocabulary); the last part may be shorter, or empty
        width = logits.shape[1]
        start = self.vocabulary_start or 0
        counted = labels != self.ignored
        # With the whole vocabulary, every label that counts: one beyond it is an error of `gather`.
        own = (
            counted & (labels >= start) & (labels < start + width)
            if self._is_split
            else counted
        )
        place = torch.where(own, labels - start, 0)[:, None]
        normaliser, shift, sums = None, None, None
        if by_kernel:
            from threefold.training.loss_kernel import row_sums

            shares = logits.contiguous()
            sums, total = row_sums(shares)
            normaliser = sums.sum(0)
            target = shares.gather(1, place)[:, 0] - sums[0] - sums[1]
            spread = total - width * normaliser if self.label_smoothing else None
        else:
            shares = F.log_softmax(logits, -1, dtype=torch.float32)
            target = shares.gather(1, place)[:, 0] if width else shares.sum(-1)
            spread = shares.sum(-1) if self.label_smoothing else None
            if self._is_split or self.z_loss:
                normaliser = (
                    logits.amax(-1).float() - shares.amax(-1) if width else target - math.inf
                )
        if self._is_split:
            assert normaliser is not None
            normaliser, shift, target, spread = self._over_parts(
                normaliser, target, spread, own, width
            )
            # A label that no part has gives no loss.
            target = torch.where((labels >= 0) & (labels < self.vocabulary), target, math.nan)
        cross_entropy = torch.where(counted, -target, 0.0)
        objective = cross_entropy
        if spread is not None:
            mean = spread / (self.vocabulary if self._is_split else width)
            objective = (1 - self.label_smoothing) * objective
            objective = objective - self.label_smoothing * torch.where(counted, mean, 0.0)
        if normaliser is not None and self.z_loss:
            objective = objective + self.z_loss * torch.where(counted, normaliser, 0.0).square()
        return (
            objective,
            cross_entropy,
            _Found(shares, shift, own, place, counted, normaliser, sums),
        )

    def _over_parts(
        self, part: Tensor, target: Tensor, spread: Tensor | None, own: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """For the whole vocabulary: the log of the softmax' sum, its difference to the part's, the target's
        log-probability, and the sum of all of them (Megatron-LM, arXiv:1909.08053, section 3).

        A few numbers per token are sent, never all of its logits: the largest part; the sum of the parts' sums, the
        target's logit, and the sum of the logits if labels are smoothed.
        """
        largest = part.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        rest = part - largest
        terms = [rest.exp(), torch.where(own, target + rest, 0.0)]
        if spread is not None:
            terms.append(spread + width * rest if width else spread)
        sums = torch.stack(terms)
        dist.all_reduce(sums, group=self.group)
        log_sum = sums[0].log()
        whole = None if spread is None else sums[2] - self.vocabulary * log_sum
        return largest + log_sum, rest - log_sum, sums[1] - log_sum, whole

    def _gradient(self, saved: _Found) -> Tensor:
        """The gradient of each counted token's objective by its logits, in the place of `saved.shares`."""
        shares, shift, own, place, _, normaliser, _ = saved
        gradient = (shares if shift is None else shares.add_(shift[:, None])).exp_()
        if not (width := gradient.shape[1]):
            return gradient
        if normaliser is not None and self.z_loss:
            gradient.mul_((1 + 2 * self.z_loss * normaliser)[:, None])
        if self.label_smoothing:
            gradient.sub_(self.label_smoothing / (self.vocabulary if self._is_split else width))
        counted = own[:, None].to(gradient)  # a bool times a number has torch's default type
        at_target = gradient.gather(1, place) - counted * (1 - self.label_smoothing)
        return gradient.scatter_(1, place, at_target)

    def _gradient_by_kernel(self, saved: _Found, dtype: torch.dtype) -> Tensor:
        from threefold.training.loss_kernel import gradients

        logits, shift, own, place, _, _, sums = saved
        assert sums is not None
        vocabulary = self.vocabulary if self._is_split else logits.shape[1]
        return gradients(
            logits,
            sums[0],
            sums[1] if shift is None else sums[1] - shift,
            torch.where(own, place[:, 0], -1),
            z_loss=self.z_loss,
            spread=self.label_smoothing / vocabulary,
            at_target=1 - self.label_smoothing,
            dtype=dtype,
        )

    @property
    def _is_split(self) -> bool:
        return self.group is not None and self.vocabulary_start is not None


class _Found(NamedTuple):
    """The ingredients of the gradient.

    Attributes:
        shares: [tokens, width], log of the softmax over this rank's part; for the kernels, the logits.
        shift: [tokens], log of the part's share in the whole vocabulary; None: it is whole.
        own: [tokens], whether the label counts and is in this part, at `place`, [tokens, 1].
        counted: [tokens], whether the label counts.
        normaliser: [tokens], log of the softmax' sum; None: not needed.
        sums: from the kernels, [2, tokens]: the two parts of a normaliser over this rank's part.
    """

    shares: Tensor
    shift: Tensor | None
    own: Tensor
    place: Tensor
    counted: Tensor
    normaliser: Tensor | None
    sums: Tensor | None = None


class _OfEach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, loss: TokenLoss
    ) -> tuple[Tensor, Tensor]:
        objective, cross_entropy, saved = loss._measured(logits, labels)
        ctx.loss = loss
        ctx.save_for_backward(*saved)
        entropy = cross_entropy.clone()  # the objective may be the same tensor
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        saved = _Found(*ctx.saved_tensors)
        return (
            ctx.loss._gradient(saved).mul_((gradients[0] * saved.counted)[:, None]),
            None,
            None,
        )


@dataclass(frozen=True)
class RouterLoss:
    """The auxiliary loss of a model's routers over the whole global batch, so that it too follows a single process.

    Per layer and token a router spreads a probability over the experts and picks top_k. With C_e the picks and P_e the
    probability of expert e, summed over the layers and all N of their tokens, the loss is E * sum_e (C_e / N) (P_e / N)
    (Switch Transformer, arXiv:2101.03961, equation 4, as transformers computes it). C carries no gradient but belongs
    to all ranks and micro-batches, so it is counted before the first backward; of P each rank adds its own part.
    """

    num_experts: int
    top_k: int
    coefficient: float

    @classmethod
    def of(cls, model: PreTrainedModel) -> RouterLoss | None:
        """The router loss that a model's config asks for with `output_router_logits: true`, or None.

        The model itself knows its numbers, for they have other names in each config.
        """
        if not getattr(model.config.get_text_config(), "output_router_logits", False):
            return None
        experts, top_k, coefficient = (
            _number(model, names) for names in (NUM_EXPERTS, CHOSEN_EXPERTS, _COEFFICIENT)
        )
        return cls(int(experts), int(top_k), coefficient)

    def picks(self, router_logits: tuple[Tensor, ...], counted: Tensor) -> Tensor:
        """[num_experts + 1] float64: picks of each expert over all layers, then the number of layer-tokens.

        Args:
            router_logits: [tokens, experts] a layer.
            counted: [tokens], 1.0, or 0.0 for padding, which belongs to no document.
        """
        counts = torch.zeros(self.num_experts + 1, dtype=torch.float64, device=counted.device)
        weights = counted.double()
        for logits in router_logits:
            # Picked like transformers, by probabilities, whose ties can differ from those of the logits.
            flat = logits.detach().reshape(-1, self.num_experts)
            chosen = torch.softmax(flat, dim=-1).topk(self.top_k, dim=-1).indices
            counts.scatter_add_(0, chosen.flatten(), weights.repeat_interleave(self.top_k))
            counts[-1] += weights.sum()
        return counts

    def share(
        self, router_logits: tuple[Tensor, ...], picks: Tensor, counted: Tensor
    ) -> Tensor:
        """The contribution of these tokens to the loss, given the picks of the whole global batch; differentiable."""
        probabilities = torch.zeros(self.num_experts, device=counted.device)
        for logits in router_logits:
            flat = logits.float().reshape(-1, self.num_experts)
            probabilities = probabilities + (
                torch.softmax(flat, dim=-1) * counted[:, None]
            ).sum(0)
        rows = picks[-1].clamp(min=1)
        return self.num_experts * (probabilities * (picks[:-1] / rows / rows).float()).sum()


_COEFFICIENT = ("router_aux_loss_coef", "aux_loss_coef")


def _number(model: PreTrainedModel, names: tuple[str, ...]) -> float:
    """The first number under one of the names, of the model itself or of its config; NaN if there is none."""
    owners = (model, model.config, model.config.get_text_config())
    values = [vars(owner)[name] for owner in owners for name in names if name in vars(owner)]
    return next((value for value in values if isinstance(value, int | float)), math.nan)


def router_problems(model: PreTrainedModel) -> list[Problem]:
    """Why the routers' loss that a model's config asks for is not the one computed here; empty if it is, or if none is.

    The model's module has transformers' function for it, which is asked for the loss of random logits.
    """
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return []
    kind = model.config.model_type
    theirs = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    numbers = [_number(model, names) for names in (NUM_EXPERTS, CHOSEN_EXPERTS, _COEFFICIENT)]
    if theirs is None or any(map(math.isnan, numbers)):
        what = f"model.config has output_router_logits = true, but {kind!r} has no routers' loss in transformers"
    elif not _same_loss(theirs, RouterLoss.of(model)):
        what = f"model.config has output_router_logits = true, but the routers' loss of {kind!r} is a different one"
    else:
        return []
    return [
        Problem(
            what,
            "the loss of Switch Transformer, as for Mixtral: its routers would be trained without it, or with another",
            "output_router_logits: false   (in model.config, or in the model's config.json)",
        )
    ]


def _same_loss(theirs: Any, loss: RouterLoss | None) -> bool:
    assert loss is not None
    draws = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, loss.num_experts, generator=draws) for _ in range(2))
    counted = torch.tensor([[1, 1, 1], [1, 1, 0]])
    try:
        expected = theirs(logits, loss.num_experts, loss.top_k, counted)
    except Exception:  # another signature, other logits
        return False
    ours = loss.share(logits, loss.picks(logits, counted.flatten()), counted.flatten())
    return bool(torch.allclose(ours, torch.as_tensor(expected).float(), rtol=1e-5))
