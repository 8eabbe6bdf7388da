"""For loops of one's own: a model on the mesh, and a step from a batch to the global batch's loss and gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from transformers import PretrainedConfig

from threefold.config.loading import validate
from threefold.config.schema import Config, OptimizerConfig
from threefold.errors import ConfigError, Problem
from threefold.mesh.mesh import Mesh
from threefold.model import load
from threefold.model.build import ParallelModel, build
from threefold.model.context_parallel import limits
from threefold.model.context_parallel.split import split_problems
from threefold.model.tensor_parallel.plan import plan_problems
from threefold.training.admission.admit import admit
from threefold.training.optimizer import adamw
from threefold.training.step import Batch, TrainStep, mean_loss, micro_batches


def load_model(
    name_or_path: str | None = None,
    *,
    mesh: Mesh,
    config: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    seq_len: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    admission: Literal["auto", "full", "off"] = "auto",
) -> ParallelModel:
    """A Hugging Face causal language model on the mesh; every rank calls it.

    Args:
        name_or_path: Hub id or local folder with weights.
        config: instead of a name: the architecture as a mapping with `model_type`; its weights are random.
        dtype: type of the computation, `float32` or `bfloat16`; the weights are float32.
        seq_len: length of all rows, if it is known: tp ranks can then share the sequence between the layers, and cp
            ranks use the method that suits it.
        seed: of random weights, which depend on it and not on the mesh.
        admission: probe the architecture on this mesh first, once (`auto`), always (`full`) or never (`off`).

    Raises:
        ConfigError: the model cannot be read, cannot be split as the mesh asks, or fails a probe.
    """
    model = {"name_or_path": name_or_path, "config": dict(config) if config is not None else None, "dtype": dtype}
    asked = validate(
        {
            "model": {**model, "revision": revision, "trust_remote_code": trust_remote_code, "admission": admission},
            "train": {"seed": seed},
            "data": {"seq_len": seq_len} if seq_len is not None else {},
            "mesh": {"sequence_parallel": "auto" if seq_len is not None else False},
        }
    )
    architecture = load.read_config(asked.model)
    outline = load.outline(architecture, trust_remote_code=trust_remote_code)
    problems = plan_problems(architecture, mesh.topology.tp, plan=outline.tp_plan)
    problems += split_problems(asked.mesh.cp_method, architecture, mesh.topology, outline)
    problems += limits.direction_problems(outline, pretrained=name_or_path is not None)
    if problems:
        raise ConfigError.of(problems)
    refused = _admitted(asked, architecture, mesh, limits.document_problems(outline))
    built = build(asked, architecture, mesh)
    built.context.refused_documents = refused
    return built


def _admitted(
    asked: Config, architecture: PretrainedConfig, mesh: Mesh, problems: Sequence[Problem]
) -> ConfigError | None:
    """Admits the model with rows that hold documents and padding, or else without documents: then why.

    Args:
        problems: why its documents cannot be kept apart.
    """
    data = asked.data.model_copy(update={"packing": "none", "document_mask": True})
    try:
        if problems:
            raise ConfigError.of(problems)
        admit(asked.model_copy(update={"data": data}), architecture, mesh)
    except ConfigError as error:
        data = data.model_copy(update={"document_mask": False})
        admit(asked.model_copy(update={"data": data}), architecture, mesh)
        return error
    return None


class StepNumbers(NamedTuple):
    """Of the global batch, the same on every rank: mean loss of its target tokens, gradient norm before clipping."""

    loss: float
    grad_norm: float


def make_step(
    model: ParallelModel,
    mesh: Mesh,
    *,
    lr: float | Literal["auto"] = "auto",
    weight_decay: float = 0.1,
    grad_clip: float = 1.0,
    micro_batch: int | None = None,
) -> Callable[[Batch], StepNumbers]:
    """A function that does one AdamW step with a batch of this dp rank; every rank of the mesh calls it.

    The batch is a dict of `input_ids` and `labels`, each [rows, sequence] on any device, labels shifted already and
    -100 where nothing is to be predicted; `position_ids` count from 0 in each row unless they are given, and routers'
    loss leaves out what `padding`, bool, marks. The cp and tp ranks of one dp rank give the same rows. The loss is the
    mean over the target tokens of all dp ranks together.

    Args:
        lr: learning rate; assign `step.lr` to follow a schedule. auto: 2e-3 for random weights, 2e-5 for pretrained
            ones.
        micro_batch: rows in one forward; default: all.
    """
    rate = model.automatic_rate if lr == "auto" else lr
    return _Step(model, mesh, OptimizerConfig(lr=rate, weight_decay=weight_decay), grad_clip, micro_batch)


class _Step:
    def __init__(
        self, model: ParallelModel, mesh: Mesh, config: OptimizerConfig, grad_clip: float, micro_batch: int | None
    ) -> None:
        self.lr: float = config.lr  # type: ignore[assignment]
        self._mesh, self._micro_batch = mesh, micro_batch
        self._step = TrainStep(model, adamw(model.module, config), mesh, grad_clip=grad_clip)

    def __call__(self, batch: Batch) -> StepNumbers:
        rows, length = batch["input_ids"].shape
        positions = torch.arange(length).expand(rows, length)
        pieces = micro_batches({"position_ids": positions, **batch}, self._micro_batch or rows)
        result = self._step(pieces, lr=self.lr)
        return StepNumbers(mean_loss(result, self._mesh), result.grad_norm.item())
