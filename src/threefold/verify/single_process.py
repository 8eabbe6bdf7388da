"""The single process that a mesh is compared with: transformers' own model and attention, written without the mesh.

Each document runs alone, so that none of our masks are involved; a row without documents is one document.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from threefold.config.objective import DpoConfig
from threefold.config.schema import Config
from threefold.data.rows.concat import IGNORED
from threefold.model import lora
from threefold.model.head import first_position
from threefold.training.optimizer import build_optimizer
from threefold.training.preferences import pair_losses
from threefold.training.schedule import learning_rate

Batch = dict[str, Tensor]


@dataclass
class Curve:
    """The results of a few steps.

    Attributes:
        losses, norms: one for each step; norms before clipping.
        gradients: of the first step, before clipping, by parameter.
        outputs: of each layer in the first step, [rows, sequence, hidden], for the first `observed_rows` rows.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)


def run_alone(
    config: Config, architecture: PretrainedConfig, batches: Sequence[Batch], *, num_steps: int, observed_rows: int
) -> Curve:
    """Trains on complete global batches in this process, in float32.

    Args:
        architecture: of the random weights, or of the weights in `config.model.name_or_path`.
        batches: one global batch [rows, seq_len] a step.
        num_steps: length of the run that the schedule is for.
        observed_rows: number of rows of the first batch for which the layers' outputs are kept.
    """
    model = _load(config, architecture)
    # Of pairs of answers: the model as it begins, without adapters.
    reference = copy.deepcopy(model).eval().requires_grad_(False) if config.train.objective == "dpo" else None
    if config.model.lora.r:
        lora.insert_whole(model, config.model.lora, seed=config.train.seed)
    optimizer = build_optimizer(model, config.optimizer)
    curve = Curve()
    for number, batch in enumerate(batches, start=1):
        watched = _Outputs(model, observed_rows) if number == 1 else None
        targets = (_num_pairs(batch) if reference is not None else (batch["labels"] != IGNORED).sum()).clamp(min=1)
        total = 0.0
        for row in range(len(batch["labels"])):
            if watched is not None:
                watched.row = row
            own = {name: values[row] for name, values in batch.items()}
            if reference is None:
                loss = _row_loss(model, own, watched)
            else:
                loss = _row_of_pairs_loss(model, reference, own, watched, config.dpo)
            (loss / targets).backward()
            total += loss.item()
        if watched is not None:
            curve.outputs = watched.finish()
        parameters = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for _, p in parameters]))  # type: ignore[union-attr]
        if number == 1:
            curve.gradients = {name: p.grad.clone() for name, p in parameters}  # type: ignore[union-attr]
        if config.train.grad_clip:
            factor = (config.train.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            for _, parameter in parameters:
                parameter.grad *= factor
        for group in optimizer.param_groups:
            rate = learning_rate(number, num_steps=num_steps, config=config.optimizer)
            group["lr"] = rate * group["lr_share"]
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(total / targets.item())
        curve.norms.append(norm.item())
    return curve


def _load(config: Config, architecture: PretrainedConfig) -> Any:
    settings: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    if config.model.name_or_path is None:
        torch.manual_seed(config.train.seed)
        return AutoModelForCausalLM.from_config(architecture, **settings).train()
    return AutoModelForCausalLM.from_pretrained(
        config.model.name_or_path,
        config=architecture,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
        **settings,
    ).train()


def _row_loss(model: nn.Module, row: Batch, watched: _Outputs | None) -> Tensor:
    loss = torch.zeros(())
    for logits, labels in _documents(model, row, watched):
        loss = loss + F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss


def _row_of_pairs_loss(
    model: nn.Module, reference: nn.Module, row: Batch, watched: _Outputs | None, asked: DpoConfig
) -> Tensor:
    gained, counts = [], []
    with torch.no_grad():
        of_reference = [_log_probability(*each) for each in _documents(reference, row, None)]
    for (logits, labels), base in zip(_documents(model, row, watched), of_reference, strict=True):
        if (learnt := (labels != IGNORED).sum()) > 0:  # padding and rows that fill up a batch learn nothing
            gained.append(_log_probability(logits, labels) - base)
            counts.append(learnt)
    if not gained:
        return sum((parameter.sum() * 0 for parameter in model.parameters()), torch.zeros(()))
    return pair_losses(asked, torch.stack(gained)[None].double(), torch.stack(counts)[None]).sum()


def _log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def _num_pairs(batch: Batch) -> Tensor:
    learnt = batch["document_ids"].where(batch["labels"] != IGNORED, -1)
    return torch.tensor(sum(len(row[row >= 0].unique()) // 2 for row in learnt))


def _documents(model: nn.Module, row: Batch, watched: _Outputs | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels of each document of a row, and of its padding, computed alone."""
    documents = row.get("document_ids", torch.zeros_like(row["input_ids"]))
    for document in documents.unique_consecutive().tolist():
        place = documents == document
        if watched is not None:
            watched.place = place
        positions = row["position_ids"][place][None] + first_position(model)
        logits = model(input_ids=row["input_ids"][place][None], position_ids=positions, use_cache=False).logits[0]
        yield logits, row["labels"][place]


class _Outputs:
    """Collects each layer's outputs for the current row and document."""

    def __init__(self, model: Any, num_rows: int) -> None:
        from threefold.model.load import layers_of

        self.row = 0
        self.place = torch.empty(0)
        self._num_rows = num_rows
        self._kept: list[dict[int, Tensor]] = []
        self._hooks = []
        for layer in layers_of(model):
            kept: dict[int, Tensor] = {}
            self._kept.append(kept)
            self._hooks.append(layer.register_forward_hook(self._keep(kept)))

    def _keep(self, kept: dict[int, Tensor]) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.row < self._num_rows:
                hidden = output[0] if isinstance(output, tuple) else output
                whole = kept.setdefault(self.row, torch.zeros(len(self.place), hidden.shape[-1]))
                whole[self.place] = hidden.detach()[0]

        return hook

    def finish(self) -> list[Tensor]:
        for hook in self._hooks:
            hook.remove()
        return [torch.stack([kept[row] for row in sorted(kept)]) for kept in self._kept]
