"""The configured optimizer, over parameters of any mesh and in groups."""

import difflib
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from threefold.checkpoint.optimizer_state import makes_its_state, refuse_other_state
from threefold.checkpoint.tensor_index import Index
from threefold.config.optimizer import OPTIMIZERS, OptimizerConfig
from threefold.config.optimizer_rules import group_name
from threefold.config.schema import Config
from threefold.config.yaml_text import as_yaml
from threefold.errors import ConfigError, Problem
from threefold.mesh.mesh import Mesh
from threefold.mesh.topology import Topology
from threefold.optim.bfloat16_moments import NarrowAdamW
from threefold.optim.classes import (
    arguments_of,
    class_of,
    exact_class_of,
    kernel_of,
    own_problems,
    problems,
)
from threefold.optim.exact import ExactNarrowAdamW
from threefold.optim.muon import Muon, is_hidden_matrix

if TYPE_CHECKING:
    from threefold.model.working_copy import WorkingCopy


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    mesh: Mesh | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    working: "WorkingCopy | None" = None,
) -> Optimizer:
    """The optimizer over the parameters as they are now; build it right after the model and before any forward.

    Only matrices have weight decay, unless a group sets it. A group holds parameters of one mesh: torch's fused
    kernel does not mix them. `lr_share` is a group's peak rate divided by the run's, `label` its name in metrics.

    Args:
        mesh: the mesh whose ranks hold the parameters; None: this process alone.
        dtype: the model's compute dtype.
        exact: an optimizer whose bits do not depend on the number of shards (`train.reduce`).
        working: the copies with which the model computes, to be written with the weights.

    Raises:
        ConfigError: a pattern of a group matches no parameter, or there is no such optimizer.
    """
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    ConfigError.raise_for(group_problems(list(named), config))
    kind = class_of(config)
    hidden = is_hidden_matrix(model) if kind is Muon else {}
    groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for name, parameter in named.items():
        device_mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        key = (device_mesh, parameter.ndim >= 2, _group_of(name, config), hidden.get(name))
        groups.setdefault(key, []).append(parameter)
    arguments = arguments_of(config, kind)
    decay = "weight_decay" in inspect.signature(kind).parameters
    asked = [_group(parameters, key, config, decay=decay) for key, parameters in groups.items()]
    lr = 0.0 if config.lr == "auto" else config.lr  # each step sets its own (`learning_rate`)
    sharded = any(isinstance(each, DTensor) for each in named.values())
    device = next((each.device.type for each in named.values()), "cpu")
    if config.name in OPTIMIZERS:
        settled = {"mesh": mesh, "dtype": dtype}
        arguments |= {
            name: settled[name]
            for name in settled.keys() & inspect.signature(kind).parameters.keys()
        }
    if working is not None and config.name in ("adamw", "adamw_8bit") and not config.options:
        from threefold.optim.fused_adamw import FusedAdamW, can_step_on

        if can_step_on(torch.device(device)):
            moments = getattr(torch, "uint8" if config.name == "adamw_8bit" else config.moments)
            return FusedAdamW(asked, lr=lr, working=working, moments=moments, **arguments)
    if not exact:
        arguments |= kernel_of(kind, device=device, sharded=sharded)
    if config.moments == "bfloat16":
        kind = ExactNarrowAdamW if exact else NarrowAdamW
    elif exact:
        kind = exact_class_of(config)
    return kind(asked, lr=lr, **arguments)


def _group_of(name: str, config: OptimizerConfig) -> int | None:
    return next(
        (number for number, group in enumerate(config.groups) if re.search(group.match, name)),
        None,
    )


def _group(
    parameters: list[nn.Parameter],
    key: tuple[Any, ...],
    config: OptimizerConfig,
    *,
    decay: bool,
) -> dict[str, Any]:
    _, is_matrix, number, orthogonal = key
    group: dict[str, Any] = {"params": parameters, "lr_share": 1.0}
    own = config.groups[number] if number is not None else None
    if decay:
        group["weight_decay"] = config.weight_decay if is_matrix else 0.0
        if own is not None and own.weight_decay is not None:
            group["weight_decay"] = own.weight_decay
    if orthogonal is not None:
        group["orthogonal"] = orthogonal
    if own is not None and own.lr is not None and number is not None and config.lr != "auto":
        group |= {"lr_share": own.lr / config.lr, "label": group_name(config, number)}
    return group


def optimizer_problems(
    config: Config, outline: nn.Module, topology: Topology
) -> Iterator[Problem]:
    """Why the optimizer that is asked for cannot train this model on this mesh; known before the first collective."""
    asked = config.optimizer
    yield from problems(asked, topology)
    if asked.groups and not config.model.lora.r:  # adapters have their names when they are made
        yield from group_problems([name for name, _ in outline.named_parameters()], asked)
    named = OPTIMIZERS.get(asked.name)
    if config.mesh.cpu_offload and named is not None and named.needs_whole_matrices:
        yield Problem(
            f"mesh.cpu_offload = true with optimizer.name = {asked.name}",
            "an optimizer that updates each weight by itself: the host holds no whole matrix",
            "--optimizer.name adamw   (or leave mesh.cpu_offload out)",
        )


def group_problems(names: Sequence[str], config: OptimizerConfig) -> Iterator[Problem]:
    """The patterns of groups that no parameter is left for; `names`: of all parameters that are trained."""
    taken = Counter(_group_of(name, config) for name in names)
    for number, group in enumerate(config.groups):
        if taken[number]:
            continue
        nothing = "no parameter that is trained"
        if any(re.search(group.match, name) for name in names):
            nothing = "only parameters that the groups before it take"
        shapes = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
        near = (
            difflib.get_close_matches(
                re.sub(r"[\\^$]", "", group.match), shapes, n=3, cutoff=0.3
            )
            or shapes[:3]
        )
        yield Problem(
            f"optimizer.groups[{number}].match = {as_yaml(group.match)} matches {nothing}",
            "a pattern that matches names of parameters; the first match counts",
            f"a pattern of their names: {', '.join(near)}",
        )


def described(optimizer: Optimizer, config: OptimizerConfig) -> Iterator[tuple[str, str]]:
    """(what, why) of an optimizer that is not AdamW over one group, to be printed."""
    if isinstance(optimizer, Muon):
        hidden = sum(
            len(group["params"]) for group in optimizer.param_groups if group["orthogonal"]
        )
        others = sum(len(group["params"]) for group in optimizer.param_groups) - hidden
        yield "optimizer", f"muon for {hidden} matrices, adamw for {others} others"
    elif config.name != "adamw":
        options = f" with {as_yaml(config.options)}" if config.options else ""
        yield "optimizer", f"{config.name}{options}"
    if config.moments != "float32":
        yield "moments", f"{config.moments} between the steps, which compute in float32"
    if config.ema is not None:
        yield (
            "ema",
            f"a moving average of the weights, decay {config.ema:g}, one more copy of them",
        )
    for number, group in enumerate(config.groups):
        settings = ", ".join(
            f"{name} {value:g}"
            for name, value in group
            if name in ("lr", "weight_decay") and value is not None
        )
        yield f"group {group_name(config, number)}", f"{settings} for {as_yaml(group.match)}"


def rates_of(optimizer: Optimizer) -> dict[str, float]:
    """The rate of each group that has its own, by its name in metrics."""
    return {
        f"lr_{group['label']}": group["lr"]
        for group in optimizer.param_groups
        if "label" in group
    }


def begin_state(model: nn.Module, optimizer: Optimizer, index: Index) -> None:
    """Gives an optimizer the state that a checkpoint has, to be filled from it; every rank calls it.

    The state is what a step with zero gradients and the rate zero leaves, so it has the tensors that it will have. The
    weights are to be read from the checkpoint too.

    Raises:
        CheckpointError: the checkpoint has the state of another optimizer.
    """
    if not makes_its_state(optimizer):
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    refuse_other_state(model, optimizer, index)


def own_optimizer(make: Callable[[Any], Optimizer], model: Any) -> Optimizer:
    """The optimizer that a program makes of the Model; every rank calls it.

    The rates of its groups are peaks: a group's share of the first one's is kept as the schedule proceeds. A group's
    `name` is its name in metrics.

    Raises:
        ConfigError: it is over other parameters, has a rate of 0, or cannot be used on this mesh.
    """
    optimizer = make(model)
    refuse_other_parameters(optimizer, model.module)
    rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise ConfigError(
            f"the optimizer has groups with the rates {', '.join(f'{rate:g}' for rate in rates[:5])}",
            expected="peak rates above 0, which optimizer.schedule shapes",
            fix="torch.optim.SGD(model.parameters(), lr=0.01)",
        )
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr_share"] = rate / rates[0]
        if "name" in group:
            group["label"] = str(group["name"])
    ConfigError.raise_for(own_problems(optimizer, model.mesh.topology))
    return optimizer


def refuse_other_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """ConfigError unless a custom optimizer is over parameters of this model, as they are now."""
    own = {id(parameter) for parameter in model.parameters()}
    if not isinstance(optimizer, Optimizer):
        what = f"the optimizer is a {type(optimizer).__name__}"
    elif strange := sum(
        id(each) not in own for group in optimizer.param_groups for each in group["params"]
    ):
        what = f"the optimizer has {strange} parameters that are not the model's, which would not be trained"
    else:
        return
    raise ConfigError(
        what,
        expected="a torch optimizer over the parameters on the mesh: load_model replaces those that it splits",
        fix="model = threefold.load_model(...), then optimizer = torch.optim.AdamW(model.parameters())",
    )
