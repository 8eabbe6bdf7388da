"""Sum of the cross entropy over target tokens, also where logits are split over the vocabulary.

The loss of a step is this sum divided by the number of target tokens of the whole global batch (labels of -100 are
none); the division is `step`'s, which knows the count. Computed in float32 whatever the type of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, vocabulary_start: int | None = None
) -> Tensor:
    """Scalar sum of -log softmax(logits)[label] over the labels that are not -100.

    Args:
        logits: [batch, sequence, vocabulary], or this rank's [batch, sequence, part of the vocabulary].
        labels: int64 [batch, sequence], already aligned with the logits.
        group: the ranks that hold the other parts of the vocabulary (the tp axis).
        vocabulary_start: first entry of this rank's part.
    """
    flat = logits.flatten(0, -2).float()
    if group is None or vocabulary_start is None:
        return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return _SplitCrossEntropy.apply(flat, labels.flatten(), group, vocabulary_start)  # type: ignore[return-value]


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy over a vocabulary that several ranks share (Megatron-LM, arXiv:1909.08053, section 3).

    Three numbers per token travel, never a logit: its largest logit, its sum of exponentials, its target's logit.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup, start: int) -> Tensor:
        # logits: (tokens, part of the vocabulary); the last part may be shorter, or empty
        tokens, width = logits.shape
        largest = logits.amax(-1) if width else logits.new_full((tokens,), float("-inf"))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponentials = (logits - largest[:, None]).exp_()
        own = (labels >= start) & (labels < start + width)
        place = torch.where(own, labels - start, 0)
        if width:
            target = torch.where(own, logits.gather(1, place[:, None])[:, 0] - largest, 0.0)
        else:
            target = torch.zeros_like(largest)
        sums = torch.stack([exponentials.sum(-1), target])
        dist.all_reduce(sums, group=group)
        counted = labels != IGNORED
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), own, place, counted)
        return torch.where(counted, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, own, place, counted = ctx.saved_tensors
        gradient = probabilities * (counted * gradients[0])[:, None]
        if gradient.shape[1]:
            rows = own.nonzero()[:, 0]
            gradient[rows, place[rows]] -= gradients[0]
        return gradient, None, None, None
