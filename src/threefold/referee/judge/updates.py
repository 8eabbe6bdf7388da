"""What the optimizer makes of the gradients: the norm that they are clipped by, and the update of each weight.

The update is computed again, by torch's own optimizer in one process from the recorded gradients and settings, from the
first step of the optimizer on; each weight must move as it says.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from threefold.referee.judge.checked_steps import CheckedStep
from threefold.referee.judge.laws import factor_of, grouped
from threefold.referee.judge.parts import JudgedPart, none_here, not_judged, proved, refuted

NORM, UPDATES = "norm of gradients", "updates"

_KNOWN = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "SGD": torch.optim.SGD}
# What torch's clip_grad_norm_ adds to the norm.
_CLIP_EPSILON = 1e-6
_FACTOR = 0.01
# Of an update: float32 weights round it.
_LEFT = 0.02


def judge_norms(steps: list[CheckedStep]) -> JudgedPart:
    """Whether the norm that gradients are clipped by is that of all of them."""
    clipped = [(step, step.clip) for step in steps if step.clip is not None and step.clip["by_norm"]]
    known = [(step, clip["norm"]) for step, clip in clipped if clip["norm"] is not None]
    if not clipped:
        return none_here(NORM, "gradients are not clipped by torch's clip_grad_norm_")
    if not known:
        return not_judged(NORM, "the norm was found in a way that does not show it")
    for step, norm in known:
        whole = _norm(step.gradients)
        if not abs(norm - whole) <= _FACTOR * whole:
            return refuted(
                NORM,
                f"in step {step.number} gradients are clipped by a norm of {norm:.6g}, "
                f"x{norm / max(whole, 1e-300):.4f} of theirs",
                expected=f"{whole:.6g}, the norm of all gradients",
                where="what computes the norm: the squares of parts must be summed over the ranks that hold them, once",
            )
    return proved(NORM, f"gradients are clipped by the norm of all of them in {len(known)} steps")


def _norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([each.double().norm() for each in gradients.values()])))


def judge_updates(steps: list[CheckedStep]) -> JudgedPart:
    """Whether each weight moves from one checked step to the next as the optimizer says."""
    first = steps[0].optimizer
    if len(steps) < 2:
        return not_judged(UPDATES, "two steps in a row must be recorded (--steps 2)")
    if first["class"] not in _KNOWN:
        return not_judged(UPDATES, f"{first['class']} is not one of {', '.join(_KNOWN)}")
    if not first["is_new"]:
        return not_judged(UPDATES, "the optimizer had a state before the first step of this program")
    if any(step.clip is not None and not step.clip["by_norm"] for step in steps):
        return not_judged(UPDATES, "gradients are clipped by value")
    if low := sorted(steps[0].weight_types - {"float32"}):
        return not_judged(UPDATES, f"weights in {low[0]} round most of an update away")
    weights = {name: nn.Parameter(value.clone()) for name, value in steps[0].weights.items()}
    optimizer = _made(first, weights)
    listed = {name for group in first["groups"] for name in group["names"]}
    if left_out := [name for name in steps[0].trained if name not in listed]:
        return refuted(
            UPDATES,
            f"{len(left_out)} parameters that are trained are in no group of the optimizer: "
            f"{', '.join(grouped(dict.fromkeys(left_out, 0.0)))}",
            expected="each parameter with requires_grad in one group",
            where="what the optimizer is made of: parameters that were made, tied or replaced after it",
        )
    shapes = [[group["names"] for group in step.optimizer["groups"]] for step in steps]
    if any(shape != shapes[0] for shape in shapes):
        return not_judged(UPDATES, "the groups of the optimizer change between steps")
    num_judged = 0
    for step, after in itertools.pairwise(steps):
        part, num_compared = _judge_update(step, after, optimizer, weights)
        if part is not None:
            return part
        num_judged += num_compared
    if not num_judged:
        return not_judged(UPDATES, "no weight moves by more than its rounding")
    numbers = f"steps {steps[0].number} to {steps[-2].number}" if len(steps) > 2 else f"step {steps[0].number}"
    return proved(UPDATES, f"in {numbers} each of {len(listed)} parameters moves as torch's {first['class']} says")


def _made(described: dict[str, Any], weights: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [weights[name] for name in group["names"]], **group["settings"]} for group in described["groups"]
    ]
    return _KNOWN[described["class"]](groups)


def _judge_update(
    step: CheckedStep, after: CheckedStep, optimizer: torch.optim.Optimizer, weights: dict[str, nn.Parameter]
) -> tuple[JudgedPart | None, int]:
    """What is wrong with an update, and how many parameters were compared."""
    for group, described in zip(optimizer.param_groups, step.optimizer["groups"], strict=True):
        group.update(described["settings"])
    scale = 1.0
    if step.clip is not None:
        scale = min(1.0, step.clip["most"] / (_norm(step.gradients) + _CLIP_EPSILON))
    for name, parameter in weights.items():
        # From the recorded weights on each time, so that rounding does not grow.
        parameter.data.copy_(step.weights[name])
        gradient = step.gradients.get(name)
        parameter.grad = None if gradient is None else gradient * scale
    optimizer.step()
    num_compared = 0
    odd, unexplained = {}, []
    for name in step.trained:
        before = step.weights[name]
        expected = weights[name].detach() - before
        moved = after.weights[name] - before
        factor, left = factor_of(expected, moved)
        # What an update loses to the rounding of its weight.
        rounding = 2**-23 * float(before.norm()) / max(float(expected.norm()), 1e-30)
        if not bool(expected.any()):
            unexplained += [name] if bool(moved.any()) else []
            continue
        if rounding > _LEFT:
            continue
        num_compared += 1
        if factor and not left <= _LEFT + rounding:
            unexplained.append(name)
        elif not abs(factor - 1) <= _FACTOR + rounding:
            odd[name] = factor
    if not odd and not unexplained:
        return None, num_compared
    kind = step.optimizer["class"]
    texts = [f"{name} x{factor:.4g}" for name, factor in grouped(odd).items()]
    texts += [f"{name} another way" for name in grouped(dict.fromkeys(unexplained, 0.0))]
    part = refuted(
        UPDATES,
        f"in step {step.number} {len(odd) + len(unexplained)} of {len(step.trained)} parameters do not move as "
        f"{kind} says: {', '.join(texts)}",
        expected=f"the update of torch's {kind} from the recorded gradients and settings",
        where="what happens between the gradients and the weights: a second clip, gradients scaled after the norm, a "
        "weight that is written by hand, another optimizer",
    )
    return part, num_compared
