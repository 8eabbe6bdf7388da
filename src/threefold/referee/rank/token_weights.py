"""What a loss that is computed outside of the model trains each output on: its target, and its weight in the sum.

Of a cross-entropy, the gradient at the logits of a token is `weight * (softmax(logits) - onehot(target))`: both follow
from the gradient, and what is left over shows that the loss is another one.
"""

from __future__ import annotations

import torch

# What rounding leaves over, as a share of the gradient.
_LEFT_OVER = {torch.float32: 1e-4, torch.float64: 1e-4}
_LEFT_OVER_LOW = 0.02


def token_weights(logits: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Targets and weights [...] of logits [..., classes] and their gradient; None if the loss is no cross-entropy.

    Where the weight is 0, the target is -100.
    """
    most = _LEFT_OVER.get(gradient.dtype, _LEFT_OVER_LOW)
    share = torch.softmax(logits.float(), dim=-1)
    gradient = gradient.float()
    targets = gradient.argmin(dim=-1)
    direction = share.scatter_add(-1, targets[..., None], torch.full_like(share[..., :1], -1.0))
    squared = (direction * direction).sum(-1)
    weights = (gradient * direction).sum(-1) / squared.clamp_min(torch.finfo(torch.float32).tiny)
    left = torch.linalg.vector_norm(gradient - weights[..., None] * direction)
    if not bool(left <= most * torch.linalg.vector_norm(gradient)):
        return None
    return torch.where(weights != 0, targets, -100), weights
