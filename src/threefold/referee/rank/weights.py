"""Weights and gradients of the model that is trained, as a rank holds them: its own parts, with their places.

A part is a block of a DTensor, or some values in a row: of FullyShardedDataParallel, and of DeepSpeed's ZeRO, whose
stages 1 and 2 divide the gradients and whose stage 3 divides the weights too. All is read in place.

Ranks that hold a copy write digests instead, so that a record has each weight once for each part of it.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import Module

from .rows import Tensors
from .sealed import Values, digest

# Optimizer settings about where, not what, it computes.
_NOT_COMPUTED = {"foreach", "fused", "capturable", "differentiable"}
# Packages whose replacements keep the meaning of labels in transformers.
_KEEP_MEANING = ("transformers", "accelerate", "torch", "liger_kernel")
_INNER = re.compile(r"_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
# Fabric keeps the model next to its wrapper.
_WRAPPERS = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "_original_module",
}
_ZERO = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3")


def unwrapped(module: Module) -> Module:
    """The model below the wrappers of data parallelism and of compilation."""
    while module._modules and module._modules.keys() <= _WRAPPERS and not module._parameters:
        module = next(module.children())
    return module


def named_parameters(module: Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of the model below all wrappers, by their names in it.

    After a forward without a backward, fully_shard leaves gathered parameters in the module. The shards, which are
    trained, stand for them.
    """
    shards = {}
    for sharded in module.modules():
        if hasattr(sharded, "_get_fsdp_state"):
            state = sharded._get_fsdp_state()
            # One group before torch 2.13.
            for group in getattr(state, "_fsdp_param_groups", None) or [
                state._fsdp_param_group
            ]:
                for held in group.fsdp_params if group else ():
                    shards[id(getattr(held, "_unsharded_param", None))] = held.sharded_param
    return {
        _INNER.sub("", name): shards.get(id(parameter), parameter)
        for name, parameter in unwrapped(module).named_parameters()
    }


class Part(NamedTuple):
    """A rank's part of a tensor.

    Attributes:
        shape: of the whole tensor.
        begin: where the part begins in it; one number if the part is cut from its values in a row.
    """

    values: torch.Tensor
    shape: list[int]
    begin: list[int]

    @property
    def place(self) -> Values:
        """Which part it is."""
        return {"shape": self.shape, "begin": self.begin, "size": list(self.values.shape)}


def parts_in_a_row(module: Module) -> dict[int, tuple[list[int], int]]:
    """For each parameter of which FullyShardedDataParallel holds consecutive values: its shape, and the first place.

    Raises:
        ValueError: it holds several parameters as one.
    """
    flat_parameters = (
        getattr(getattr(each, "_handle", None), "flat_param", None) for each in module.modules()
    )
    places = {}
    for flat in flat_parameters:
        if flat is None:
            continue
        if flat._params is None:
            raise ValueError(
                "FullyShardedDataParallel(use_orig_params=False) does not show the parameters"
            )
        for parameter, shape, info in zip(
            flat._params, flat._shapes, flat._shard_param_infos, strict=True
        ):
            if parameter.ndim == 1:
                places[id(parameter)] = list(shape), info.intra_param_start_idx or 0
    return places


def part_of(tensor: Any, in_a_row: tuple[list[int], int] | None = None) -> Part:
    """This rank's part of a parameter, of its gradient or of its optimizer state.

    Args:
        in_a_row: the shape of the whole, and where the values begin in it, if they are some in a row.

    Raises:
        ValueError: a tensor is a summand, or divided in a way that does not show.
    """
    local = tensor.detach()
    if in_a_row is not None and local.ndim == 1:
        return Part(local, in_a_row[0], [in_a_row[1]])
    if not hasattr(local, "placements"):
        return Part(local, list(local.shape), [0] * local.ndim)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in local.placements):
        raise ValueError("a gradient has yet to be summed over ranks")
    shape, begin = compute_local_shape_and_global_offset(
        local.shape, local.device_mesh, local.placements
    )
    part = local.to_local()
    if tuple(shape) != tuple(part.shape):
        raise ValueError(f"a part of {tuple(part.shape)} where placements say {tuple(shape)}")
    return Part(part, list(local.shape), list(begin))


def norm_of(total: Any) -> Values:
    """A norm of gradients, or this rank's part, the order (0: the largest part) and the ranks to take it over."""
    if not hasattr(total, "placements"):
        return {"norm": float(total)}
    order: float | None = 2
    place = [*total.device_mesh.get_coordinate()]
    for axis, placement in enumerate(total.placements):
        if placement.is_partial():
            known = {"sum": 1, "max": 0}.get(placement.reduce_op)
            order, place[axis] = getattr(placement, "norm_type", known), slice(None)
    ranks = total.device_mesh.mesh[tuple(place)].flatten().tolist()
    return {"norm": float(total.to_local()), "order": order, "ranks": ranks}


def held_of(
    parameter: Any, kind: str, in_a_row: dict[int, tuple[list[int], int]]
) -> Part | None:
    """This rank's part of a parameter ("weight") or of its gradient; None: nothing.

    Args:
        in_a_row: of the parameters, as `parts_in_a_row` finds it.

    Raises:
        ValueError: as `part_of`, or DeepSpeed has no gradient yet.
    """
    is_weight = kind == "weight"
    if hasattr(parameter, "ds_tensor"):
        values = (
            parameter.ds_tensor
            if is_weight
            else parameter._z3_optimizer.get_local_fp32_grad_for_param(parameter)
        )
        begin = len(parameter.ds_tensor) * dist.get_rank(parameter.ds_process_group)
        # The last parts are filled up.
        return Part(
            values.flatten()[: max(0, parameter.ds_numel - begin)],
            list(parameter.ds_shape),
            [begin],
        )
    if not is_weight and hasattr(parameter, "_hp_mapping"):
        if (fragment := parameter._hp_mapping) is None:
            return None
        values = fragment.get_lp_grad_fragment(parameter._index_in_param_group)
        return Part(
            values.flatten(), list(parameter.shape), [fragment.lp_fragment_address.start]
        )
    tensor = parameter if is_weight else parameter.grad
    return None if tensor is None else part_of(tensor, in_a_row.get(id(parameter)))


def zero_of(module: Module) -> Any:
    """The optimizer of DeepSpeed's ZeRO in an engine of DeepSpeed; None in any other module, and in float16.

    There the loss is multiplied by a factor that changes.
    """
    zero: Any = getattr(module, "optimizer", None)
    if (
        type(zero).__name__ in _ZERO
        and zero.loss_scale == 1
        and not zero.torch_autocast_gradscaler
    ):
        return zero
    return None


def groups_of(zero: Any) -> list[Values]:
    """The groups of the optimizer that ZeRO steps, with the model's parameters where it has flat ones."""
    groups = [{**group, "params": []} for group in zero.optimizer.param_groups]
    parts = getattr(zero, "bit16_groups", None) or zero.fp16_groups
    numbers = getattr(zero, "sub_group_to_group_id", range(len(parts)))
    for place, parameters in enumerate(parts):
        groups[numbers[place]]["params"] += parameters
    return groups


def architecture_of(module: Module) -> Values:
    """The class and config of a transformers model; or `unknown`, with the reason why it is none."""
    model = unwrapped(module)
    kind = type(model)
    shown: Values = {"dropout": sorted(_dropouts(model))}
    config: Any = getattr(model, "config", None)
    # A class that `fully_shard` has made has the one of the model as its base.
    kinds = [
        base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")
    ]
    if (
        not kinds
        or kind.__name__.removeprefix("FSDP") != kinds[0].__name__
        or not hasattr(config, "to_json_string")
    ):
        return shown | {
            "unknown": f"{kind.__name__} is not a model of transformers: --alone COMMAND trains it in one process"
        }
    for name, part in model.named_modules():
        if hasattr(part, "neftune_noise_alpha"):
            return shown | {
                "unknown": f"neftune_noise_alpha adds noise to what {name} computes"
            }
    return shown | {
        "class": kinds[0].__name__,
        "config": json.loads(config.to_json_string(use_diff=False)),
        "attention": str(getattr(config, "_attn_implementation", "")),
        "replaced": _replaced(model),
    }


def _replaced(model: Module) -> str | None:
    """The function that computes the forward or the loss, where that is not the one of transformers."""
    own = vars(model)
    for function in (own.get("forward", type(model).forward), own.get("_loss_function")):
        home = getattr(inspect.unwrap(function), "__module__", "") if callable(function) else ""
        if home and home.partition(".")[0] not in _KEEP_MEANING:
            return f"{home}.{getattr(function, '__name__', 'a function')}"
    return None


def _dropouts(model: Module) -> Iterator[str]:
    """The modules that draw random numbers in a step."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            yield name
        for setting in ("attention_dropout", "layerdrop", "layer_dropout"):
            if isinstance(value := getattr(module, setting, None), float) and value > 0:
                yield f"{name}.{setting}"


class StepCurve:
    """The record of one step's weights and gradients: `values` for its line, `tensors` for its file.

    Args:
        keeps_copy: whether this rank's parts are written; else only their digests.
        most_bytes: how much they may take.
    """

    def __init__(
        self, module: Module, number: int, *, keeps_copy: bool, most_bytes: int
    ) -> None:
        self.values: Values = {"module": number, "clip": {}}
        self.tensors: Tensors = {}
        self.types = set[str]()
        self._module = module
        self._all = named_parameters(module)
        self.values["trained"] = [
            name for name, parameter in self._all.items() if parameter.requires_grad
        ]
        self._keeps_copy = keeps_copy
        size = 2 * sum(parameter.nbytes for parameter in self._all.values())
        if keeps_copy and size > most_bytes:
            self.values["unknown"] = (
                f"weights and gradients of {size / 2**20:,.0f} MiB exceed --keep"
            )
            return
        self._take("weight", self._all)

    def ends(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: its class is noted, and the settings and parameters of its groups."""
        self.take_gradients()
        names = {id(parameter): name for name, parameter in self._all.items()}
        groups = []
        zero = zero_of(self._module)
        for group in optimizer.param_groups if zero is None else groups_of(zero):
            if self.values["clip"] and any(
                p.grad is not None and id(p) not in names for p in group["params"]
            ):
                self.values["clip"]["others"] = True
            options = {**group, "lr": float(group["lr"])} if "lr" in group else group
            settings = {
                name: value
                for name, value in options.items()
                if (name == "betas" or isinstance(value, int | float))
                and name not in _NOT_COMPUTED
            }
            groups.append(
                {
                    "names": [names[id(p)] for p in group["params"] if id(p) in names],
                    "settings": settings,
                }
            )
        kind = type(optimizer)
        self.values["optimizer"] = {
            "class": kind.__name__
            if kind.__module__.startswith("torch.optim.")
            else f"{kind.__module__}.{kind.__name__}",
            "is_new": not any(optimizer.state.values()),
            "groups": groups,
        }
        self.values["types"] = sorted(self.types)

    def take_gradients(self) -> None:
        """The gradients, once in a step: before they are clipped, or before the optimizer takes them."""
        if "gradients" not in self.values:
            self._take("gradient", self.values["trained"])

    def _take(self, kind: str, names: Iterable[str]) -> None:
        if "unknown" in self.values:
            return
        described = self.values[f"{kind}s"] = {}
        try:
            in_a_row = parts_in_a_row(self._module)
            for name in names:
                if (part := held_of(self._all[name], kind, in_a_row)) is None:
                    continue
                values = part.values.to("cpu", copy=True).contiguous()
                content = digest(values.reshape(-1).view(torch.uint8).numpy().tobytes())
                described[name] = {**part.place, "digest": content}
                if self._keeps_copy:
                    self.tensors[f"{kind}.{name}"] = values
        except ValueError as error:
            self.values["unknown"], self.tensors = str(error), {}
