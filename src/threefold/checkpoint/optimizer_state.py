"""An optimizer's state as named tensors: `optimizer.exp_avg.` and a parameter's name, for any optimizer.

A tensor that is split like its parameter, or in any way that a DTensor describes, is kept whole and read by any mesh;
scalars are the same on every rank. State missing from a checkpoint had not begun when it was saved.
"""

from collections.abc import Container

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import TYPE_NAMES
from threefold.errors import CheckpointError, ConfigError

_PREFIX = "optimizer."
_ADAM = (torch.optim.Adam, torch.optim.AdamW)


def optimizer_state(
    model: nn.Module, optimizer: Optimizer, held: Container[str] = ()
) -> dict[str, Tensor]:
    """Live tensors of the optimizer's state; Adam's are made here before its first step, as it makes them.

    Once some of Adam's are there, parameters without any have not begun.

    Args:
        held: the names in a checkpoint, whose moments of parameters that are frozen now are made too.

    Raises:
        ConfigError: something in it cannot be kept for any mesh.
    """
    state: dict[str, Tensor] = {}
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    begun = {*optimizer.state}
    for name, parameter in model.named_parameters():
        has_begun = parameter in begun or f"{_PREFIX}step.{name}" in held
        if id(parameter) not in own or not (
            has_begun or (parameter.requires_grad and not begun)
        ):
            continue
        kept = optimizer.state.get(parameter, {})
        if makes_its_state(optimizer) and not kept:
            kept = optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        for key, value in plain_state(kept).items():
            if (wrong := _cannot_be_kept(value, parameter)) is not None:
                raise _refused(optimizer, f"{key} of {name} {wrong}")
            assert isinstance(value, Tensor)
            state[f"{_PREFIX}{key}.{name}"] = value.detach()
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            raise _refused(optimizer, f"{key!r} belongs to no parameter")
    for name, value in vars(optimizer).items():
        beside = value.state if isinstance(value, Optimizer) else value
        if beside is optimizer.state or not isinstance(beside, dict):
            continue
        if any(
            isinstance(key, Tensor) and isinstance(beside[key], Tensor | dict) for key in beside
        ):
            raise _refused(optimizer, f"its {name} has some, besides optimizer.state")
    return state


def _refused(optimizer: Optimizer, what: str) -> ConfigError:
    return ConfigError(
        f"the optimizer {type(optimizer).__name__} has a state that cannot be kept: {what}",
        expected="tensors split like the parameters, which any mesh can read",
        fix="torch.optim.AdamW(model.parameters()), or save without optimizer=",
    )


def plain_state(kept: dict[str, object]) -> dict[str, object]:
    """The state with tensors that are made of others (torchao's 8-bit ones) as these: `exp_avg.codes` and so on."""
    plain: dict[str, object] = {}
    for key, value in kept.items():
        if (
            isinstance(value, DTensor)
            and is_traceable_wrapper_subclass(value.to_local())
            and not _is_split(value)
        ):
            value = value.to_local()
        if (
            isinstance(value, Tensor)
            and not isinstance(value, DTensor)
            and is_traceable_wrapper_subclass(value)
        ):
            plain |= {
                f"{key}.{inner}": getattr(value, inner)
                for inner in value.__tensor_flatten__()[0]
            }
        elif value is not None:
            plain[key] = value
    return plain


def makes_its_state(optimizer: Optimizer) -> bool:
    """Whether the state is Adam's, which is known before a step was made."""
    return type(optimizer) in _ADAM and not any(
        group.get("amsgrad") for group in optimizer.param_groups
    )


def _cannot_be_kept(value: object, parameter: Tensor) -> str | None:
    if not isinstance(value, Tensor):
        return f"is not a tensor but {value!r}"
    local = value.to_local() if isinstance(value, DTensor) else value
    if value.dtype not in TYPE_NAMES or type(local) not in (Tensor, nn.Parameter):
        return f"is a {type(local).__name__} of {value.dtype}"
    if _is_split(parameter) and not isinstance(value, DTensor) and value.numel() > 1:
        return f"has the shape {list(value.shape)} on each rank, though its parameter is split"
    return None


def _is_split(tensor: Tensor) -> bool:
    """Whether ranks hold parts of it; in bfloat16 FSDP2 has tensors that each rank holds whole."""
    if not isinstance(tensor, DTensor):
        return False
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in sizes)


def refuse_other_state(model: nn.Module, optimizer: Optimizer, index: Index) -> None:
    """CheckpointError if a checkpoint has the state of another optimizer; forgets what it lacks altogether.

    The optimizer has a state for all parameters, whose values are to be read from the checkpoint.
    """
    wanted = optimizer_state(model, optimizer, index.entries)
    held = {name for name in index.entries if name.startswith(_PREFIX)}
    kind = type(optimizer).__name__
    # Frozen parameters in no group are no longer trained.
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    other = held - wanted.keys()
    if strange := sorted(each for each in other if each.split(".", 2)[-1] not in frozen):
        raise CheckpointError(
            f"the checkpoint has {strange[0]}, which {kind} does not have",
            expected="the state of the same optimizer, with the same options, over the same parameters",
            fix="use the optimizer of the run, or another folder for a new one",
        )
    for name, parameter in model.named_parameters():
        kept = optimizer.state.get(parameter, {})
        if kept and not any(f"{_PREFIX}{key}.{name}" in held for key in plain_state(kept)):
            del optimizer.state[parameter]
