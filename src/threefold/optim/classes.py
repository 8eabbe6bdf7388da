"""The class of a named optimizer, and whether it can be trusted on a mesh and in a checkpoint.

A built-in name is in `config/optimizer.py`'s table. Any other is the path of a class of an installed package: it is
tried here on a few numbers, in every process alike and before the first collective. Its update of a matrix must be that
of the matrix's parts, or it is refused where ranks hold parts; and its state must be tensors, or a run could not be
resumed.
"""

import difflib
import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from threefold.checkpoint.tensors import TYPE_NAMES
from threefold.config.optimizer import OPTIMIZERS, OptimizerConfig
from threefold.config.yaml_text import as_yaml, to_set
from threefold.errors import ConfigError, Problem
from threefold.jsonl import Values
from threefold.mesh.topology import Topology
from threefold.model.collectives import whole_of
from threefold.optim.muon import Muon

# A program may make these itself, and use them on any mesh: tests compare them with one process.
_COMPARED = (torch.optim.AdamW, torch.optim.SGD, Muon)
# Keys of their own, and what the run settles.
_SETTLED = (
    "params",
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "mesh",
    "dtype",
    "fused",
    "foreach",
    "capturable",
    "differentiable",
)
# One kernel for many tensors, which DTensor knows; the others have an operation for many tensors at a time.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_OF_MANY = (
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Adadelta,
)
# The trial: three steps of a matrix, whose parts must be updated as the whole is. Of fewer than 4,096 values some
# optimizers keep another state.
_SHAPE, _STEPS, _RATE, _BOUND = (64, 64), 3, 0.1, 1e-4


def class_of(config: OptimizerConfig) -> type[Optimizer]:
    """The class named by optimizer.name.

    Raises:
        ConfigError: there is none, or none that can be used here.
    """
    if (named := OPTIMIZERS.get(config.name)) is not None:
        return _at(named.path)
    first, *others = OPTIMIZERS
    what = f"optimizer.name = {as_yaml(config.name)}"
    remark = f"   (or {', '.join(others)})"
    module, _, name = config.name.rpartition(".")
    package = module.partition(".")[0]
    if package not in importlib.metadata.packages_distributions():
        expected = "a class of an installed package: other code is not run"
        what = f"{what}: there is no installed package {package!r}"
        raise ConfigError.of([to_set(what, expected, "optimizer.name", first, remark=remark)])
    try:
        holder = importlib.import_module(module)
    except Exception as error:  # whatever a package raises while it is imported
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        what = f"{what}: {reason}"
        expected = "a module that can be imported"
        raise ConfigError.of(
            [to_set(what, expected, "optimizer.name", first, remark=remark)]
        ) from error
    member = getattr(holder, name, None)
    if not isinstance(member, type) or not issubclass(member, Optimizer) or member is Optimizer:
        near = difflib.get_close_matches(
            name, [key for key in dir(holder) if key[:1].isupper()], n=1
        )
        kind = "is not there" if member is None else "is not an optimizer class"
        expected = "a subclass of torch.optim.Optimizer"
        if near and near[0] != name:
            first, remark = f"{module}.{near[0]}", ""
        raise ConfigError.of(
            [to_set(f"{what} {kind}", expected, "optimizer.name", first, remark=remark)]
        )
    return member


def exact_class_of(config: OptimizerConfig) -> type[Optimizer]:
    """The class that takes its place with train.reduce exact; `mesh.exact_limits` lets in only names that have one."""
    path = OPTIMIZERS[config.name].exact_path
    assert path is not None
    return _at(path)


def _at(path: str) -> type[Optimizer]:
    module, _, name = path.partition(":")
    value: Any = getattr(importlib.import_module(module), name)
    kind: type[Optimizer] = value if isinstance(value, type) else value()
    return kind


def arguments_of(config: OptimizerConfig, kind: type[Optimizer]) -> dict[str, Any]:
    """Arguments of its constructor beyond parameters and rate; weight decay belongs to the groups."""
    takes = inspect.signature(kind).parameters
    options = config.options.items()
    arguments: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in options
    }
    if "betas" in takes:
        arguments["betas"] = config.betas
    if "eps" in takes and isinstance(takes["eps"].default, float) and "eps" not in arguments:
        arguments["eps"] = config.eps
    return arguments


def kernel_of(kind: type[Optimizer], *, device: str, sharded: bool) -> dict[str, bool]:
    """The arguments that give one of torch's optimizers its fastest kernel; none for others, and where torch knows.

    Args:
        device: where the weights are.
        sharded: whether they are DTensors, for which torch itself takes a loop over single tensors.
    """
    if kind in _FUSED:
        return {"fused": True}
    return {"foreach": True} if kind in _OF_MANY and sharded and device == "cuda" else {}


def problems(config: OptimizerConfig, topology: Topology) -> list[Problem]:
    """Why the optimizer that is asked for cannot be used on this mesh; empty if it can."""
    try:
        kind = class_of(config)
    except ConfigError as error:
        return list(error.problems)
    if wrong := list(_argument_problems(config, kind)):
        return wrong
    named = OPTIMIZERS.get(config.name)
    if (
        named is not None
        and not named.splits
        and topology.dp_shard * topology.cp * topology.tp > 1
    ):
        what = f"optimizer.name = {config.name} on the mesh {topology}, which splits matrices"
        expected = "dp ranks alone, each with the whole model: it does not update a part of a matrix as the whole"
        fix = f"--mesh.dp {topology.world_size} --mesh.dp_shard 1 --mesh.cp 1 --mesh.tp 1   (or --optimizer.name adamw)"
        return [Problem(what, expected, fix, ("optimizer.name", "adamw", ""))]
    return _tried(config, kind, topology)


def own_problems(optimizer: Optimizer, topology: Topology) -> list[Problem]:
    """Why a program's optimizer cannot be used on this mesh, as far as a trial of its class with its defaults shows."""
    kind = type(optimizer)
    if kind in _COMPARED or topology.world_size == 1:
        return []
    return _tried(
        OptimizerConfig(name=f"{kind.__module__}.{kind.__qualname__}"), kind, topology
    )


def mesh_problems(optimizer: Optimizer) -> list[Problem]:
    """Why an optimizer cannot step on split parameters, as a trial with its settings shows; every rank calls it.

    The trial steps copies of a small parameter of each kind of each group, which must move as the whole ones do.
    """
    groups = optimizer.param_groups
    if not any(isinstance(each, DTensor) for each in _parameters(groups)) or any(
        "lr_share" in group for group in groups
    ):
        return []  # nothing is split, or the run has tried it
    name = type(optimizer).__name__
    kernels = [key for key in ("fused", "foreach") if any(group.get(key) for group in groups)]
    fix = (
        f"leave {kernels[0]}=True out"
        if kernels
        else "torch.optim.AdamW(model.parameters(), lr=...)"
    )
    split = [
        {**group, "params": [nn.Parameter(each.clone()) for each in _kinds(group["params"])]}
        for group in groups
    ]
    whole = [
        {**group, "params": [nn.Parameter(whole_of(each).clone()) for each in group["params"]]}
        for group in split
    ]
    start = [each.detach().clone() for each in _parameters(whole)]
    takes = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in takes}
    try:
        for trial in (split, whole):
            tried = type(optimizer)(trial, **settings)
            for _ in range(2):
                for each in _parameters(trial):
                    each.grad = (3 * each.detach() + 1).sin()
                tried.step()
    except Exception as error:  # whatever a step raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        expected = "a step that can update the parts of matrices that this mesh holds"
        return [Problem(f"{name} cannot step on this mesh: {reason}", expected, fix)]
    for part, complete, before in zip(
        _parameters(split), _parameters(whole), start, strict=True
    ):
        moved = (complete.detach() - before).abs().max()
        if (whole_of(part.detach()) - complete.detach()).abs().max() > _BOUND * moved:
            what = f"{name} does not update a part of a matrix as it updates the whole, and this mesh holds parts"
            expected = "an update of each weight by itself, or dp ranks alone, each with the whole model"
            return [Problem(what, expected, fix)]
    return []


def _parameters(groups: Sequence[Values]) -> list[Tensor]:
    return [each for group in groups for each in group["params"]]


def _kinds(parameters: list[Tensor]) -> list[Tensor]:
    """The smallest parameter of each kind: as many dimensions, split alike, of the same type."""
    smallest: dict[Any, Tensor] = {}
    for each in sorted(parameters, key=lambda each: each.numel()):
        split = (each.device_mesh, each.placements) if isinstance(each, DTensor) else None
        smallest.setdefault((each.ndim, each.dtype, each.device, split), each)
    return [*smallest.values()]


def _tried(config: OptimizerConfig, kind: type[Optimizer], topology: Topology) -> list[Problem]:
    try:
        start, gradients = _numbers()
        vector = [] if kind is Muon else [start[0]]
        whole = _trial(
            config, kind, [start, *vector], [gradients, [each[0] for each in gradients]]
        )
    except Exception as error:  # whatever a constructor or a step raises
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        extra = f" with optimizer.options = {as_yaml(config.options)}" if config.options else ""
        what = f"optimizer.name = {config.name}{extra}: {reason}"
        expected = "a constructor and a step that accept matrices, vectors and these options"
        if config.options:
            return [Problem(what, expected, "leave optimizer.options out")]
        first, *others = OPTIMIZERS
        return [
            to_set(
                what, expected, "optimizer.name", first, remark=f"   (or {', '.join(others)})"
            )
        ]
    if config.name in OPTIMIZERS:
        return []
    return list(_trust_problems(config, kind, whole, topology))


def _argument_problems(config: OptimizerConfig, kind: type[Optimizer]) -> Iterator[Problem]:
    takes = inspect.signature(kind).parameters
    named = OPTIMIZERS.get(config.name)
    allowed = [name for name in takes if name not in _SETTLED] + [
        *(named.options if named is not None else ())
    ]
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    for name in (each for each in config.options if each not in allowed):
        expected = f"options among {', '.join(allowed)}"
        fix = f"leave {name} out of optimizer.options"
        if name in _SETTLED and name in takes:
            what = f"optimizer.options has {name}, which the run sets"
            yield Problem(what, expected, fix)
        elif not any_name:
            if near := difflib.get_close_matches(name, allowed, n=1):
                fix = f"did you mean {near[0]}?"
            what = f"optimizer.options has {name}, which {kind.__name__} does not take"
            yield Problem(what, expected, fix)
    for key in ("betas", "eps"):
        value = getattr(config, key)
        has = key in arguments_of(config, kind) and key not in config.options
        if value != getattr(OptimizerConfig(), key) and not has and named is None:
            what = f"optimizer.{key} = {as_yaml(value)} has no effect on {config.name}"
            yield Problem(what, f"an optimizer that has {key}", f"leave optimizer.{key} out")
    if "weight_decay" not in takes and any(group.weight_decay for group in config.groups):
        yield Problem(
            f"optimizer.groups has weight_decay, which {config.name} does not take",
            "an optimizer with weight decay",
            "leave weight_decay out of optimizer.groups",
        )
    if "lr" not in takes:
        what = f"{config.name} has no learning rate"
        expected = "lr, which the schedule sets"
        yield to_set(what, expected, "optimizer.name", "adamw")
    if any(
        each.default is inspect.Parameter.empty
        for each in inspect.signature(kind.step).parameters.values()
        if each.name not in ("self", "args", "kwargs")
    ):
        yield to_set(
            f"{config.name} re-evaluates the loss in each step",
            "an optimizer that needs one gradient per step",
            "optimizer.name",
            "adamw",
        )


def _numbers() -> tuple[Tensor, list[Tensor]]:
    """A matrix, and its gradients in the steps of the trial; the same in every process."""
    draw = torch.Generator().manual_seed(0)
    drawn = [torch.randn(_SHAPE, generator=draw) for _ in range(_STEPS + 1)]
    return drawn[0], drawn[1:]


class _Trial(NamedTuple):
    """The result of the trial: the parameters, the optimizer, and changes outside its state."""

    parameters: list[Tensor]
    optimizer: Optimizer
    changed: list[str]


def _trial(
    config: OptimizerConfig,
    kind: type[Optimizer],
    start: list[Tensor],
    gradients: list[list[Tensor]],
) -> _Trial:
    parameters = [nn.Parameter(each.clone()) for each in start]
    arguments = arguments_of(config, kind)
    if "weight_decay" in inspect.signature(kind).parameters:
        arguments["weight_decay"] = config.weight_decay
    optimizer = kind([{"params": parameters}], lr=_RATE, **arguments)
    kept = _plain_values(optimizer)
    for number in range(_STEPS):
        for parameter, own in zip(parameters, gradients, strict=False):
            parameter.grad = own[number].clone()
        optimizer.step()
    changed = [
        name for name, value in _plain_values(optimizer).items() if kept.get(name) != value
    ]
    return _Trial([parameter.detach() for parameter in parameters], optimizer, changed)


def _plain_values(optimizer: Optimizer) -> Values:
    """Plain values outside the state: of the groups, and of the object."""
    group = optimizer.param_groups[0]
    return {name: value for name, value in group.items() if name != "params"} | {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_opt_called")
    }


def _trust_problems(
    config: OptimizerConfig,
    kind: type[Optimizer],
    whole: _Trial,
    topology: Topology,
) -> Iterator[Problem]:
    name, another = config.name, ("optimizer.name", "adamw")
    if whole.changed:
        yield to_set(
            f"{name} changes {whole.changed[0]} in its step, outside its state",
            "a state of tensors, one set for each parameter, which a checkpoint keeps",
            *another,
        )
        return
    for state in whole.optimizer.state.values():
        for key, value in state.items():
            if value is not None and (
                type(value) is not Tensor or value.dtype not in TYPE_NAMES
            ):
                kept = f"a {type(value).__name__}"
                expected = "a state of tensors, which a checkpoint keeps"
                yield to_set(f"{name} keeps {kept} as {key}", expected, *another)
                return
    if topology.world_size == 1:
        return
    start, gradients = _numbers()
    again = _trial(config, kind, [start], [gradients])
    if not torch.equal(again.parameters[0], whole.parameters[0]):
        what = f"{name} gives a different update when called again: it draws random numbers"
        yield to_set(what, "the same update on every rank that has the same weights", *another)
        return
    if topology.dp_shard * topology.cp * topology.tp == 1:
        return
    whole_models = f"--mesh.dp {topology.world_size} --mesh.dp_shard 1 --mesh.cp 1 --mesh.tp 1"
    furthest = (whole.parameters[0] - start).abs().max()
    for dim in (0, 1):
        parts = [
            _trial(
                config, kind, [part], [[each.chunk(2, dim)[number] for each in gradients]]
            ).parameters[0]
            for number, part in enumerate(start.chunk(2, dim))
        ]
        if (torch.cat(parts, dim) - whole.parameters[0]).abs().max() > _BOUND * furthest:
            yield Problem(
                f"{name} does not update a part of a matrix as it updates the whole, and this mesh holds parts",
                "an update of each weight by itself, or dp ranks alone, each with the whole model",
                f"--optimizer.name adamw   (or {whole_models})",
                (*another, ""),
            )
            return
