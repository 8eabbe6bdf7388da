"""What a checkpoint of a loop of one's own holds besides tensors: plain values, the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from threefold.checkpoint.layout import Checkpoint
from threefold.checkpoint.tensors import bytes_of
from threefold.errors import CheckpointError, ConfigError
from threefold.model.model import Model
from threefold.training.step import TrainStep


def optimizer_of(optimizer: torch.optim.Optimizer | TrainStep | None) -> torch.optim.Optimizer | None:
    return optimizer.optimizer if isinstance(optimizer, TrainStep) else optimizer


def rates_of(optimizer: torch.optim.Optimizer | TrainStep | None) -> dict[str, Any] | None:
    """The step's rate, and the settings of each group, which a scheduler may have changed."""
    if (inner := optimizer_of(optimizer)) is None:
        return None
    groups = [{name: value for name, value in group.items() if name != "params"} for group in inner.param_groups]
    plain = [{name: value for name, value in group.items() if _is_plain(value)} for group in groups]
    return {"lr": optimizer.lr if isinstance(optimizer, TrainStep) else None, "groups": plain}


def set_rates(optimizer: torch.optim.Optimizer | TrainStep | None, saved: Any, checkpoint: Checkpoint) -> None:
    inner = optimizer_of(optimizer)
    if inner is None or saved is None:
        return
    if isinstance(optimizer, TrainStep) and optimizer.lr is not None:
        # Groups of ours are by the mesh of their parameters, and have one rate.
        optimizer.lr = saved["lr"] if saved["lr"] is not None else optimizer.lr
        return
    if len(saved["groups"]) != len(inner.param_groups):
        raise CheckpointError(
            f"{checkpoint.path} was saved with {len(saved['groups'])} groups of parameters, the optimizer has "
            f"{len(inner.param_groups)}",
            expected="the groups that were saved, whose rates are restored",
            fix="make the optimizer as the one that was saved",
        )
    for group, values in zip(inner.param_groups, saved["groups"], strict=True):
        group.update({name: tuple(each) if isinstance(each, list) else each for name, each in values.items()})


def state_of_loader(loader: Any) -> dict[str, Any]:
    if loader is None:
        return {}
    if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
        raise ConfigError(
            f"loader is a {type(loader).__name__}, which has no state",
            expected="a loader or sampler with state_dict() and load_state_dict()",
            fix="loader = threefold.distribute(loader)",
        )
    return dict(loader.state_dict())


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def digests_of(described: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Digests of what is saved as JSON, to compare; ConfigError for what JSON has not."""
    for name in ("loader", "extra"):
        for key, value in described[name].items():
            if not isinstance(key, str) or not _is_plain(value):
                of = "the loader's state" if name == "loader" else "extra"
                raise ConfigError(
                    f"{of} has a {type(value).__name__} under {key!r}",
                    expected="numbers, texts, lists and dicts of them by names: nothing is pickled",
                    fix="save tensors with the model, as buffers; of others their plain values",
                )
    texts = {name: json.dumps(described[name], sort_keys=True) for name in described}
    return {"step": step, **{name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}}


def refuse_other_values(parts: list[dict[str, Any]]) -> str:
    for rank, part in enumerate(parts):
        if wrong := [name for name in part if part[name] != parts[0][name]]:
            raise ConfigError(
                f"ranks 0 and {rank} save different values as {wrong[0]}",
                expected="the same on every rank: a checkpoint has one, for any mesh",
                fix="threefold.distribute(loader) has the same state on every rank"
                if wrong[0] == "loader"
                else f"take {wrong[0]} from what is the same on all ranks, as the loss of a step is",
            )
    return ""


def refuse_other_buffers(model: Model) -> None:
    """RunError if buffers of one's own module, which are saved once, have become different on the ranks."""
    if model.context is not None or not (buffers := dict(model.module.named_buffers())):
        return
    seen = {name: hashlib.sha256(bytes_of(each.cpu())).hexdigest() for name, each in buffers.items()}

    def judge(parts: list[dict[str, str]]) -> str:
        if wrong := [name for name in seen if len({part[name] for part in parts}) > 1]:
            raise ConfigError(
                f"the buffer {wrong[0]} differs between the ranks",
                expected="the same on every rank: forward changed it by the rows of one",
                fix=f"dist.all_reduce(module.{wrong[0]}, dist.ReduceOp.AVG) in the loop, before it is saved",
            )
        return ""

    model.mesh.decide("buffers", seen, judge)
