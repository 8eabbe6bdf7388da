"""Cross entropy over target tokens, also if logits are split over the vocabulary, and what may be added to it.

Sums, not means: the loss of a step is the sum divided by the number of target tokens of the whole global batch (labels
of -100 do not count), and only `step` knows that count. Computed in float32 for logits of any type.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from threefold.data.rows.concat import IGNORED
from threefold.errors import Problem


@dataclass(frozen=True)
class TokenLoss:
    """The loss of some tokens, as sums.

    Attributes:
        group: the ranks that hold the other parts of the vocabulary (the tp axis), or None.
        vocabulary_start: first entry of this rank's part.
        vocabulary: entries of the whole vocabulary; needed for label smoothing on parts.
        label_smoothing: share of the target's probability that is spread over the vocabulary (arXiv:1512.00567).
        z_loss: weight of the squared logarithm of the softmax' sum (PaLM, arXiv:2204.02311, section 5).
        ignored: the label of a token that is not a target.
    """

    group: dist.ProcessGroup | None = None
    vocabulary_start: int | None = None
    vocabulary: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignored: int = IGNORED

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(what is minimised, the cross entropy alone): scalar sums over the labels that are not -100.

        Args:
            logits: [tokens, vocabulary], or this rank's [tokens, part of the vocabulary].
            labels: int64 [tokens].
        """
        logits = logits.float()
        if self.group is not None and self.vocabulary_start is not None:
            sums: tuple[Tensor, Tensor] = _SplitLoss.apply(logits, labels, self)  # type: ignore[assignment]
            return sums[0], sums[1].detach()
        if not self.label_smoothing and not self.z_loss:
            total = F.cross_entropy(logits, labels, ignore_index=self.ignored, reduction="sum")
            return total, total.detach()
        counted = labels != self.ignored
        normaliser = logits.logsumexp(-1)
        target = logits.gather(1, labels.where(counted, 0)[:, None])[:, 0]
        objective = normaliser - (1 - self.label_smoothing) * target + self.z_loss * normaliser.square()
        if self.label_smoothing:
            objective = objective - self.label_smoothing * logits.mean(-1)
        return objective.where(counted, 0.0).sum(), (normaliser - target).where(counted, 0.0).sum().detach()


class _SplitLoss(torch.autograd.Function):
    """Cross entropy over a vocabulary that several ranks share (Megatron-LM, arXiv:1909.08053, section 3).

    A few numbers per token are sent, never all of its logits: the largest one; the sum of exponentials, the target's
    logit, and the sum of the logits if labels are smoothed.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, loss: TokenLoss) -> tuple[Tensor, Tensor]:
        # logits: (tokens, part of the vocabulary); the last part may be shorter, or empty
        tokens, width = logits.shape
        start = loss.vocabulary_start or 0
        largest = logits.amax(-1) if width else logits.new_full((tokens,), float("-inf"))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=loss.group)
        shifted = logits - largest[:, None]
        own = (labels >= start) & (labels < start + width)
        place = torch.where(own, labels - start, 0)
        target = torch.where(own, shifted.gather(1, place[:, None])[:, 0], 0.0) if width else torch.zeros_like(largest)
        parts = [target]
        if loss.label_smoothing:
            parts.append(shifted.sum(-1))
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), *parts])
        dist.all_reduce(sums, group=loss.group)
        counted = labels != loss.ignored
        # Of the true logits, not of the shifted ones.
        log_sum = sums[0].log()
        cross_entropy = torch.where(counted, log_sum - sums[1], 0.0)
        objective = cross_entropy
        normaliser = log_sum + largest
        if loss.label_smoothing:
            spread = log_sum - sums[2] / loss.vocabulary
            objective = (1 - loss.label_smoothing) * cross_entropy + loss.label_smoothing * spread.where(counted, 0.0)
        if loss.z_loss:
            objective = objective + loss.z_loss * normaliser.square().where(counted, 0.0)
        ctx.loss = loss
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), own, place, counted, normaliser)
        totals = objective.sum(), cross_entropy.sum()
        ctx.mark_non_differentiable(totals[1])
        return totals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities, own, place, counted, normaliser = ctx.saved_tensors
        loss: TokenLoss = ctx.loss
        scale = counted * gradients[0]
        weight = scale * (1 + 2 * loss.z_loss * normaliser) if loss.z_loss else scale
        gradient = probabilities * weight[:, None]
        if gradient.shape[1]:
            if loss.label_smoothing:
                gradient -= (scale * (loss.label_smoothing / loss.vocabulary))[:, None]
            rows = own.nonzero()[:, 0]
            gradient[rows, place[rows]] -= gradients[0] * (1 - loss.label_smoothing)
        return gradient, None, None


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
        experts, top_k, coefficient = (_number(model, names) for names in (_EXPERTS, _TOP_K, _COEFFICIENT))
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
            # As transformers picks: of the probabilities, whose ties can differ from those of the logits.
            flat = logits.detach().reshape(-1, self.num_experts)
            chosen = torch.softmax(flat, dim=-1).topk(self.top_k, dim=-1).indices
            counts.scatter_add_(0, chosen.flatten(), weights.repeat_interleave(self.top_k))
            counts[-1] += weights.sum()
        return counts

    def share(self, router_logits: tuple[Tensor, ...], picks: Tensor, counted: Tensor) -> Tensor:
        """What these tokens add to the loss, given the picks of the whole global batch; differentiable."""
        probabilities = torch.zeros(self.num_experts, device=counted.device)
        for logits in router_logits:
            flat = logits.float().reshape(-1, self.num_experts)
            probabilities = probabilities + (torch.softmax(flat, dim=-1) * counted[:, None]).sum(0)
        rows = picks[-1].clamp(min=1)
        return self.num_experts * (probabilities * (picks[:-1] / rows / rows).float()).sum()


# How transformers' models and configs name a routers' numbers.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk")
_COEFFICIENT = ("router_aux_loss_coef", "aux_loss_coef")


def _number(model: PreTrainedModel, names: tuple[str, ...]) -> float:
    """The first number under one of the names, of the model itself or of its config; NaN if there is none."""
    owners = (model, model.config, model.config.get_text_config())
    found = [vars(owner)[name] for owner in owners for name in names if name in vars(owner)]
    return next((value for value in found if isinstance(value, int | float)), math.nan)


def router_problems(model: PreTrainedModel) -> list[Problem]:
    """Why the routers' loss that a model's config asks for is not the one computed here; empty if it is, or if none is.

    The model's module has transformers' function for it, which is asked for the loss of random logits.
    """
    if not getattr(model.config.get_text_config(), "output_router_logits", False):
        return []
    kind = model.config.model_type
    theirs = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    numbers = [_number(model, names) for names in (_EXPERTS, _TOP_K, _COEFFICIENT)]
    if theirs is None or any(map(math.isnan, numbers)):
        what = f"model.config has output_router_logits = true, but {kind!r} has no routers' loss in transformers"
    elif not _same_loss(theirs, RouterLoss.of(model)):
        what = f"model.config has output_router_logits = true, but the routers' loss of {kind!r} is another one"
    else:
        return []
    expected = (
        "the loss of Switch Transformer, as for Mixtral: its routers would be trained without it, or with another"
    )
    return [Problem(what, expected, "output_router_logits: false   (in model.config, or in the model's config.json)")]


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
