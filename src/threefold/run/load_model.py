"""For custom loops: a model on the mesh and an optimizer by its name, checked and built as for `threefold train`."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike, fspath
from typing import Any, Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from threefold.check.admit import admit
from threefold.check.full_size import admit_first
from threefold.config.loading import validate
from threefold.config.optimizer import OptimizerConfig
from threefold.config.schema import Config
from threefold.data.order.permutation import seed_of
from threefold.errors import ConfigError, Problem, check_argument, in_program
from threefold.jsonl import Values
from threefold.mesh.mesh import Mesh
from threefold.model import data_parallel, load, noise
from threefold.model import lora as adapters
from threefold.model.build import build
from threefold.model.context_parallel import limits
from threefold.model.context_parallel.limits import split_problems
from threefold.model.model import Model, check_model
from threefold.model.tensor_parallel.plan import plan_problems
from threefold.model.user_module import on_mesh
from threefold.optim.build import build_optimizer
from threefold.optim.classes import problems
from threefold.plan.choices import with_dtype

Recomputed = Literal["none", "selective", "full", "offload"]


@in_program(load.as_argument)
def load_model(
    name_or_path: str | PathLike[str] | nn.Module | None = None,
    *,
    mesh: Mesh,
    config: Values | PretrainedConfig | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] | torch.dtype = "float32",
    seq_len: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    admission: Literal["auto", "full", "off"] = "auto",
    lora: Values | None = None,
    activation_checkpointing: Recomputed = "none",
    compile: bool | Literal["auto"] = "auto",
) -> Model:
    """A Hugging Face causal language model on the mesh, or a custom module on its data ranks; every rank calls it.

    Seeds this process's random generators: dropout must be the same on tp ranks and differ between data ranks.

    Args:
        name_or_path: Hub id or local folder with weights; or an `nn.Module` (rank 0's weights are used; no tp, no cp).
        config: instead of a name: a mapping with `model_type`, or a transformers config; the weights are random.
        dtype: compute dtype, `float32` or `bfloat16`; the weights are float32. `auto`: as `threefold train`,
            bfloat16 on CUDA.
        seq_len: length of all rows, if known: tp ranks can then share the sequence, and cp picks a suitable method.
        seed: for dropout and for random weights, which do not depend on the mesh.
        admission: probe the architecture on this mesh first, once (`auto`), always (`full`) or never (`off`).
        lora: train adapters instead of the weights: {"r": 8, ...}, the keys of model.lora.
        activation_checkpointing: what backward recomputes: `none`, `selective`, `full` or `offload`, as in the config.
        compile: compile each layer; `auto`: on CUDA.

    Raises:
        ConfigError: the model cannot be read, cannot be split as the mesh requires, or fails a probe.
    """
    check_argument(
        "mesh",
        mesh,
        isinstance(mesh, Mesh),
        expected="the mesh that threefold.init_mesh returned",
        fix="mesh=threefold.init_mesh()",
    )
    if isinstance(config, PretrainedConfig):
        config = config.to_dict()
    for name, value in (("config", config), ("lora", lora)):
        check_argument(
            name,
            value,
            isinstance(value, Mapping | None),
            expected=f"a mapping of the keys of model.{name}",
            fix=f"{name}={'{...}' if name == 'config' else {'r': 8}}",
        )
    if isinstance(name_or_path, nn.Module):
        recomputed = None if activation_checkpointing == "none" else activation_checkpointing
        options = {"config": config, "seq_len": seq_len, "revision": revision, "lora": lora}
        options |= {
            "compile": compile is True or None,
            "activation_checkpointing": recomputed,
        }
        for name, value in options.items():
            if value is not None:
                raise ConfigError(
                    f"load_model was given a module and {name} = {value!r}",
                    expected="a complete module, on which this has no effect",
                    fix=f"leave {name} out"
                    + (", and compile the module first" if name == "compile" else ""),
                )
        asked = with_dtype(validate({"model": {"dtype": dtype}}), data_parallel.device_of(mesh))
        own = on_mesh(name_or_path, mesh, dtype=asked.model.dtype)
        torch.manual_seed(seed_of("a run", seed, *noise.places(mesh, None)))
        return own
    check_argument(
        "name_or_path",
        name_or_path,
        isinstance(name_or_path, str | PathLike | None),
        expected="a Hub id, a folder, or an nn.Module; for an architecture without weights: config",
        fix="threefold.load_model(config=config, mesh=mesh)",
    )
    model = {
        "name_or_path": name_or_path and fspath(name_or_path),
        "config": dict(config) if config is not None else None,
        "dtype": str(dtype).removeprefix("torch."),
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "admission": admission,
    }
    asked = validate(
        {
            "model": model | ({"lora": dict(lora)} if lora is not None else {}),
            "train": {
                "seed": seed,
                "activation_checkpointing": activation_checkpointing,
                "compile": compile,
            },
            "data": {"seq_len": seq_len} if seq_len is not None else {},
            "mesh": {"sequence_parallel": "auto" if seq_len is not None else False},
        }
    )
    asked = with_dtype(asked, data_parallel.device_of(mesh))
    architecture = load.read_config(asked.model)
    outline = load.outline(architecture, asked.model)
    ConfigError.raise_for(_problems(asked, architecture, outline, mesh))
    refused = _admitted(asked, architecture, mesh, limits.document_problems(outline))
    built = build(asked, architecture, mesh)
    assert built.context is not None
    built.context.refused_documents = refused
    if asked.model.admission != "off":
        built = dataclasses.replace(built, before_first_step=admit_first)
    torch.manual_seed(seed_of("a run", seed, *noise.places(mesh, built.tensor.sequence_group)))
    return built


def _problems(
    asked: Config, architecture: PretrainedConfig, outline: Any, mesh: Mesh
) -> list[Problem]:
    name = asked.model.name_or_path
    problems = plan_problems(architecture, mesh.topology.tp, plan=outline.tp_plan)
    problems += split_problems(asked.mesh.cp_method, mesh.topology, outline)
    problems += limits.direction_problems(outline, pretrained=name is not None)
    problems += data_parallel.problems(asked, device=mesh.device.type)
    if asked.model.lora.r and not problems:
        build = partial(load.outline, architecture, asked.model)
        named = name or str(architecture.model_type)
        problems += adapters.problems(asked.model.lora, build, name=named)
    return problems


def _admitted(
    asked: Config, architecture: PretrainedConfig, mesh: Mesh, problems: Sequence[Problem]
) -> ConfigError | None:
    """Admits the model for rows with documents and padding, or else without documents, and then with the reason.

    Args:
        problems: why documents cannot be kept apart.
    """
    asked = asked.changed(data={"packing": "none", "document_mask": True})
    try:
        ConfigError.raise_for(problems)
        admit(asked, architecture, mesh)
    except ConfigError as error:
        admit(asked.changed(data={"document_mask": False}), architecture, mesh)
        return error
    return None


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
