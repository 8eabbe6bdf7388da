"""A custom module on the data ranks: whole on each (DDP), or its parameters shared among them (FSDP2, HSDP)."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from threefold.errors import ConfigError, Problem
from threefold.mesh.mesh import Mesh
from threefold.model import data_parallel
from threefold.model.gradient_sums import hook_problems
from threefold.model.model import Model
from threefold.plan import choices

_UNMIXED = (
    "nn.GroupNorm in its place; or its statistics frozen: module.eval() for it and "
    "requires_grad_(False); an embedding without scale_grad_by_freq and max_norm"
)
_OPTIONS = ("scale_grad_by_freq", "max_norm")


def on_mesh(module: nn.Module, mesh: Mesh, *, dtype: str) -> Model:
    """The module with rank 0's values on every rank, sharded in place as mesh.dp_shard asks; every rank calls it.

    Raises:
        ConfigError: the mesh or the module has what cannot be kept exact; on every rank.
    """
    tensors = [
        [name, [*values.shape], str(values.dtype)]
        for name, values in (*module.named_parameters(), *module.named_buffers())
    ]

    def judge(parts: list[Any]) -> str:
        ConfigError.raise_for(_problems(module, mesh))
        if other := next((rank for rank, part in enumerate(parts) if part != parts[0]), None):
            raise ConfigError(
                f"rank {other} gives load_model another {type(module).__name__} than rank 0",
                expected="the same module on every rank, by the names and shapes of its tensors",
                fix="build it from the same settings on every rank",
            )
        return ""

    mesh.decide("own module", tensors, judge)
    module.to(mesh.device)
    group = mesh.group("world")
    for values in (*module.parameters(), *module.buffers()):
        # Shards must be contiguous, and so must targets of a checkpoint.
        values.data = values.data.contiguous()
        if group is not None:
            dist.broadcast(values.data, src=0, group=group)
    kind, why = choices.data_parallel(mesh.topology)
    if kind == "fsdp":
        # Gathered in float32 and cast by operation: the same arithmetic as where the module is whole.
        data_parallel.shard(module, mesh, dtype=torch.float32)
    # As with DDP, gradients are averaged once a step (`training.gradients`), even if a rank has left some out.
    return Model(
        module,
        module,
        mesh,
        autocast=torch.bfloat16 if dtype == "bfloat16" else None,
        choices=((f"data parallelism: {kind}", why),),
        # Its original files are unknown.
        trained={f"model.{name}" for name in module.state_dict()},
    )


def _problems(module: nn.Module, mesh: Mesh) -> Iterator[Problem]:
    kind = type(module).__name__
    for axis in ("tp", "cp"):
        if mesh.size(axis) > 1:
            what = f"mesh.{axis} = {mesh.size(axis)}, but a {kind} is a custom module"
            ranks = mesh.world_size
            yield Problem(
                what,
                "data ranks only: how to split its layers or its rows is not known",
                f"threefold.init_mesh(dp={ranks}, {axis}=1)   (dp_shard={ranks} shards its parameters)",
            )
    wrappers = "torch.nn.parallel", "torch.distributed", "torch._dynamo"
    if any(base.__module__.startswith(wrappers) for base in type(module).__mro__):
        yield Problem(
            f"a {kind} is a module wrapped by torch",
            "the module itself: load_model copies or shards it",
            "load_model(module, mesh=mesh) with what was wrapped; then module.compile()",
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        what = f"a {kind} has no parameter that is trained"
        yield Problem(what, "at least one with requires_grad", "parameter.requires_grad_(True)")
    yield from hook_problems(module.named_parameters())
    yield from [*_of_state(module, kind)][:1]  # many of a kind, as in a float16 module
    if (mixing := mixes_rows(module, but=nn.SyncBatchNorm)) is not None and mesh.dp_size > 1:
        what = f"{mixing} mixes the rows of a rank, and each of {mesh.dp_size} dp ranks has its own"
        fix = _UNMIXED
        if mesh.on_cuda:
            fix = f"module = nn.SyncBatchNorm.convert_sync_batchnorm(module)   (or {fix})"
        yield Problem(
            what, "rows that do not see one another: the mesh would change the curve", fix
        )
    if mesh.topology.dp_shard > 1:
        yield from _of_shards(module)


def _of_shards(module: nn.Module) -> Iterator[Problem]:
    for name, each in module.named_parameters():
        if not each.ndim or not each.numel():
            yield Problem(
                f"the parameter {name} is of shape {[*each.shape]}, and is to be sharded",
                "a dimension, to be split over the ranks",
                "nn.Parameter(torch.ones(1)), or threefold.init_mesh(dp_shard=1)",
            )


def _of_state(module: nn.Module, kind: str) -> Iterator[Problem]:
    """State that cannot be trained or saved: other dtypes, sparse gradients, state outside parameters and buffers."""
    for name, value in module.state_dict(keep_vars=True).items():
        if name.endswith("_extra_state"):
            what = f"a {kind} has a state of its own, {name}, which no checkpoint would hold"
            yield Problem(
                what, "parameters and buffers", "register_buffer, not get_extra_state"
            )
            continue
        what = f"{name} of a {kind} is {str(value.dtype).removeprefix('torch.')}"
        if isinstance(value, nn.Parameter) and value.dtype != torch.float32:
            fix = "module.float(), and load_model(module, dtype='bfloat16')"
            if not value.is_floating_point():
                fix = "a buffer in its place, or a parameter of torch.view_as_real(...)"
            expected = "float32 weights; dtype= sets the type they compute in"
            yield Problem(f"the parameter {what}", expected, fix)
        elif value.is_complex():
            fix = "torch.view_as_real(...), or persistent=False if it is always computed"
            yield Problem(f"the buffer {what}", "real numbers, which files hold", fix)
    for name, layer in module.named_modules():
        if getattr(layer, "sparse", False):
            what = f"{type(layer).__name__} {name!r} has sparse gradients"
            expected = "dense gradients: they are summed over ranks, and clipped"
            yield Problem(what, expected, f"{type(layer).__name__}(..., sparse=False)")


def mixes_rows(module: nn.Module, *, but: type[nn.Module] | tuple[()] = ()) -> str | None:
    """The class and name of a layer whose output or gradient of a row depends on other rows; `but` do not count."""
    norms = nn.modules.batchnorm._BatchNorm
    for name, each in module.named_modules():
        normalises = isinstance(each, norms) and each.training and not isinstance(each, but)
        # Embeddings: gradients scaled by token frequency, weights that forward changes.
        if normalises or any(getattr(each, option, None) for option in _OPTIONS):
            return f"{type(each).__name__} {name!r}"
    return None
