"""The probes: what a model on the mesh must and must not do, each with its figure and its bound.

A probe changes something that must not matter, and the loss must not move; or compares the step of the mesh with the
model's own forward in one process. All are done with the modules, masks, splits and sums of a real step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from threefold.config.optimizer_keys import OptimizerConfig
from threefold.config.schema import Config
from threefold.data.rows.concat import IGNORED
from threefold.mesh.mesh import Mesh
from threefold.model.build import build
from threefold.model.collectives import local_part
from threefold.model.model import Model
from threefold.model.weight_check import Weights
from threefold.training.admission import probe_rows
from threefold.training.admission.own_forward import Alone, model_alone, step_alone
from threefold.training.admission.probe_rows import Batch, Mode
from threefold.training.forward import forward_sums, token_loss_of
from threefold.training.loss import TokenLoss
from threefold.training.numbers import mean_aux_loss, mean_loss
from threefold.training.optimizer import build_optimizer
from threefold.training.step import TrainStep

# As the documentation promises, in float32: nats, and relative to the single process.
LOSS_BOUND = 1e-4
NORM_BOUND = 1e-3
GRADIENT_BOUND = 1e-3
# Of bfloat16, whose numbers have 8 bits, against float32, nats; the largest of all architectures is 0.04.
NARROW_BOUND = 0.2
# Gradients that are zero but for rounding (a key's bias) have no relative difference: they are compared with this share
# of the largest gradient.
_SMALLEST_GRADIENT = 1e-3
# A change that must be seen moves the loss by more than this, or the probe could not see anything.
_SEEN = 10 * LOSS_BOUND


class OwnForwardError(Exception):
    """transformers' own forward or backward of the architecture fails, in one process."""


@dataclass(frozen=True)
class Finding:
    """What one probe measured.

    Attributes:
        probe: its name.
        figure, bound: it holds if the figure is at most the bound (a NaN never is).
        detail: where the figure is largest, if it is of one parameter; what the probe saw.
    """

    probe: str
    figure: float
    bound: float
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.figure <= self.bound


@dataclass(frozen=True)
class Subject:
    """What is probed: an architecture at reduced size, and how the run's mesh computes it.

    Attributes:
        config: of the run, with the probe's row length and float32.
        architecture: reduced.
        mode: what the run's rows have.
        seed: of the weights and the rows.
        narrow: the run computes in bfloat16, which is tried too.
    """

    config: Config
    architecture: PretrainedConfig
    mode: Mode
    seed: int = 0
    narrow: bool = False


def findings(subject: Subject, mesh: Mesh) -> list[Finding]:
    """The results of all probes, complete and the same on every rank; every rank calls it."""
    seq_len = subject.config.data.seq_len
    vocabulary = subject.architecture.get_text_config().vocab_size
    rows = probe_rows.probe_rows(subject.mode, seq_len=seq_len, vocabulary=vocabulary, seed=subject.seed)
    with torch.random.fork_rng(devices=[mesh.device] if mesh.device.type == "cuda" else []):
        alone = model_alone(
            subject.architecture, seed=subject.seed, trust_remote_code=subject.config.model.trust_remote_code
        )
        weights = {name: partial(_value, tensor) for name, tensor in alone.state_dict().items()}
        model = build(subject.config, subject.architecture, mesh, weights=weights)
        expected = _expected(alone, subject, rows, mesh)
        found = list(_unmoved(model, mesh, subject, vocabulary))
        found += _compared(model, mesh, subject, rows, expected)
        if subject.narrow:
            found += _narrowed(mesh, subject, rows, weights, expected)
    told = mesh.share("probes", lambda: [vars(each) for each in found])
    return [Finding(**values) for values in told]


def _value(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _expected(alone: Any, subject: Subject, rows: Batch, mesh: Mesh) -> Alone | None:
    """The step of one process, on rank 0; every rank raises if it cannot be done."""
    computed: list[Alone] = []

    def compute() -> str:
        times = probe_rows.times_counted(mesh.dp_size)
        try:
            model = alone if mesh.device.type == "cpu" else alone.to(mesh.device)
            computed.append(step_alone(model, rows, times=times, copies=mesh.dp_size))
        except Exception as error:  # whatever a model's code may raise
            return f"{type(error).__name__}: {error}"
        return ""

    if failure := mesh.share("own forward", compute):
        raise OwnForwardError(failure)
    return computed[0] if computed else None


def _unmoved(model: Model, mesh: Mesh, subject: Subject, vocabulary: int) -> Iterator[Finding]:
    """Causality, documents, composition: the loss of some targets while other tokens change."""
    loss = partial(_mean_loss, model, mesh, token_loss_of(model, mesh))
    quarter = subject.config.data.seq_len // 4
    whole = Mode(documents=False, padding=False)
    plain = probe_rows.probe_rows(whole, seq_len=4 * quarter, vocabulary=vocabulary, seed=subject.seed + 1)
    if subject.mode.documents:
        plain["document_ids"] = torch.zeros_like(plain["input_ids"])
    # Two rows, which differ between dp ranks.
    batch = {name: values[:2] for name, values in probe_rows.share_of(plain, dp_rank=mesh.dp_rank, dp_size=1).items()}
    batch = _targets_in(batch, quarter, 2 * quarter)
    own = loss(batch)
    yield Finding("causality", abs(loss(_changed(batch, 2 * quarter, 4 * quarter, vocabulary)) - own), LOSS_BOUND)
    moved = abs(loss(_changed(batch, 0, quarter, vocabulary)) - own)
    # As a figure that must be small: how far the change that must be seen stays below what can be seen.
    yield Finding("context", max(0.0, _SEEN - moved) if moved == moved else moved, 0.0)
    rows = [loss({name: values[row : row + 1] for name, values in batch.items()}) for row in (0, 1)]
    yield Finding("composition", abs(sum(rows) / 2 - own), LOSS_BOUND)
    if subject.mode.documents:
        second = (torch.arange(4 * quarter) >= quarter).long().expand_as(batch["input_ids"])
        positions = torch.cat([torch.arange(quarter), torch.arange(3 * quarter)]).expand_as(batch["input_ids"])
        apart = {**batch, "document_ids": second, "position_ids": positions}
        difference = loss(_changed(apart, 0, quarter, vocabulary)) - loss(apart)
        yield Finding("documents", abs(difference), LOSS_BOUND)


def _targets_in(batch: Batch, first: int, end: int) -> Batch:
    place = torch.arange(batch["labels"].shape[1])
    return {**batch, "labels": batch["labels"].where((place >= first) & (place < end), IGNORED)}


def _changed(batch: Batch, first: int, end: int, vocabulary: int) -> Batch:
    ids = batch["input_ids"].clone()
    lowest = min(3, vocabulary - 1)
    ids[:, first:end] = lowest + (ids[:, first:end] - lowest + 1) % (vocabulary - lowest)
    return {**batch, "input_ids": ids}


@torch.no_grad()
def _mean_loss(model: Model, mesh: Mesh, token_loss: TokenLoss, batch: Batch) -> float:
    """Mean cross entropy over the targets of all ranks, which have equally many."""
    with forward_sums(model, batch, mesh, token_loss) as sums:
        total = sums.cross_entropy.double()
    if (group := mesh.group("loss")) is not None:
        dist.all_reduce(total, group=group)
    targets = int((batch["labels"] != IGNORED).sum()) * mesh.dp_size
    return (total / targets).item()


def _compared(model: Model, mesh: Mesh, subject: Subject, rows: Batch, expected: Alone | None) -> list[Finding]:
    """A step of two micro-batches on the mesh, compared on rank 0 with the one process; every rank calls it."""
    own = probe_rows.share_of(rows, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
    gradients: dict[str, Tensor] = {}
    replicas: list[Finding] = []

    def observe() -> None:
        gradients.update(_complete_gradients(model, keep=expected is not None))
        if (group := mesh.group("tp")) is not None:
            replicas.append(_replicas(model, group))

    step = TrainStep(model, build_optimizer(model.module, OptimizerConfig()), observe=observe)
    result = step.run(_halves(own), lr=0.0)
    loss, aux_loss, norm = mean_loss(result, mesh), mean_aux_loss(result, mesh), result.grad_norm.item()
    if expected is None:
        return replicas
    found = [
        Finding("positions", 0.0, 0.0, expected.positions),  # said where another probe fails
        Finding("head", expected.head_departs, NORM_BOUND),
        Finding("loss", abs(loss - expected.loss), LOSS_BOUND),
        Finding("gradient norm", abs(norm - expected.grad_norm) / expected.grad_norm, NORM_BOUND),
        _furthest(gradients, expected.gradients),
    ]
    if aux_loss is not None and expected.aux_loss is not None:
        found.append(Finding("routers' loss", abs(aux_loss - expected.aux_loss), LOSS_BOUND))
    return found + replicas


def _halves(rows: Batch) -> list[Batch]:
    return [{name: values[part] for name, values in rows.items()} for part in (slice(0, 2), slice(2, 4))]


def _narrowed(mesh: Mesh, subject: Subject, rows: Batch, weights: Weights, expected: Alone | None) -> Iterator[Finding]:
    """A step in bfloat16, as the run makes it: that it can be computed, and is near float32; every rank calls it."""
    config = subject.config.model_copy(update={"model": subject.config.model.model_copy(update={"dtype": "bfloat16"})})
    model = build(config, subject.architecture, mesh, weights=weights)
    own = probe_rows.share_of(rows, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
    result = TrainStep(model, build_optimizer(model.module, OptimizerConfig())).run(_halves(own), lr=0.0)
    loss, norm = mean_loss(result, mesh), result.grad_norm.item()
    if expected is not None:
        # The gradient's norm of some architectures is far from float32's, but a number.
        yield Finding("bfloat16", abs(loss - expected.loss) + 0 * norm, NARROW_BOUND)


def _complete_gradients(model: Model, *, keep: bool) -> dict[str, Tensor]:
    found, tied = {}, dict(model.module.all_tied_weights_keys)
    for name, parameter in model.module.named_parameters():
        gradient = parameter.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if keep and whole is not None:
            found[tied.get(name, name)] = whole.detach().cpu().clone()
    return found


def _furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Finding:
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    worst = Finding("gradients", 0.0, GRADIENT_BOUND)
    for name in sorted(expected.keys() | found.keys()):
        wanted, got = expected.get(name), found.get(name)
        either = wanted if wanted is not None else got
        assert either is not None
        difference = ((got if got is not None else 0.0) - (wanted if wanted is not None else 0.0) + 0 * either).abs()
        size = max(either.abs().max().item(), _SMALLEST_GRADIENT * largest)
        figure = difference.max().item() / size
        if not figure <= worst.figure:
            worst = replace(worst, figure=figure, detail=name)
        if figure != figure:
            break
    return worst


def _replicas(model: Model, group: dist.ProcessGroup) -> Finding:
    """How far the gradients of what every tp rank holds differ between them, relative to the largest of each."""
    split = model.tensor.placements
    whole = [
        (name, local_part(parameter.grad))
        for name, parameter in model.module.named_parameters()
        if parameter.grad is not None and (name not in split or split[name].is_replicate())
    ]
    if not whole:
        return Finding("replicas", 0.0, GRADIENT_BOUND)
    flat = torch.cat([gradient.flatten() for _, gradient in whole])
    highest, lowest = flat.clone(), flat.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    sizes = [gradient.numel() for _, gradient in whole]
    scale = max(highest.abs().max().item(), lowest.abs().max().item(), 1e-30)
    worst = Finding("replicas", 0.0, GRADIENT_BOUND)
    for (name, _), high, low in zip(whole, highest.split(sizes), lowest.split(sizes), strict=True):
        if not len(high):
            continue
        size = max(high.abs().max().item(), low.abs().max().item(), _SMALLEST_GRADIENT * scale)
        figure = (high - low).max().item() / size
        if not figure <= worst.figure:
            worst = replace(worst, figure=figure, detail=name)
    return worst


def failed(found: Sequence[Finding]) -> list[Finding]:
    """The probes that do not hold."""
    return [each for each in found if not each.holds]
