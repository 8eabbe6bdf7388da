"""The probes: properties that a model on the mesh must have, each with its figure and its bound.

A probe changes something that must not matter, and the loss must not move; or compares the step of the mesh with the
model's own forward in one process. All are done with the modules, masks, splits and sums of a real step.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from threefold.check import probe_rows
from threefold.check.compare import (
    BFLOAT16_LOSS,
    GRADIENT_NORM,
    KERNELS,
    LOSS,
    PROBE_GRADIENT,
    PROBE_REPLICA,
    ROUTERS_LOSS,
    Comparison,
    Difference,
    Tensors,
    compare_number,
    compare_tensors,
    complete_gradients,
)
from threefold.check.probe_rows import Batch, Mode
from threefold.check.real_size import RealSize, compare_real_sizes
from threefold.check.reference import (
    forward_backward,
    gradients_of,
    head_difference,
    norm_of,
    perturbed_model,
    use_of_positions,
)
from threefold.config.optimizer import OptimizerConfig
from threefold.config.schema import Config
from threefold.data.rows.concat import IGNORED
from threefold.mesh.mesh import Mesh
from threefold.model import lora, noise
from threefold.model.build import build
from threefold.model.collectives import local_part
from threefold.model.data_parallel import reshard
from threefold.model.model import Model
from threefold.model.weight_check import Weights, is_adapter
from threefold.optim.build import build_optimizer
from threefold.training.forward import forward_sums, token_loss_of
from threefold.training.loss import TokenLoss
from threefold.training.numbers import StepResult, mean_aux_loss, mean_loss
from threefold.training.step import TrainStep

# A change that must be seen moves the loss by more than this, or the probe could not see anything.
_SEEN = 10 * LOSS.limit

# The text of a failed probe, and the expectation; a refusal names the first of these that fails.
PROMISES = {
    "causality": (
        "later tokens move the loss of earlier ones by {:.1e} nats",
        "a causal model",
    ),
    "context": (
        "the loss of a token does not see the tokens before it",
        "a model that reads its context",
    ),
    "documents": (
        "a document moves the loss of the next one in its row by {:.1e} nats",
        "documents that are kept apart, as data.document_mask promises",
    ),
    "composition": (
        "the loss of a row depends on the other rows of its micro-batch, by {:.1e} nats",
        "rows that do not see one another: train.micro_batch and the mesh must not change the curve",
    ),
    "head": (
        "the logits of its head differ from the model's own by {:.1e} of the largest",
        "the model's own logits",
    ),
    "replicas": (
        "tp ranks have gradients of the same parameter that differ by {:.1e}",
        "the same gradient on every rank that holds a whole parameter: its copies would drift apart",
    ),
    "bfloat16": (
        "in bfloat16 its loss is {:.1e} nats from that in float32",
        "a step in bfloat16 whose loss is within {:.0e} nats of float32's, and whose gradient is finite",
    ),
    "routers' loss": (
        "the loss of its routers differs from transformers' by {:.1e}",
        "a difference of {:.0e} over the tokens that are not padding",
    ),
    "loss": (
        "its loss differs from the model's own forward in one process by {:.1e} nats",
        "a difference of {:.0e}",
    ),
    "gradients": (
        "its gradients differ from the model's own in one process by {:.1e}",
        "a relative difference of {:.0e} in each parameter",
    ),
    "real size": (
        "the loss of its tokens differs from the model's own forward in one process by {:.1e} nats, at its real size",
        "a difference of {:.0e} for most tokens of each part of a row",
    ),
    "gradient norm": (
        "the norm of its gradient differs from the model's own in one process by {:.1e}",
        "a relative difference of {:.0e}",
    ),
    "kernels": (
        "its gradients in bfloat16 differ from float32's by {:.1e} more than rounding explains",
        "a relative difference of {:.0e} in each parameter, beyond three times that of the model's own in bfloat16",
    ),
}


class OwnForwardError(Exception):
    """transformers' own forward or backward of the architecture fails, in one process."""


@dataclass(frozen=True)
class Expected:
    """The step of one process, with which the mesh's is compared.

    Attributes:
        loss: mean cross entropy of the target tokens.
        aux_loss: of the routers, or None if the config asks for none.
        grad_norm: of the whole objective.
        gradients: by parameter.
        head: the logits of our head compared with the model's own.
        positions: what the model does with `position_ids`.
    """

    loss: float
    aux_loss: float | None
    grad_norm: float
    gradients: dict[str, Tensor]
    head: Difference
    positions: str


@dataclass(frozen=True)
class Subject:
    """The subject of the probes: an architecture at reduced size, and how the run's mesh computes it.

    Attributes:
        config: the run's, with the probe's row length, float32 and no noise.
        architecture: reduced.
        mode: the features of the run's rows.
        seed: of the weights and the rows.
        narrow: how the run computes in bfloat16, probed too; None: it does not.
        longer: length of longer rows on which the step is compared too; 0: none.
        real: at which sizes the forward can be compared too.
    """

    config: Config
    architecture: PretrainedConfig
    mode: Mode
    seed: int = 0
    narrow: Config | None = None
    longer: int = 0
    real: tuple[RealSize, ...] = ()


def probe(subject: Subject, mesh: Mesh) -> list[Difference]:
    """The results of all probes, complete and the same on every rank; every rank calls it."""
    vocabulary = subject.architecture.get_text_config().vocab_size
    rows_of = partial(
        probe_rows.probe_rows, subject.mode, vocabulary=vocabulary, seed=subject.seed
    )
    rows = rows_of(seq_len=subject.config.data.seq_len)
    with noise.preserved(mesh.device):
        alone = perturbed_model(subject.architecture, subject.config.model, seed=subject.seed)
        weights = {
            name: partial(Tensor.detach, tensor) for name, tensor in alone.state_dict().items()
        }
        if subject.config.model.lora.r:
            weights.update(_adapted(alone, subject))
        model = build(subject.config, subject.architecture, mesh, weights=weights)
        expected = _expected(alone, rows, mesh)
        results = list(_unmoved(model, subject, vocabulary))
        results += _compared(model, mesh, rows, expected)
        if subject.longer:
            results += _compared_longer(model, mesh, rows_of(seq_len=subject.longer), alone)
        if subject.narrow:
            results += _narrowed(mesh, subject, rows, weights, expected, alone)
        results += compare_real_sizes(
            subject.config, subject.real, subject.mode, mesh, seed=subject.seed
        )
    shared = mesh.share("probes", lambda: [vars(result) for result in results])
    return [Difference(**values) for values in shared]


def _adapted(alone: Any, subject: Subject) -> dict[str, partial[Tensor]]:
    """The adapters that are added to the model, of which B is not zero: else A would have no gradient."""
    lora.insert_whole(alone, subject.config.model.lora, seed=subject.seed)
    own = {name: parameter for name, parameter in alone.named_parameters() if is_adapter(name)}
    with torch.no_grad():
        for name, parameter in own.items():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return {name: partial(Tensor.detach, parameter) for name, parameter in own.items()}


def _expected(alone: Any, rows: Batch, mesh: Mesh) -> Expected | None:
    """The step of one process, on rank 0; every rank raises if it cannot be done."""
    computed: list[Expected] = []

    def compute() -> str:
        times = probe_rows.times_counted(mesh.dp_size)
        try:
            model = alone if mesh.device.type == "cpu" else alone.to(mesh.device)
            sums = forward_backward(model, rows, times=times, copies=mesh.dp_size)
            ids = rows["input_ids"][:1].to(mesh.device)
            computed.append(
                Expected(
                    loss=sums.loss,
                    aux_loss=sums.aux_loss,
                    grad_norm=norm_of(model),
                    gradients=gradients_of(model),
                    head=head_difference(model, ids),
                    positions=use_of_positions(model, ids),
                )
            )
        except Exception as error:  # whatever a model's code may raise
            return f"{type(error).__name__}: {error}"
        return ""

    if failure := mesh.share("own forward", compute):
        raise OwnForwardError(failure)
    return computed[0] if computed else None


def _unmoved(model: Model, subject: Subject, vocabulary: int) -> Iterator[Difference]:
    """Causality, documents, composition: the loss of some targets while other tokens change."""
    loss = partial(_mean_loss, model, token_loss_of(model))
    quarter = subject.config.data.seq_len // 4
    whole = Mode(documents=False, padding=False)
    plain = probe_rows.probe_rows(
        whole, seq_len=4 * quarter, vocabulary=vocabulary, seed=subject.seed + 1
    )
    if subject.mode.documents:
        plain["document_ids"] = torch.zeros_like(plain["input_ids"])
    # Two rows, which differ between dp ranks.
    batch = {
        name: values[:2]
        for name, values in probe_rows.share_of(
            plain, dp_rank=model.mesh.dp_rank, dp_size=1
        ).items()
    }
    place = torch.arange(4 * quarter)
    counted = (place >= quarter) & (place < 2 * quarter)
    batch["labels"] = batch["labels"].where(counted, IGNORED)
    own = loss(batch)
    yield _unchanged(
        "causality", loss(_changed(batch, 2 * quarter, 4 * quarter, vocabulary)), own
    )
    moved = abs(loss(_changed(batch, 0, quarter, vocabulary)) - own)
    # As a figure that must be small: how far the change that must be seen stays below what can be seen.
    yield Difference("context", 0.0 if moved >= _SEEN else _SEEN - moved, 0.0)
    rows = [
        loss({name: values[row : row + 1] for name, values in batch.items()}) for row in (0, 1)
    ]
    yield _unchanged("composition", sum(rows) / 2, own)
    if subject.mode.documents:
        second = (place >= quarter).long().expand_as(batch["input_ids"])
        positions = torch.cat([torch.arange(quarter), torch.arange(3 * quarter)]).expand_as(
            batch["input_ids"]
        )
        apart = {**batch, "document_ids": second, "position_ids": positions}
        yield _unchanged(
            "documents", loss(_changed(apart, 0, quarter, vocabulary)), loss(apart)
        )


def _unchanged(probe: str, loss: float, expected: float) -> Difference:
    return compare_number(replace(LOSS, quantity=probe), loss, expected)


def _changed(batch: Batch, first: int, end: int, vocabulary: int) -> Batch:
    ids = batch["input_ids"].clone()
    lowest = min(3, vocabulary - 1)
    ids[:, first:end] = lowest + (ids[:, first:end] - lowest + 1) % (vocabulary - lowest)
    return {**batch, "input_ids": ids}


@torch.no_grad()
def _mean_loss(model: Model, token_loss: TokenLoss, batch: Batch) -> float:
    """Mean cross entropy over the targets of all ranks, which have equally many."""
    with forward_sums(model, batch, token_loss) as sums:
        total = sums.cross_entropy.double()
    reshard(model.forward)
    model.mesh.all_reduce("loss", total)
    targets = int((batch["labels"] != IGNORED).sum()) * model.mesh.dp_size
    return (total / targets).item()


def _compared(
    model: Model, mesh: Mesh, rows: Batch, expected: Expected | None
) -> list[Difference]:
    """A step of two micro-batches on the mesh, compared on rank 0 with the one process; every rank calls it."""
    gradients: dict[str, Tensor] = {}
    replicas: list[Difference] = []

    def observe() -> None:
        _keep_gradients(model, gradients if expected is not None else None)
        if (group := mesh.group("tp")) is not None:
            replicas.append(_replicas(model, group))

    result = _step(model, rows, observe)
    loss = mean_loss(result, mesh)
    aux_loss = mean_aux_loss(result, mesh)
    norm = result.grad_norm.item()
    if expected is None:
        return replicas
    results = [
        # Named where another probe fails.
        Difference("positions", 0.0, 0.0, detail=expected.positions),
        expected.head,
        compare_number(LOSS, loss, expected.loss),
        compare_number(GRADIENT_NORM, norm, expected.grad_norm),
        Comparison(compare_tensors(PROBE_GRADIENT, gradients, expected.gradients)).worst(),
    ]
    if aux_loss is not None or expected.aux_loss is not None:
        numbers = [
            math.nan if value is None else value for value in (aux_loss, expected.aux_loss)
        ]
        results.append(compare_number(ROUTERS_LOSS, *numbers))
    return results + replicas


def _compared_longer(model: Model, mesh: Mesh, rows: Batch, alone: Any) -> list[Difference]:
    """As `_compared`; nothing if transformers' own forward cannot be computed on rows of this length too."""
    alone.zero_grad()
    try:
        expected = _expected(alone, rows, mesh)
    except OwnForwardError:
        return []
    where = f"rows of {rows['labels'].shape[1]} tokens"
    results = _compared(model, mesh, rows, expected)
    return [
        replace(each, place=f"{each.place}, {where}".removeprefix(", ")) for each in results
    ]


def _step(model: Model, rows: Batch, observe: Callable[[], None]) -> StepResult:
    """A step of two micro-batches of this dp rank's rows, which changes no weight; every rank calls it."""
    mesh = model.mesh
    own = probe_rows.share_of(rows, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
    halves = [
        {name: values[part] for name, values in own.items()}
        for part in (slice(0, 2), slice(2, 4))
    ]
    optimizer = build_optimizer(model.module, OptimizerConfig(), working=model.working)
    step = TrainStep(model, optimizer, observe=observe, compare_copies=False)
    return step.run(halves, lr=0.0)


def _narrowed(
    mesh: Mesh,
    subject: Subject,
    rows: Batch,
    weights: Weights,
    expected: Expected | None,
    alone: Any,
) -> Iterator[Difference]:
    """A step in bfloat16, as the run makes it: that it can be computed, and is near float32; every rank calls it."""
    assert subject.narrow is not None
    model = build(subject.narrow, subject.architecture, mesh, weights=weights)
    gradients: dict[str, Tensor] = {}
    into = gradients if expected is not None else None
    result = _step(model, rows, partial(_keep_gradients, model, into))
    loss = mean_loss(result, mesh)
    norm = result.grad_norm.item()
    if subject.narrow.train.compile:
        torch.compiler.reset()  # no layer of the run is one that was compiled again
    if expected is not None:
        # The gradient's norm of some architectures is far from float32's, but a number.
        yield compare_number(BFLOAT16_LOSS, loss + 0 * norm, expected.loss)
        if rounded := _rounded(alone, rows, mesh):
            yield _beyond_rounding(gradients, expected.gradients, rounded)


def _keep_gradients(model: Model, into: dict[str, Tensor] | None) -> None:
    """Collects the whole gradients; every rank calls it, and `into` is None where they are not wanted."""
    for name, gradient in complete_gradients(model):
        if into is not None:
            into[name] = gradient.cpu().clone()


def _rounded(alone: Any, rows: Batch, mesh: Mesh) -> dict[str, Tensor]:
    """The gradients of transformers' own forward in bfloat16, in one process; none where it cannot compute them."""
    own = copy.deepcopy(alone).bfloat16()
    own.zero_grad()
    try:
        forward_backward(
            own, rows, times=probe_rows.times_counted(mesh.dp_size), copies=mesh.dp_size
        )
    except Exception:  # whatever a model's code may raise
        return {}
    return gradients_of(own)


def _beyond_rounding(gradients: Tensors, expected: Tensors, rounded: Tensors) -> Difference:
    """By how much the run's gradients differ from float32's beyond three times what rounding does to them, at most."""
    own, plain = (
        compare_tensors(PROBE_GRADIENT, each, expected) for each in (gradients, rounded)
    )
    explained = {each.place: 3 * min(each.figure, 1.0) for each in plain}
    beyond = [max(0.0, each.figure - explained.get(each.place, 0.0)) for each in own]
    excess = [
        replace(each, quantity=KERNELS.quantity, bound=KERNELS.limit, figure=more)
        for each, more in zip(own, beyond, strict=True)
    ]
    return Comparison(excess).worst()


def _replicas(model: Model, group: dist.ProcessGroup) -> Difference:
    """How far the gradients of what every tp rank holds differ between them, relative to the largest of each."""
    split = model.tensor.placements
    whole = {
        name: local_part(parameter.grad)
        for name, parameter in model.module.named_parameters()
        if parameter.grad is not None and (name not in split or split[name].is_replicate())
    }
    if not whole:
        return Difference(
            PROBE_REPLICA.quantity,
            0.0,
            PROBE_REPLICA.limit,
            detail="no parameter is whole on all ranks",
        )
    flat = torch.cat([gradient.flatten() for gradient in whole.values()])
    flat = flat.where(flat.isfinite(), math.inf)  # a maximum over ranks may pass over a NaN
    highest, lowest = flat.clone(), flat.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
    sizes = [gradient.numel() for gradient in whole.values()]
    parts = zip(whole, highest.split(sizes), lowest.split(sizes), strict=True)
    pairs = {name: (high, low) for name, high, low in parts}
    highs, lows = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
    return Comparison(compare_tensors(PROBE_REPLICA, highs, lows)).worst()
