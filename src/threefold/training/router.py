"""The auxiliary loss of a router over the whole global batch, so that it too follows a single process.

Per layer and token a router spreads a probability over the experts and picks top_k. With C_e the picks and P_e the
probability of expert e, summed over the layers and all N of their tokens, the loss is E * sum_e (C_e / N) (P_e / N)
(Switch Transformer, arXiv:2101.03961, equation 4, as transformers computes it). C carries no gradient but belongs to
all ranks and micro-batches, so it is counted before the first backward; of P each rank adds its own part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig


@dataclass(frozen=True)
class RouterLoss:
    """Sizes of a model's routers and the weight of their loss."""

    num_experts: int
    top_k: int
    coefficient: float

    @classmethod
    def of(cls, config: PretrainedConfig) -> RouterLoss | None:
        """The router loss that a model's config asks for with `output_router_logits: true`, or None."""
        text: Any = config.get_text_config()
        if not getattr(text, "output_router_logits", False):
            return None
        experts = getattr(text, "num_local_experts", None) or text.num_experts
        return cls(experts, text.num_experts_per_tok, text.router_aux_loss_coef)

    def picks(self, router_logits: tuple[Tensor, ...]) -> Tensor:
        """[num_experts + 1] float64: picks of each expert over all layers, then the number of layer-tokens."""
        counts = torch.zeros(self.num_experts + 1, dtype=torch.float64, device=router_logits[0].device)
        for logits in router_logits:
            # As transformers picks: of the probabilities, whose ties can differ from those of the logits.
            chosen = torch.softmax(logits.detach(), dim=-1).topk(self.top_k, dim=-1).indices
            counts[:-1] += torch.bincount(chosen.flatten(), minlength=self.num_experts)
            counts[-1] += len(logits)
        return counts

    def share(self, router_logits: tuple[Tensor, ...], picks: Tensor) -> Tensor:
        """What these tokens add to the loss, given the picks of the whole global batch; differentiable."""
        probabilities = torch.stack([torch.softmax(logits.float(), dim=-1).sum(0) for logits in router_logits]).sum(0)
        rows = picks[-1]
        return self.num_experts * (probabilities * (picks[:-1] / rows / rows).float()).sum()


def summed(picks: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Picks over all ranks that hold distinct tokens."""
    if group is not None:
        dist.all_reduce(picks, group=group)
    return picks
