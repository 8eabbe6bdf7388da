"""The learning rate as a function of the step."""

import math

from threefold.config.optimizer import OptimizerConfig


def learning_rate(step: int, *, num_steps: int, config: OptimizerConfig) -> float:
    """The rate used in `step` (from 1): lr * min(1, step / warmup_steps) * shape.

    The shape is 1 up to the first step with the full rate, which is step 1 without warm-up. It may then fall to
    min_lr / lr at the last step (`wsd`: in the last decay_steps), or as the root of the first full step / step.
    """
    lr, full = config.lr, max(1, config.warmup_steps)
    assert lr != "auto", "settled before training"
    if step <= full:
        return lr * (step / full)  # exactly lr when it is full
    if config.schedule == "constant":
        return lr
    if config.schedule == "inverse_sqrt":
        return lr * math.sqrt(full / step)
    if config.schedule == "wsd":
        assert config.decay_steps is not None
        full = max(full, num_steps - config.decay_steps)
        if step <= full:
            return lr
    done = min(1.0, (step - full) / max(1, num_steps - full))
    return config.min_lr + (lr - config.min_lr) * _share(done, config)


def _share(done: float, config: OptimizerConfig) -> float:
    """How much of the fall from lr to min_lr is left, when a share of its steps is done."""
    if config.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if config.schedule == "wsd" and config.decay_shape == "1-sqrt":
        return 1.0 - math.sqrt(done)
    return 1.0 - done
