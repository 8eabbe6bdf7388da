"""AdamW over parameters of any mesh, and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from threefold.config.schema import OptimizerConfig


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters as they are now; build it right after the model and before any forward.

    Only matrices have weight decay. A group holds parameters of one mesh: torch's fused kernel does not mix them.
    """
    groups: dict[tuple[object, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((mesh, parameter.ndim >= 2), []).append(parameter)
    asked = [
        {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0}
        for (_, decays), parameters in groups.items()
    ]
    lr = 0.0 if config.lr == "auto" else config.lr  # each step sets its own (`learning_rate`)
    return torch.optim.AdamW(asked, lr=lr, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(step: int, *, num_steps: int, config: OptimizerConfig) -> float:
    """The rate used in `step` (from 1): lr * min(1, step / warmup_steps) * shape.

    The shape is 1 up to the first step with the full rate, which is step 1 without warm-up; it may then fall to
    min_lr / lr at the last step.
    """
    lr, full = config.lr, max(1, config.warmup_steps)
    assert lr != "auto", "settled before training"
    if step <= full:
        return lr * (step / full)  # exactly lr when it is full
    if config.schedule == "constant":
        return lr
    done = min(1.0, (step - full) / max(1, num_steps - full))
    share = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (lr - config.min_lr) * share
