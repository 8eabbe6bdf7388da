"""Checks of the section `optimizer` that need no torch."""

import re
from collections.abc import Iterator

from threefold.config.meant_values import meant_word
from threefold.config.optimizer import OPTIMIZERS, OptimizerConfig
from threefold.config.schema import Config
from threefold.config.yaml_text import as_yaml, to_set
from threefold.errors import Problem

GROUPS_FIX = ("optimizer.groups", [{"match": "embed", "lr": 1e-4}])
_WITH_BETAS = tuple(name for name, row in OPTIMIZERS.items() if row.has_betas)
# A number in bfloat16 has 8 bits: less than a 512th of it added or taken away leaves it as it is.
_SLOWEST_IN_BFLOAT16 = 0.98
_OWN_KEYS = ("params", "lr", "betas", "eps", "weight_decay")


def of_optimizer(config: Config) -> Iterator[Problem]:
    """Values of the section, each valid by itself, that contradict one another or another section's."""
    asked = config.optimizer
    yield from _of_name(asked)
    for number, beta in enumerate(asked.betas):
        if not 0 <= beta < 1:
            yield to_set(
                f"optimizer.betas[{number}] = {beta} is not a decay",
                "0 <= beta < 1",
                "optimizer.betas",
                [0.9, 0.95],
            )
    lr, why = config.peak_rate
    if asked.min_lr > lr:
        automatic = f" (auto: {why})" if asked.lr == "auto" else ""
        yield Problem(
            f"optimizer.min_lr = {asked.min_lr} is above optimizer.lr = {lr}{automatic}",
            "a schedule that falls from lr to min_lr",
            f"--optimizer.min_lr 0   (or raise optimizer.lr above {asked.min_lr})",
        )
    yield from _of_schedule(config)
    yield from _of_groups(asked)


def _of_name(asked: OptimizerConfig) -> Iterator[Problem]:
    if asked.name not in OPTIMIZERS and "." not in asked.name:
        what = f"optimizer.name = {as_yaml(asked.name)} is not an optimizer"
        expected = f"one of {', '.join(OPTIMIZERS)}, or the dotted path of an installed class: torch.optim.NAdam"
        meant = meant_word("optimizer.name", asked.name, OPTIMIZERS)
        yield to_set(
            what,
            expected,
            "optimizer.name",
            meant or "adamw",
            remark="" if meant else "   (the default)",
        )
    defaults = OptimizerConfig()
    row = OPTIMIZERS.get(asked.name)
    for key in ("betas", "eps"):
        value = getattr(asked, key)
        if value != getattr(defaults, key) and row is not None and not row.has_betas:
            what = f"optimizer.{key} = {as_yaml(value)} has no effect on optimizer.name = {asked.name}"
            yield Problem(
                what,
                f"one of {', '.join(_WITH_BETAS)}, or another optimizer that has {key}",
                f"leave optimizer.{key} out",
            )
    yield from _of_moments(asked)
    for key in _OWN_KEYS:
        if key in asked.options and (row is None or key not in row.options):
            what = f"optimizer.options has {key}, which is a separate key"
            leave = "leave it out of optimizer.options"
            if key == "params":
                yield Problem(what, "the model's parameters", leave)
            else:
                named = f"optimizer.{key}"
                yield to_set(what, named, named, asked.options[key], remark=f", and {leave}")


def _of_moments(asked: OptimizerConfig) -> Iterator[Problem]:
    if asked.moments == "float32":
        return
    if asked.name != "adamw" or asked.options:
        with_options = " with optimizer.options" if asked.name == "adamw" else ""
        yield to_set(
            f"optimizer.moments = {asked.moments} with optimizer.name = {asked.name}{with_options}",
            "adamw without further options, whose moments are known",
            "optimizer.moments",
            "float32",
        )
    if asked.betas[1] > _SLOWEST_IN_BFLOAT16:
        what = (
            f"optimizer.moments = {asked.moments} with optimizer.betas = {as_yaml(asked.betas)}"
        )
        expected = (
            f"a second decay of at most {_SLOWEST_IN_BFLOAT16}: what a slower one "
            "changes in a step is rounded away"
        )
        remark = "   (or --optimizer.betas '[0.9, 0.95]')"
        yield to_set(what, expected, "optimizer.moments", "float32", remark=remark)


def _of_schedule(config: Config) -> Iterator[Problem]:
    asked, steps = config.optimizer, config.train.steps
    wsd = asked.schedule == "wsd"
    if wsd and asked.decay_steps is None:
        yield Problem(
            "optimizer.schedule = wsd without optimizer.decay_steps",
            "the number of steps at the end in which the rate falls",
            "--optimizer.decay_steps 20",
        )
    for key in ("decay_steps", "decay_shape"):
        value = getattr(asked, key)
        if not wsd and value != OptimizerConfig.model_fields[key].default:
            yield Problem(
                f"optimizer.{key} = {value} has no effect with optimizer.schedule = {asked.schedule}",
                "optimizer.schedule wsd, whose last steps fall",
                f"--optimizer.schedule wsd   (or leave optimizer.{key} out)",
            )
    if (
        wsd
        and asked.decay_steps is not None
        and steps is not None
        and asked.decay_steps > (most := steps - 1)
    ):
        yield Problem(
            f"optimizer.decay_steps = {asked.decay_steps}, but the run has train.steps = {steps}",
            "a decay that begins after the first step",
            f"--optimizer.decay_steps {max(1, most // 5)}"
            if most
            else "--optimizer.schedule constant",
        )
    if asked.min_lr and asked.schedule == "inverse_sqrt":
        yield Problem(
            f"optimizer.min_lr = {asked.min_lr} has no effect with optimizer.schedule = {asked.schedule}",
            "a schedule that ends at a lowest rate: linear, cosine, wsd",
            "leave optimizer.min_lr out",
        )


def _of_groups(asked: OptimizerConfig) -> Iterator[Problem]:
    for number, group in enumerate(asked.groups):
        at = f"optimizer.groups[{number}]"
        try:
            re.compile(group.match)
        except re.error as error:
            yield to_set(
                f"{at}.match = {as_yaml(group.match)} is not a regular expression: {error}",
                "one that Python's re accepts",
                *GROUPS_FIX,
            )
        if group.lr is None and group.weight_decay is None:
            yield to_set(
                f"{at} has neither lr nor weight_decay: it changes nothing",
                "what differs for these parameters",
                *GROUPS_FIX,
            )
        if group.name is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+", group.name):
            yield Problem(
                f"{at}.name = {as_yaml(group.name)}",
                "letters, digits, _, - and .: it becomes a metrics key",
                "name: embeddings",
            )
    names = [group_name(asked, number) for number in range(len(asked.groups))]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield Problem(
                f"optimizer.groups has the name {name} {names.count(name)} times",
                "another name for each group: each has its own rate in the metrics",
                f"name: {name}2",
            )


def group_name(asked: OptimizerConfig, number: int) -> str:
    """The name of a group in metrics."""
    return asked.groups[number].name or f"group{number}"
