"""For custom loops: an optimizer by its name, checked and built as for `threefold train`."""

from __future__ import annotations

import difflib
from typing import Any, Literal

import torch

from threefold.config.loading import validate
from threefold.config.optimizer import OptimizerConfig
from threefold.errors import ConfigError, in_program
from threefold.model.model import Model, check_model
from threefold.optim.build import build_optimizer
from threefold.optim.classes import problems

# Keys of the section that concern more than one step.
_SCHEDULE = ("schedule", "warmup_steps", "decay_steps", "decay_shape", "min_lr")
_OF_THE_LOOP = dict.fromkeys(
    _SCHEDULE, "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000), for example"
)
_OF_THE_LOOP["ema"] = "average the weights in the loop"


def _as_argument(key: str, value: Any) -> str:
    argument = key.removeprefix("optimizer.")
    if argument == "name":
        return f"threefold.optimizer({value!r}, model)"
    return f"threefold.optimizer(..., {argument}={value!r})"


@in_program(_as_argument)
def optimizer(
    name: str, model: Model, *, lr: float | Literal["auto"] = "auto", **settings: Any
) -> torch.optim.Optimizer:
    """The named optimizer over a model's trained parameters, as `threefold train` makes it; every rank calls it.

    Args:
        name: `adamw`, `adamw_8bit`, `muon`, `adafactor`, `sgd`, or the path of an installed class.
        lr: for all groups that do not set one; auto: by the weights (`model.automatic_rate`).
        settings: other keys of the config section `optimizer` that concern a step: betas, eps, weight_decay,
            moments, groups, options.

    Raises:
        ConfigError: a key or a value is wrong, has no effect, or is not possible on this mesh.
    """
    check_model(model)
    for key, value in settings.items():
        _refuse_other_key(name, key, value)
    config = validate({"optimizer": {"name": name, "lr": lr, **settings}}).optimizer
    rate = model.automatic_rate if config.lr == "auto" else config.lr
    config = config.model_copy(update={"lr": rate})
    ConfigError.raise_for(problems(config, model.mesh.topology))
    dtype = model.autocast or torch.float32
    if model.asked is not None:
        dtype = getattr(torch, model.asked.model.dtype)
    built = build_optimizer(
        model.module, config, model.mesh, dtype=dtype, working=model.working
    )
    for group in built.param_groups:
        group["lr"] = rate * group["lr_share"]
    return built


def _refuse_other_key(name: str, key: str, value: Any) -> None:
    allowed = [
        each for each in OptimizerConfig.model_fields if each not in ("name", *_OF_THE_LOOP)
    ]
    if key in allowed:
        return
    expected = f"keys among {', '.join(allowed)}"
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.85)
    fix = (
        f"did you mean {near[0]}?"
        if near
        else f"options={{{key!r}: {value!r}}}, if its class takes {key}"
    )
    if key in _OF_THE_LOOP:
        expected = "arguments of one step: schedules and averages over steps belong to the loop"
        fix = f"leave {key} out; {_OF_THE_LOOP[key]}"
    raise ConfigError(
        f"threefold.optimizer({name!r}, ...) has {key} = {value!r}", expected=expected, fix=fix
    )
