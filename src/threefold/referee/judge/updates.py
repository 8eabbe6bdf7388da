"""The optimizer's use of the gradients: the norm that they are clipped by, and the update of each weight.

The update is recomputed by torch's own optimizer in one process from the recorded gradients and settings, from the
first step of the optimizer on; each weight must move accordingly.
"""

from itertools import chain, pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from threefold.referee.judge.checked_steps import CheckedStep
from threefold.referee.judge.laws import factor_of
from threefold.referee.judge.parts import (
    JudgedPart,
    Refuted,
    Unjudgeable,
    judges,
    listed,
    none_here,
    numbers_text,
    proved,
)

NORM, UPDATES = "norm of gradients", "updates"

_KNOWN = ("AdamW", "Adam", "SGD")
# The epsilon that torch's clip_grad_norm_ adds to the norm.
_CLIP_EPSILON = 1e-6
_FACTOR = 0.01
# Of a norm: float32 sums it; in bfloat16 the norm itself is rounded.
_FACTOR_OF_FLOAT32 = 1e-4
# The norms that programs clip by: the root of squares, the largest value, the sum.
_ORDERS = (2.0, torch.inf, 1.0)
# Of an update, besides what float32 weights lose to rounding: a decay that is done twice is a few times as much.
_LEFT = 1e-4
_ROUNDING = 1.2e-7
# Of an update: so little is lost, or is beside a multiple of it.
_SMALL = 0.02


@judges(NORM)
def judge_norms(steps: list[CheckedStep]) -> JudgedPart:
    """Whether the norm that gradients are clipped by is that of all of them."""
    clipped = [step for step in steps if step.clip]
    if not clipped:
        return none_here("gradients are not clipped by torch's clip_grad_norm_")
    for step in clipped:
        if why := step.clip.get("unknown"):
            raise Unjudgeable(why)
        if most := step.clip.get("idle"):
            raise Refuted(
                f"the clip to a norm of {most:g} before step {step.number} has no effect",
                "clip_grad_norm_ between the backward pass and the optimizer's step",
                "where it is called: before the backward pass there is no gradient, after the step it has been used",
            )
        if "others" in step.clip:
            raise Unjudgeable("gradients of other modules are clipped with those of the model")
        # Non-finite values are None in a record.
        if (norm := step.clip["norm"]) is None:
            raise Unjudgeable(
                f"the norm of step {step.number} is not finite, or was computed in a way that hides it"
            )
        norms = [_norm(step.gradients, order) for order in _ORDERS]
        factor = _FACTOR if step.weight_types - {"float32"} else _FACTOR_OF_FLOAT32
        if not any(abs(norm - each) <= factor * each for each in norms):
            raise Refuted(
                f"in step {step.number} gradients are clipped by a norm of {norm:.6g}, "
                f"x{norm / max(norms[0], 1e-300):.4f} of theirs",
                f"{norms[0]:.6g}, the norm of all gradients",
                "what computes the norm: the squares of parts must be summed over the ranks that hold them, once",
            )
    return proved(f"gradients are clipped by the norm of all of them in {len(clipped)} steps")


def _norm(gradients: dict[str, Tensor], order: float = 2.0) -> float:
    return float(
        torch.stack([each.double().norm(order) for each in gradients.values()]).norm(order)
    )


@judges(UPDATES)
def judge_updates(steps: list[CheckedStep]) -> JudgedPart:
    """Whether each weight moves from one checked step to the next by the optimizer's update."""
    first = steps[0].optimizer
    if len(steps) < 2:
        raise Unjudgeable("two steps in a row must be recorded (--steps 2)")
    if first["class"] not in _KNOWN:
        raise Unjudgeable(f"{first['class']} is not one of {', '.join(_KNOWN)}")
    if not first["is_new"]:
        raise Unjudgeable("the optimizer had a state before the first step of this program")
    for step in steps:
        if why := step.clip.get("unknown"):
            raise Unjudgeable(why)
    if low := sorted(steps[0].weight_types - {"float32"}):
        raise Unjudgeable(f"weights in {low[0]} round away most of an update")
    weights = {name: nn.Parameter(value.clone()) for name, value in steps[0].weights.items()}
    groups = [
        {"params": [weights[name] for name in each["names"]], **each["settings"]}
        for each in first["groups"]
    ]
    optimizer = getattr(torch.optim, first["class"])(groups)
    shapes = [[group["names"] for group in step.optimizer["groups"]] for step in steps]
    taken = {*chain(*shapes[0])}
    if left_out := [name for name in steps[0].trained if name not in taken]:
        raise Refuted(
            f"{len(left_out)} parameters that are trained are in no group of the optimizer: {listed(left_out)}",
            "each parameter with requires_grad in one group",
            "what the optimizer is made of: parameters created, tied or replaced later",
        )
    if any(shape != shapes[0] for shape in shapes):
        raise Unjudgeable("the groups of the optimizer change between steps")
    if not sum(
        _check_update(step, after, optimizer, weights) for step, after in pairwise(steps)
    ):
        raise Unjudgeable("no weight moves by more than its rounding error")
    each = f"each of {len(taken)} parameters moves as torch's {first['class']} says"
    return proved(f"in {numbers_text(steps[0].number, steps[-2].number)} {each}")


def _check_update(
    step: CheckedStep,
    after: CheckedStep,
    optimizer: Optimizer,
    weights: dict[str, nn.Parameter],
) -> int:
    """Number of compared parameters of an update; raises its problem."""
    for group, described in zip(optimizer.param_groups, step.optimizer["groups"], strict=True):
        group.update(described["settings"])
    scale = 1.0
    if "most" in step.clip:
        # By the norm that the program has found, right or wrong.
        norm = (step.clip["norm"] or _norm(step.gradients)) + _CLIP_EPSILON
        scale = min(1.0, step.clip["most"] / norm)
    for name, parameter in weights.items():
        # From the recorded weights on each time, so that rounding does not grow.
        parameter.data.copy_(step.weights[name])
        gradient = step.gradients.get(name)
        parameter.grad = None if gradient is None else gradient * scale
    optimizer.step()
    num_compared = 0
    odd: dict[str, str] = {}
    for name in step.trained:
        before = step.weights[name]
        expected = weights[name].detach() - before
        moved = after.weights[name] - before
        lost, size = _ROUNDING * float(before.norm()), float(expected.norm())
        num_compared += lost <= _SMALL * size
        if not (moved - expected).norm() <= _LEFT * size + lost:
            if not moved.isfinite().all():
                step.require_finite()
            factor, left = factor_of(expected, moved)
            is_multiple = left <= min(_SMALL, abs(factor - 1)) or not moved.any()
            odd[name] = f" x{factor:.4g}" if is_multiple else " differently"
    if not odd:
        return num_compared
    kind = step.optimizer["class"]
    raise Refuted(
        f"in step {step.number} {len(odd)} of {len(step.trained)} parameters do not move as {kind} says: "
        f"{listed(odd, odd)}",
        f"the update of torch's {kind} from the recorded gradients and settings",
        "what happens between the gradients and the weights: a second clip, gradients scaled after the norm, a "
        "weight that is written by hand, another optimizer",
    )
