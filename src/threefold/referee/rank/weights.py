"""Weights and gradients of the model that is trained, as a rank holds them: its own parts, with their places.

Ranks that hold a copy write digests instead, so that a record has each weight once for each part of it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .sealed import digest

_SETTINGS = (
    *("betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad", "maximize"),
    "decoupled_weight_decay",
)
# Of packages whose replacements leave to labels the meaning that they have in transformers.
_KEEP_MEANING = ("transformers", "accelerate", "torch", "liger_kernel")
_WRAPPERS = ("module", "_orig_mod")


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The model below the wrappers of data parallelism and of compilation."""
    while (inner := next((each for name in _WRAPPERS if (each := module._modules.get(name)) is not None), None)) and (
        len(module._modules) == 1 and not module._parameters
    ):
        module = inner
    return module


def architecture_of(module: torch.nn.Module) -> dict[str, Any]:
    """What a model of transformers is built from: its class and its config; or `unknown`, why it is none."""
    model = unwrapped(module)
    kind = type(model)
    config: Any = getattr(model, "config", None)
    # A class that `fully_shard` has made has the one of the model as its base.
    kinds = [base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")]
    if not kinds or kind.__name__.removeprefix("FSDP") != kinds[0].__name__ or not hasattr(config, "to_json_string"):
        why = f"{kind.__name__} is not a model of transformers: --alone COMMAND trains it in one process"
        return {"unknown": why, "dropout": sorted(_dropouts(model))}
    return {
        "class": kinds[0].__name__,
        "config": json.loads(config.to_json_string(use_diff=False)),
        "attention": str(getattr(config, "_attn_implementation", "")),
        "replaced": _replaced(model),
        "dropout": sorted(_dropouts(model)),
    }


def _replaced(model: torch.nn.Module) -> str | None:
    """Whose function computes the forward or the loss, where that is not the one of transformers."""
    given = vars(model)
    for function in (given.get("forward", type(model).forward), given.get("_loss_function")):
        home = getattr(inspect.unwrap(function), "__module__", "") if callable(function) else ""
        if home and home.partition(".")[0] not in _KEEP_MEANING:
            return f"{home}.{getattr(function, '__name__', 'a function')}"
    return None


def _dropouts(model: torch.nn.Module) -> Iterator[str]:
    """What draws random numbers in a step."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            yield name
        for setting in ("attention_dropout", "layerdrop", "layer_dropout"):
            if isinstance(value := getattr(module, setting, None), float) and value > 0:
                yield f"{name}.{setting}"


def parts_of(named: Iterable[tuple[str, torch.Tensor | None]]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Copies on the host of the parts that this rank holds, and of each its whole shape and where it begins in it.

    Raises:
        ValueError: a tensor is a summand, or divided in a way that does not show.
    """
    parts: dict[str, torch.Tensor] = {}
    places: dict[str, Any] = {}
    for name, tensor in named:
        if tensor is None:
            continue
        local, begin = tensor.detach(), [0] * tensor.ndim
        if hasattr(local, "placements"):
            local, begin = local_part(local)
        parts[name] = local.to("cpu", copy=True).contiguous()
        places[name] = {"shape": list(tensor.shape), "begin": begin, "size": list(local.shape)}
    return parts, places


def local_part(tensor: Any) -> tuple[torch.Tensor, list[int]]:
    """The part of a DTensor that this rank holds, and where it begins in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError("a gradient is still to be summed over ranks")
    shape, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if tuple(shape) != tuple(local.shape):
        raise ValueError(f"a part of {tuple(local.shape)} where placements tell {tuple(shape)}")
    return local, list(begin)


class StepCurve:
    """What is recorded of one step's weights and gradients: `values` for its line, `tensors` for its file.

    Args:
        keeps_copy: whether this rank's parts are written; else only their digests.
        most_bytes: how much they may take.
    """

    def __init__(self, module: torch.nn.Module, number: int, *, keeps_copy: bool, most_bytes: int) -> None:
        self.values: dict[str, Any] = {"module": number, "clip": None}
        self.tensors: dict[str, torch.Tensor] = {}
        self.types: set[str] = set()
        self._parameters = [each for each in unwrapped(module).named_parameters() if each[1].requires_grad]
        self.values["trained"] = [name for name, _ in self._parameters]
        self._all = unwrapped(module).named_parameters
        self._keeps_copy = keeps_copy
        self._has_gradients = False
        size = 2 * sum(parameter.nbytes for _, parameter in self._all())
        if keeps_copy and size > most_bytes:
            self.values["unknown"] = f"weights and gradients of {size / 2**20:,.0f} MiB do not fit into --keep"
            return
        self._take("weight", self._all())

    def take_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer that is about to step: its class, and the settings and parameters of its groups."""
        names = {id(parameter): name for name, parameter in self._all()}
        groups = []
        for group in optimizer.param_groups:
            settings = {name: group[name] for name in _SETTINGS if isinstance(group.get(name), int | float | tuple)}
            settings |= {"lr": float(group["lr"])} if "lr" in group else {}
            groups.append({"names": [names[id(p)] for p in group["params"] if id(p) in names], "settings": settings})
        kind = type(optimizer)
        known = kind.__name__ if kind.__module__.startswith("torch.optim.") else f"{kind.__module__}.{kind.__name__}"
        self.values["optimizer"] = {"class": known, "is_new": not optimizer.state, "groups": groups}

    def take_gradients(self) -> None:
        """The gradients, once in a step: before they are clipped, or before the optimizer takes them."""
        if not self._has_gradients:
            self._has_gradients = True
            self._take("gradient", ((name, parameter.grad) for name, parameter in self._parameters))

    def _take(self, kind: str, named: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        if "unknown" in self.values:
            return
        try:
            parts, places = parts_of(named)
        except ValueError as error:
            self.values["unknown"] = str(error)
            return
        self.values[f"{kind}s"] = {name: {**places[name], "digest": value} for name, value in digests_of(parts).items()}
        if self._keeps_copy:
            self.tensors |= {f"{kind}.{name}": part for name, part in parts.items()}


def digests_of(parts: dict[str, torch.Tensor]) -> dict[str, str]:
    """The digest of the values of each tensor."""
    return {name: digest(part.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, part in parts.items()}
