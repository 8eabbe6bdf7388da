"""The gradients of a program's checked steps against those of its own model in one process.

Nothing is assumed about how the program averages: the recorded gradient must be a sum of the gradients of its rows, and
the weight of each row in it shows the law. Then each parameter must follow the same law: one with another factor, or
one that no factor explains, is named. The effect of the program's precision is computed, not assumed: the same model is
run in it, and its difference from float32 is the tolerance.
"""

import statistics
from typing import NamedTuple

import torch
from torch import Tensor, nn

from threefold.referee.judge.checked_steps import CheckedStep, TrainedRows, are_even
from threefold.referee.judge.laws import (
    OWN_LOSS,
    TARGETS,
    Law,
    LawFit,
    NamedFactor,
    Samples,
    UnitSize,
    factor_of,
    fit_law,
    fit_units,
    known_laws,
    left_beside,
    named_factors,
)
from threefold.referee.judge.own_model import (
    OwnModel,
    foreign_part,
    read_as,
    readings_of,
    rebuilt,
)
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
from threefold.referee.rank.rows import Tensors
from threefold.referee.rank.sealed import Values

GRADIENTS = "gradients"
ByParameter = dict[str, float]

# The most values of each parameter that distinguish rows; all values are compared once the law is known.
_NUM_VALUES = 4096
# float32 in another order of sums; a final rounding to bfloat16; and the least factor that is named.
_FLOAT32, _ROUNDED, _FACTOR = 1e-3, 1e-2, 0.01
# A unit of less weight, as a share of the largest, is not in the gradient.
_LOST = 0.02
# Tolerance as a multiple of the effect of precision in this process: in the program its size differs.
_TIMES = 4.0
_TOO_NOISY = 0.3
# Devices may round the factors of products of float32 (TF32).
_ON_A_DEVICE = "a device's float32"
_AS_ALONE = "what the same model computes in one process from the same weights and rows"
_UNSEEN = ("attention_mask", "position_ids")
# Operations that this machine is asked for, for each pass over the checked steps; and values of gradients of all rows.
_MOST_WORK, _MOST_VALUES = 3e12, 2**26


class NoLaw(Refuted):
    """A gradient that is not made of those of its rows, as they are read."""


class Compared(NamedTuple):
    """How a parameter follows a law: its factor, the residual share, and the bound on it."""

    factor: float
    left: float
    tolerance: float

    @property
    def is_explained(self) -> bool:
        """Whether it is a multiple of the law's gradient."""
        return not self.factor or self.left <= self.tolerance


class StepFit(NamedTuple):
    """The law of a step, and how each parameter follows it."""

    step: CheckedStep
    sizes: list[UnitSize]
    fit: LawFit
    compared: dict[str, Compared]

    @property
    def num_targets(self) -> int:
        """Of all rows."""
        return sum(size.num_targets for size in self.sizes)


@judges(GRADIENTS)
def judge_gradients(
    steps: list[CheckedStep], placement: Values, own: nn.Module | None = None
) -> JudgedPart:
    """Whether each parameter has the gradient that the model and the rows of the steps give.

    Args:
        placement: what the first rank shows of its model.
        own: the model in one process, as the program makes it; else one of transformers is rebuilt from its config.
    """
    architecture, device = placement["architecture"], placement["device"]
    if architecture["dropout"] and device != "cpu":
        raise Unjudgeable("the model draws random numbers on the device: set its dropout to 0")
    try:
        if own is not None:
            return _judged(OwnModel(own, replaced=architecture.get("replaced")), steps, device)
        for reading in readings_of(architecture):
            try:
                return _judged(
                    OwnModel(rebuilt(architecture)),
                    [read_as(step, *reading) for step in steps],
                    device,
                )
            except NoLaw as wrong:
                first = wrong
    except (Unjudgeable, Refuted):
        raise
    except Exception as error:  # of a model that is unknown here
        text = " ".join(str(error).split())[:200]
        raise Unjudgeable(
            f"the model cannot be computed here ({type(error).__name__}: {text})"
        ) from error
    if foreign := foreign_part(architecture):
        raise Unjudgeable(f"{foreign}, and no interpretation explains its gradients")
    raise first


def _judged(model: OwnModel, steps: list[CheckedStep], device: str) -> JudgedPart:
    """The verdict of the steps, until one is too much work.

    Raises:
        Refuted: one is wrong.
        Unjudgeable: one cannot be judged, as its gradient is not finite; or the first is too much work.
    """
    fits: list[StepFit] = []
    work = 0.0
    for step in steps:
        num_tokens = sum(
            max(value.numel() for value in unit.inputs.values()) for unit in step.units
        )
        # Of a forward and backward of all rows.
        work += 6.0 * num_tokens * sum(weight.numel() for weight in step.weights.values())
        if device != "cpu":
            step.types.add(_ON_A_DEVICE)
        if work > _MOST_WORK:
            if fits:
                break
            raise Unjudgeable(
                f"{work:.0e} operations are needed for the gradients of step {step.number} here, more than "
                f"{_MOST_WORK:.0e}: train fewer rows, or a smaller config"
            )
        step.require_finite()
        fit = _fit_step(model, step, fits[-1].step if fits else None)
        _check(fit)
        fits.append(fit)
    first = fits[0]
    what = (
        f"in {numbers_text(first.step.number, fits[-1].step.number)} each of {len(first.compared)} parameters has the "
        f"gradient of {_known_factors(first)[0].law} ({first.num_targets} in step {first.step.number})"
    )
    num_silent = len(first.step.gradients) - len(first.compared)
    silent = f"; {num_silent} are zero up to rounding, and not compared" if num_silent else ""
    largest = max(each.left for fit in fits for each in fit.compared.values())
    return proved(f"{what}; the largest difference is {largest:.0e} of a gradient{silent}")


def _fit_step(model: OwnModel, step: CheckedStep, before: CheckedStep | None) -> StepFit:
    model.load(step.weights)
    units = [unit for unit in step.units if model.num_targets(unit)]
    if not units:
        raise Unjudgeable(f"step {step.number} trains on no target")
    sizes = [
        UnitSize(
            unit.rank, unit.call, unit.row, model.num_targets(unit), model.num_labels(unit)
        )
        for unit in units
    ]
    laws = known_laws(sizes)
    counts = [unit.mean_weight for unit in units]
    if None not in counts:
        # The gradients at the outputs show what the program's own loss makes of each unit's targets.
        laws.append(Law(OWN_LOSS, torch.tensor(counts, dtype=torch.float64)))
    noise = _noise(model, units, laws[0].weights, step)
    samples = _samples(model, units, step)
    if (best := _explains(laws, samples, noise)) is not None:
        return StepFit(step, sizes, best, _compared(model, units, best, step, noise))
    # Inputs that the program passes to its model, and the model may not use.
    for name in _UNSEEN:
        blind = [unit.without(name) for unit in units]
        if any(name in unit.inputs for unit in units) and _explains(
            laws, _samples(model, blind, step), noise
        ):
            raise NoLaw(
                f"in step {step.number} the gradient is that of a model that ignores {name}, which it is called "
                "with",
                _AS_ALONE,
                f"what drops {name} before the layers: a wrapper, a patch, a kernel",
            )

    def has_beside(others: Tensors) -> bool:
        """Whether a law explains the gradient, next to a multiple of other values of each parameter."""
        values = [
            _sampled(others[name], like) for name, (_, like) in zip(noise, samples, strict=True)
        ]
        return any(_is_small(left_beside(law, samples, values), noise) for law in laws)

    if has_beside(step.weights):
        raise Unjudgeable(
            f"in step {step.number} the gradient contains a multiple of the weights, as from a penalty"
        )
    if (
        before is not None
        and before.gradients.keys() >= noise.keys()
        and has_beside(before.gradients)
    ):
        raise NoLaw(
            f"in step {step.number} the gradient still contains that of the step before",
            "gradients of the rows of this step alone",
            "optimizer.zero_grad() after each step, on all parameters",
        )
    weights = fit_units(samples)
    if weights is not None and _explains([Law("", weights)], samples, noise):
        shares = weights.abs() / weights.abs().max()
        if lost := [
            str(size) for size, share in zip(sizes, shares, strict=True) if share < _LOST
        ]:
            raise NoLaw(
                f"in step {step.number} {len(lost)} of {len(sizes)} rows are missing from the gradient: "
                + ", ".join(lost[:3] + ["..."] * (len(lost) > 3)),
                "a contribution from each row that was trained on",
                "zero_grad between micro-batches, no_sync on the last one, a gradient that is not summed over ranks",
            )
    if any(unit.is_other_loss for unit in units):
        raise Unjudgeable(
            f"in step {step.number} the loss is not the cross-entropy of the outputs, as if a term were added"
        )
    raise NoLaw(
        f"in step {step.number} the gradient is not the sum of its rows' gradients",
        _AS_ALONE,
        "the forward of the model: masks, positions, documents packed together, layers that differ; hooks on gradients",
    )


def _samples(model: OwnModel, units: list[TrainedRows], step: CheckedStep) -> Samples:
    """Some values of each parameter's gradient."""
    num_values = max(64, min(_NUM_VALUES, _MOST_VALUES // (len(units) * len(step.gradients))))
    whole = [values.flatten() for values in step.gradients.values()]
    recorded = [values[:: max(1, -(-values.numel() // num_values))] for values in whole]
    rows = []
    for unit in units:
        gradients = model.gradients([(unit, 1.0)], list(step.gradients))
        rows.append(
            [_sampled(value, like) for value, like in zip(gradients, recorded, strict=True)]
        )
    return [(torch.stack(own), values) for *own, values in zip(*rows, recorded, strict=True)]


def _sampled(gradient: Tensor, like: Tensor) -> Tensor:
    """The values of a gradient at the places of others of it."""
    return gradient.flatten()[:: like.stride(0)].clone()


def _explains(laws: list[Law], samples: Samples, noise: ByParameter) -> LawFit | None:
    """The first law that most parameters follow."""
    fits = (fit_law(law, samples) for law in laws)
    return next((fit for fit in fits if _is_small(fit.left, noise)), None)


def _is_small(left: Tensor, noise: ByParameter) -> bool:
    return float((left / torch.tensor(list(noise.values()))).median()) <= 1


def _compared(
    model: OwnModel,
    units: list[TrainedRows],
    fit: LawFit,
    step: CheckedStep,
    noise: ByParameter,
) -> dict[str, Compared]:
    """All values of each parameter under a law."""
    losses = list(zip(units, fit.law.weights.tolist(), strict=True))
    expected = dict(zip(noise, model.gradients(losses, list(noise)), strict=True))
    largest = max(float(value.norm()) for value in expected.values())
    # A gradient that is zero but for rounding, in both, like that of a key's bias, shows nothing.
    names = [
        name
        for name in noise
        if noise[name] <= _TOO_NOISY
        and (
            expected[name].norm() >= 1e-6 * largest
            or step.gradients[name].norm() > noise[name] * abs(fit.factor) * largest
        )
    ]
    if not names:
        raise Unjudgeable(
            f"in step {step.number} each gradient is no larger than its rounding error"
        )
    return {
        name: Compared(*factor_of(expected[name], step.gradients[name]), noise[name])
        for name in names
    }


def _noise(
    model: OwnModel, units: list[TrainedRows], weights: Tensor, step: CheckedStep
) -> ByParameter:
    """The tolerance of each parameter's gradient, as a share of it."""
    names = list(step.gradients)
    if "bfloat16" not in step.types:
        return dict.fromkeys(names, _ROUNDED if _ON_A_DEVICE in step.types else _FLOAT32)
    losses = list(zip(units, weights.tolist(), strict=True))
    exact = model.gradients(losses, names)
    rounded = model.gradients(losses, names, low=torch.bfloat16)
    return {
        name: max(_ROUNDED, _TIMES * factor_of(one, other)[1])
        for name, one, other in zip(names, exact, rounded, strict=True)
    }


def _check(step_fit: StepFit) -> None:
    """Raises the first thing that is wrong, or that cannot be judged."""
    step, fit, compared = f"step {step_fit.step.number}", step_fit.fit, step_fit.compared
    # Of parameters that follow the law with another factor.
    odd = {
        name: f" x{each.factor / fit.factor:.4g}"
        for name, each in compared.items()
        if abs(each.factor / fit.factor - 1) > max(_FACTOR, each.tolerance)
        and each.is_explained
    }
    if odd:
        raise Refuted(
            f"in {step} {len(odd)} of {len(compared)} parameters have a different factor from the rest: "
            f"{listed(odd, odd)}",
            f"the gradient of {TARGETS} for each parameter",
            "what sums or scales these gradients: one sum over ranks too many, a hook, a part of the loss",
        )
    if unexplained := [name for name, each in compared.items() if not each.is_explained]:
        raise NoLaw(
            f"in {step} {len(unexplained)} of {len(compared)} parameters have a gradient that is no multiple of "
            f"their own: {listed(unexplained)}",
            _AS_ALONE,
            "what these layers compute: a mask, positions, a part of the gradient, a sum over ranks of one part",
        )
    total = f"{TARGETS}, {step_fit.num_targets} in {step}"
    is_even = all(unit.is_even for unit in step_fit.step.units)
    by_rank = torch.cat([unit.by_rank for unit in step_fit.step.units])
    if (fit.law.name == OWN_LOSS or not is_even) and are_even(by_rank):
        raise Refuted(
            f"in {step} targets of a sequence do not count equally: each rank divides by those that it holds",
            total,
            "what the loss is divided by: the number of targets of all ranks that share a sequence",
        )
    if not is_even:
        raise Unjudgeable(
            f"in {step} the program's loss counts the targets of a row differently, as it may"
        )
    counts = fit.law.weights
    first, last = (step_fit.sizes[int(place)] for place in (counts.argmax(), counts.argmin()))
    what = (
        f"in {step} targets do not count equally: those of {first} count "
        f"{float(counts.max() / counts.min()):.3g} x those of {last}"
    )
    if fit.law.name == OWN_LOSS:
        raise Unjudgeable(
            f"{what}, as the program's own loss weighs them; each parameter follows it"
        )
    if fit.law.name != TARGETS:
        raise Refuted(
            f"{what}; it is {fit.law.name}",
            total,
            "what the loss is divided by: the number of targets of all ranks and micro-batches of the step",
        )
    factors = _known_factors(step_fit)
    if not factors:
        raise Unjudgeable(
            f"in {step} each gradient is x{fit.factor:.4g} of {TARGETS}, as the program's loss may intend"
        )
    if factors[0].law is None:
        raise Refuted(
            f"in {step} each gradient is x{fit.factor:.4f}: {' or '.join(each.name for each in factors)}",
            f"{TARGETS} of all ranks and micro-batches",
            "what the loss is divided by, and whether ranks are summed or averaged: both together count twice",
        )


def _known_factors(step_fit: StepFit) -> list[NamedFactor]:
    """The possible factors of the law; empty if unknown."""
    factors = named_factors(step_fit.sizes, step_fit.step.ranks_a_copy)
    away = {factor: abs(step_fit.fit.factor / factor.value - 1) for factor in factors}
    tolerance = max(
        _FACTOR, statistics.median(each.tolerance for each in step_fit.compared.values())
    )
    return [factor for factor, each in away.items() if each == min(away.values()) <= tolerance]


@judges("targets")
def judge_target_places(steps: list[CheckedStep], architecture: Values) -> JudgedPart:
    """Whether a causal model is trained on the next token, where both show, and not on padding."""
    seen = [
        (ids, unit.targets, unit.inputs.get("attention_mask", ids + 1))
        for step in steps
        for unit in step.units
        if unit.targets is not None
        and (ids := unit.inputs.get("input_ids")) is not None
        and ids.shape == unit.targets.shape
    ]
    if not seen or architecture.get("config", {}).get("is_encoder_decoder"):
        return none_here("the targets of the outputs cannot be seen")
    itself, following, later = (
        float(
            torch.cat(
                [(targets == ids.roll(-shift, 1))[targets != -100] for ids, targets, _ in seen]
            )
            .float()
            .mean()
        )
        for shift in range(3)
    )
    what = f"{following:.0%} of the outputs are trained to predict the next token"
    if following < 0.5:
        if max(itself, later) > 0.95:
            raise Refuted(
                f"{max(itself, later):.0%} of the outputs are trained to predict the token "
                f"{'after the next' if later > itself else 'itself'}",
                "the next token",
                "where labels are shifted: once, in the model or before it",
            )
        if architecture.get("class", "").endswith(("ForCausalLM", "LMHeadModel")):
            raise Unjudgeable(f"{what}: what the others predict is not known")
    if num_padding := sum(
        int(((targets == ids) & (mask + mask.roll(-1, 1) == 0)).sum())
        for ids, targets, mask in seen
        if mask.shape == ids.shape
    ):
        raise Refuted(
            f"{num_padding} outputs are trained to predict padding, which attention_mask leaves out",
            "labels of -100 where a row is padded",
            "what makes the labels: a copy of input_ids has the padding too",
        )
    return proved(what)
