"""Optimizers of single IEEE 754 operations: the update of a number does not depend on its neighbours in memory.

A fused kernel takes vectors of numbers, and the remainder of a shard one by one with other instructions, which may
round a product and a sum together. Its size depends on the number of shards. A kernel of a single product or sum
rounds the same either way. The root is taken in float64, whose errors do not reach the float32 that it is rounded to.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from threefold.model.collectives import local_part
from threefold.model.exact.sums import in_blocks
from threefold.optim.bfloat16_moments import NarrowAdamW


class ExactAdamW(torch.optim.AdamW):
    """torch's AdamW in float32, the same bits for any shards (`train.reduce: exact`)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all parameters."""
        for parameter, gradient, group in _with_gradients(self):
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
            (beta, beta_square), number = group["betas"], int(state["step"])
            rate = -group["lr"] / (1 - beta**number)
            root_scale = 1 / math.sqrt(1 - beta_square**number)
            moments = (local_part(state["exp_avg"]), local_part(state["exp_avg_sq"]))
            for parts in in_blocks(local_part(parameter), gradient, *moments):
                update(*parts, rate=rate, root_scale=root_scale, group=group)


def _with_gradients(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """(parameter, this rank's part of its gradient, its group) of those that have a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, local_part(parameter.grad), group


def update(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    rate: float | Tensor,
    root_scale: float | Tensor,
    group: dict[str, Any],
) -> None:
    """AdamW of float32 numbers, one product or one sum at a time; `add_` with a factor, `lerp_`, `addcdiv_` are two.

    Args:
        rate, root_scale: -lr and 1 with the biases of the first and of the second moment corrected, in float32.
    """
    beta, beta_square = group["betas"]
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    mean.mul_(beta).add_(gradient * (1 - beta))
    square.mul_(beta_square).add_((gradient * gradient).mul_(1 - beta_square))
    root = square.double().sqrt_().float()
    root.mul_(root_scale).add_(group["eps"])
    weight.add_((mean / root).mul_(rate))


class ExactNarrowAdamW(NarrowAdamW, ExactAdamW):
    """As `ExactAdamW`; between the steps its moments are rounded to bfloat16, each by itself."""


class ExactSGD(torch.optim.SGD):
    """torch's SGD in float32, with its momentum: the same bits for any shards."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all parameters."""
        for parameter, gradient, group in _with_gradients(self):
            weight = local_part(parameter)
            change = (
                gradient + weight * group["weight_decay"] if group["weight_decay"] else gradient
            )
            if momentum := group["momentum"]:
                state = self.state[parameter]
                begins = "momentum_buffer" not in state
                if begins:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                kept = local_part(state["momentum_buffer"])
                kept.mul_(momentum).add_(
                    change if begins else change * (1 - group["dampening"])
                )
                change = change + kept * momentum if group["nesterov"] else kept
            weight.add_(change * -group["lr"])
