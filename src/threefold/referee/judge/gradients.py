"""The gradients of a program's checked steps against those of its own model in one process.

Nothing is assumed about how the program averages: the recorded gradient must be a sum of the gradients of its rows, and
what each row counts in it shows the law. Then each parameter must follow the same law: one with another factor, or one
that no factor explains, is named. What arithmetic in the program's precision changes is computed, not assumed: the same
model is run in it, and its difference from float32 is the tolerance.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from threefold.referee.judge.checked_steps import CheckedStep, TrainedRows, Unjudgeable
from threefold.referee.judge.laws import (
    OWN_LOSS,
    TARGETS,
    Law,
    LawFit,
    NamedFactor,
    UnitSize,
    factor_of,
    fit_law,
    fit_units,
    grouped,
    known_laws,
    left_beside,
    lost_units,
    named_factors,
)
from threefold.referee.judge.own_model import OwnModel, UntiedWeights, rebuilt
from threefold.referee.judge.parts import JudgedPart, not_judged, proved, refuted

GRADIENTS, TARGET_PLACES = "gradients", "targets"

# The most values of each parameter that rows are told apart by; all values are compared once the law is known.
_NUM_VALUES = 4096
# float32 in another order of sums; what is rounded to bfloat16 at the end; and the least factor that is named.
_FLOAT32, _ROUNDED, _FACTOR = 1e-3, 1e-2, 0.01
# So many times as much as the program's precision changes here, as it does there by other amounts.
_TIMES = 4.0
_TOO_NOISY = 0.3
# Devices may round the factors of products of float32 (TF32).
_ON_A_DEVICE = "a device's float32"
_LOW = {"bfloat16": torch.bfloat16}
_UNSEEN = ("attention_mask", "position_ids")
# Operations that this machine is asked for, for each pass over the checked steps; and values of gradients of all rows.
_MOST_WORK, _MOST_VALUES = 3e12, 2**26


@dataclass
class StepFit:
    """What a step shows: its law, or the weights of units that follow none, and how each parameter follows the law.

    Attributes:
        repeats: whether the gradient of the step before is a part of the recorded one.
        unseen: an input that the model is called with, and without which its gradients are the recorded ones.
    """

    step: CheckedStep
    sizes: list[UnitSize]
    fit: LawFit | None = None
    unit_weights: Tensor | None = None
    repeats: bool = False
    unseen: str | None = None
    factors: dict[str, float] = field(default_factory=dict)
    left: dict[str, float] = field(default_factory=dict)
    tolerance: dict[str, float] = field(default_factory=dict)

    def odd(self) -> dict[str, float]:
        """Parameters that follow the law with a factor of their own."""
        assert self.fit is not None
        usual = self.fit.factor
        return {
            name: factor / usual
            for name, factor in self.factors.items()
            if abs(factor / usual - 1) > max(_FACTOR, self.tolerance[name]) and self._is_explained(name)
        }

    def unexplained(self) -> list[str]:
        """Parameters that no factor explains."""
        return [name for name in self.factors if not self._is_explained(name)]

    def _is_explained(self, name: str) -> bool:
        return not self.factors[name] or self.left[name] <= self.tolerance[name]


def judge_gradients(
    steps: list[CheckedStep], placement: dict[str, Any], own: nn.Module | None = None
) -> list[JudgedPart]:
    """The parts of a verdict that follow from the gradients of a model.

    Args:
        placement: what the first rank shows of its model.
        own: the model in one process, as the program makes it; else one of transformers is rebuilt from its config.
    """
    fits: list[StepFit] = []
    try:
        architecture = placement["architecture"]
        model = OwnModel(own if own is not None else rebuilt(architecture), replaced=architecture.get("replaced"))
        if architecture["dropout"] and placement["device"] != "cpu":
            raise Unjudgeable("the model draws random numbers on the device: set its dropout to 0")
        work = 0.0
        for step in steps:
            work += _work(model, step)
            if work > _MOST_WORK:
                if fits:
                    break
                what = f"{work:.0e} operations to compute the gradients of step {step.number} here, of at most"
                raise Unjudgeable(f"{what} {_MOST_WORK:.0e}: train fewer rows, or a smaller config")
            if placement["device"] != "cpu":
                step.types.add(_ON_A_DEVICE)
            fits.append(_fit_step(model, step, fits[-1].step if fits else None))
            if fits[-1].fit is None:
                break
    except Unjudgeable as why:
        if not fits:
            return [not_judged(GRADIENTS, str(why))]
    except UntiedWeights as name:
        what = f"{name} is a weight of its own in the program, and the model shares it with another one"
        where = "what replaces parameters after the model is made: sharding, a cast, a load, a resized vocabulary"
        return [refuted(GRADIENTS, what, expected="one weight, with the gradients of all its uses", where=where)]
    except Exception as error:  # of a model that nobody here has seen
        text = " ".join(str(error).split())[:200]
        return [not_judged(GRADIENTS, f"the model cannot be computed here ({type(error).__name__}: {text})")]
    return [_verdict(fits), *_target_places(fits)]


def _fit_step(model: OwnModel, step: CheckedStep, before: CheckedStep | None) -> StepFit:
    model.load(step.weights)
    units = [unit for unit in step.units if model.num_targets(unit)]
    if not units:
        raise Unjudgeable(f"step {step.number} trains on no target")
    sizes = [
        UnitSize(unit.rank, unit.call, unit.row, model.num_targets(unit), model.num_labels(unit)) for unit in units
    ]
    trained = [name for name, value in step.gradients.items() if bool(value.isfinite().all())]
    if len(trained) < len(step.gradients):
        raise Unjudgeable(f"step {step.number} has a gradient that is not finite")
    laws = [*known_laws(sizes), *_own_law(units)]
    noise = _noise(model, units, laws[0].weights, step, trained)
    own, recorded = _samples(model, units, step, trained)
    if (best := _explains(laws, own, recorded, noise)) is not None:
        return _compared(model, units, StepFit(step, sizes, best), noise)
    found = StepFit(step, sizes)
    if (weights := fit_units(own, recorded)) is not None and _explains([Law("", weights)], own, recorded, noise):
        found.unit_weights = weights
    if before is not None and before.gradients.keys() >= set(trained):
        earlier = [_sampled(before.gradients[name], values) for name, values in zip(trained, recorded, strict=True)]
        found.repeats = any(_is_small(left_beside(law, own, recorded, earlier), noise) for law in laws)
    # What the program hands to its model, and the model may not see.
    for name in _UNSEEN:
        blind = [replace(unit, inputs={n: v for n, v in unit.inputs.items() if n != name}) for unit in units]
        if any(name in unit.inputs for unit in units):
            own, recorded = _samples(model, blind, step, trained)
            if _explains(laws, own, recorded, noise) is not None:
                found.unseen = name
    return found


def _work(model: OwnModel, step: CheckedStep) -> float:
    """Operations of a forward and backward of all rows."""
    num_tokens = sum(max(value.numel() for value in unit.inputs.values()) for unit in step.units)
    return 6.0 * num_tokens * sum(weight.numel() for weight in step.weights.values())


def _samples(
    model: OwnModel, units: list[TrainedRows], step: CheckedStep, names: list[str]
) -> tuple[list[Tensor], list[Tensor]]:
    """Some values of each parameter's gradient: [units, values] of each unit's own, and [values] of the recorded."""
    num_values = max(64, min(_NUM_VALUES, _MOST_VALUES // (len(units) * len(names))))
    recorded = [step.gradients[name].flatten() for name in names]
    recorded = [values[:: max(1, -(-values.numel() // num_values))] for values in recorded]
    rows = []
    for unit in units:
        gradients = model.gradients([(unit, 1.0)], names, low=None)
        rows.append([_sampled(value, like) for value, like in zip(gradients, recorded, strict=True)])
    return [torch.stack(values) for values in zip(*rows, strict=True)], recorded


def _sampled(gradient: Tensor, like: Tensor) -> Tensor:
    """The values of a gradient at the places of others of it."""
    return gradient.flatten()[:: like.stride(0)].clone()


def _own_law(units: list[TrainedRows]) -> list[Law]:
    """What the program's own loss makes of each unit's targets, where the gradients at its outputs show it."""
    counts = [unit.mean_weight for unit in units]
    known = [count for count in counts if count is not None]
    return [Law(OWN_LOSS, torch.tensor(known, dtype=torch.float64))] if len(known) == len(counts) else []


def _explains(laws: list[Law], own: list[Tensor], recorded: list[Tensor], noise: dict[str, float]) -> LawFit | None:
    """The first law that most parameters follow."""
    fits = (fit_law(law, own, recorded) for law in laws)
    return next((fit for fit in fits if _is_small(fit.left, noise)), None)


def _is_small(left: Tensor, noise: dict[str, float]) -> bool:
    return float((left / torch.tensor(list(noise.values()))).median()) <= 1


def _compared(model: OwnModel, units: list[TrainedRows], found: StepFit, noise: dict[str, float]) -> StepFit:
    """With all values of each parameter compared under the law."""
    assert found.fit is not None
    losses = list(zip(units, found.fit.law.weights.tolist(), strict=True))
    expected = model.gradients(losses, list(noise), low=None)
    largest = max(float(value.norm()) for value in expected)
    for name, value in zip(noise, expected, strict=True):
        # A gradient that is zero but for rounding, as that of a key's bias, tells nothing.
        if float(value.norm()) < 1e-6 * largest or noise[name] > _TOO_NOISY:
            continue
        found.factors[name], found.left[name] = factor_of(value, found.step.gradients[name])
        found.tolerance[name] = noise[name]
    if not found.factors:
        raise Unjudgeable(f"in step {found.step.number} each gradient is as small as its rounding")
    return found


def _noise(
    model: OwnModel, units: list[TrainedRows], weights: Tensor, step: CheckedStep, names: list[str]
) -> dict[str, float]:
    """What each parameter's gradient may differ by, as a share of it, when it is right."""
    low = next((_LOW[kind] for kind in step.types if kind in _LOW), None)
    if low is None:
        return dict.fromkeys(names, _ROUNDED if _ON_A_DEVICE in step.types else _FLOAT32)
    losses = list(zip(units, weights.tolist(), strict=True))
    exact = model.gradients(losses, names, low=None)
    rounded = model.gradients(losses, names, low=low)
    return {
        name: max(_ROUNDED, _TIMES * factor_of(one, other)[1])
        for name, one, other in zip(names, exact, rounded, strict=True)
    }


# --- what it comes to --------------------------------------------------------------------------------------------


def _verdict(fits: list[StepFit]) -> JudgedPart:
    """The first thing that is wrong, or that nothing is."""
    for found in fits:
        if part := _wrong(found):
            return part
    numbers = [found.step.number for found in fits]
    steps = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
    total = sum(size.num_targets for size in fits[0].sizes)
    compared = [left for found in fits for left in found.left.values()]
    names = len(fits[0].factors)
    assert fits[0].fit is not None
    known = _known_factors(fits[0])
    law = known[0].law if known else TARGETS
    what = f"in {steps} each of {names} parameters has the gradient of {law} ({total} in step {numbers[0]})"
    num_silent = len(fits[0].step.gradients) - names
    silent = f"; {num_silent} are zero but for rounding, and not compared" if num_silent else ""
    return proved(GRADIENTS, f"{what}; the largest difference is {max(compared):.0e} of a gradient{silent}")


def _wrong(found: StepFit) -> JudgedPart | None:
    step = f"step {found.step.number}"
    if found.fit is None:
        return _no_law(found)
    if odd := found.odd():
        listed = ", ".join(f"{name} x{factor:.4g}" for name, factor in grouped(odd).items())
        return refuted(
            GRADIENTS,
            f"in {step} {len(odd)} of {len(found.factors)} parameters have another factor than the others: {listed}",
            expected=f"the gradient of {TARGETS} for each parameter",
            where="what sums or scales these gradients: one sum over ranks too many, a hook, a part of the loss",
        )
    if unexplained := found.unexplained():
        listed = ", ".join(grouped(dict.fromkeys(unexplained, 0.0)))
        return refuted(
            GRADIENTS,
            f"in {step} {len(unexplained)} of {len(found.factors)} parameters have a gradient that is no multiple of "
            f"their own: {listed}",
            expected="what the same model computes in one process from the same weights and rows",
            where="what these layers compute: a mask, positions, a part of the gradient, a sum over ranks of one part",
        )
    if not all(unit.is_even for unit in found.step.units):
        return not_judged(GRADIENTS, f"in {step} the program's loss counts the targets of a row differently, as it may")
    if found.fit.law.name == OWN_LOSS:
        counts = found.fit.law.weights
        ratio = float(counts.max() / counts.min())
        what = f"in {step} targets count up to {ratio:.3g} x others, as the program's own loss weighs them"
        return not_judged(GRADIENTS, f"{what}; each parameter follows it")
    if found.fit.law.name != TARGETS:
        counts = found.fit.law.weights
        first, last = int(counts.argmax()), int(counts.argmin())
        ratio = float(counts[first] / counts[last])
        return refuted(
            GRADIENTS,
            f"in {step} targets do not count equally: those of {found.sizes[first]} count {ratio:.3g} x those of "
            f"{found.sizes[last]}; it is {found.fit.law.name}",
            expected=f"{TARGETS}, {sum(size.num_targets for size in found.sizes)} in {step}",
            where="what the loss is divided by: the number of targets of all ranks and micro-batches of the step",
        )
    known = _known_factors(found)
    if not known:
        what = f"in {step} each gradient is x{found.fit.factor:.4g} of {TARGETS}"
        return not_judged(GRADIENTS, f"{what}, as the program's loss may ask for")
    if known[0].law is None:
        return refuted(
            GRADIENTS,
            f"in {step} each gradient is x{found.fit.factor:.4f}: {' or '.join(each.name for each in known)}",
            expected=f"{TARGETS} of all ranks and micro-batches",
            where="what the loss is divided by, and whether ranks are summed or averaged: both together count twice",
        )
    return None


def _known_factors(found: StepFit) -> list[NamedFactor]:
    """What the law may be multiplied by; none: nobody knows."""
    assert found.fit is not None
    factor = found.fit.factor
    tolerance = max(_FACTOR, statistics.median(found.tolerance.values()))
    near = [
        known
        for known in named_factors(found.sizes, found.step.ranks_a_copy)
        if abs(factor / known.value - 1) <= tolerance
    ]
    nearest = min(near, key=lambda known: abs(factor / known.value - 1), default=None)
    return [known for known in near if nearest is not None and known.value == nearest.value]


def _no_law(found: StepFit) -> JudgedPart:
    step = f"step {found.step.number}"
    where = (
        "the forward of the model: masks, positions, documents packed together, layers that differ; hooks on gradients"
    )
    if found.unseen is not None:
        return refuted(
            GRADIENTS,
            f"in {step} the gradient is that of a model that does not see {found.unseen}, which it is called with",
            expected="what the same model computes in one process from the same weights and rows",
            where=f"what takes {found.unseen} away on the way into the layers: a wrapper, a patch, a kernel",
        )
    if found.repeats:
        return refuted(
            GRADIENTS,
            f"in {step} the gradient of the step before is still in the gradient",
            expected="gradients of the rows of this step alone",
            where="optimizer.zero_grad() after each step, on all parameters",
        )
    if found.unit_weights is not None and (lost := lost_units(found.unit_weights)):
        units = ", ".join(str(found.sizes[place]) for place in lost[:3]) + (" ..." if len(lost) > 3 else "")
        return refuted(
            GRADIENTS,
            f"in {step} {len(lost)} of {len(found.sizes)} rows are not in the gradient: {units}",
            expected="a part of each row that was trained on",
            where="zero_grad between micro-batches, no_sync on the last one, a gradient that is not summed over ranks",
        )
    return refuted(
        GRADIENTS,
        f"in {step} the gradient is no sum of the gradients of its rows",
        expected="what the same model computes in one process from the same weights and rows",
        where=where,
    )


def _target_places(fits: list[StepFit]) -> Iterator[JudgedPart]:
    """Whether a causal model is trained on the next token, where both show."""
    known = [
        (unit.inputs["input_ids"], unit.targets)
        for found in fits
        for unit in found.step.units
        if unit.targets is not None and unit.targets.ndim == 2 and "input_ids" in unit.inputs
    ]
    same = [(ids, targets) for ids, targets in known if ids.shape == targets.shape]
    if not same:
        return
    shares = {}
    for shift in (0, 1, 2):
        hits = total = 0
        for ids, targets in same:
            aligned = targets[:, : targets.shape[1] - shift]
            trained = aligned != -100
            hits += int((aligned == ids[:, shift:])[trained].sum())
            total += int(trained.sum())
        shares[shift] = hits / max(total, 1)
    if shares[1] < 0.5 and max(shares[0], shares[2]) > 0.95:
        said = "the token after the next" if shares[2] > shares[0] else "the token itself"
        yield refuted(
            TARGET_PLACES,
            f"{max(shares[0], shares[2]):.0%} of the outputs are trained to predict {said}",
            expected="the next token",
            where="where labels are shifted: once, in the model or before it",
        )
