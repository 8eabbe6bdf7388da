"""The single process with which every mesh is compared: transformers' own model, each document alone.

Its own eager attention, its own head, masks and positions. Nothing of `threefold.model` computes here, except for the
adapters that are trained and the head that is compared with the model's logits. A row without documents is one
document.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from threefold.check.compare import LOGITS, Difference, Training, compare_tensors
from threefold.config.objective import DpoConfig
from threefold.config.schema import Config, ModelConfig
from threefold.data.rows.concat import IGNORED, PADDING
from threefold.model import head, lora
from threefold.model.load import layers_of, outline
from threefold.optim.build import build_optimizer
from threefold.optim.schedule import learning_rate
from threefold.training.dpo_loss import pair_losses
from threefold.training.loss import RouterLoss

# [rows, sequence] each: `input_ids`, `labels`, `position_ids`, and where there are some `document_ids`, `padding`.
Batch = dict[str, Tensor]

# Added to every weight, so that attention, routers and norms are far from uniform: standard deviations of matrices and
# of vectors.
_MATRIX_STD, _VECTOR_STD = 0.1, 0.03


@dataclass(frozen=True)
class MeanLoss:
    """One forward and backward of a global batch.

    Attributes:
        loss: the mean over the targets (over the pairs, of pairs of answers); cross entropy only.
        aux_loss: of the routers, or None if the model's config asks for none.
    """

    loss: float
    aux_loss: float | None


def perturbed_model(config: PretrainedConfig, asked: ModelConfig, *, seed: int) -> Any:
    """The architecture with its own eager attention and random weights far from zero, on the CPU.

    In wide layers they are smaller, so that what a layer gives is of one size at any width.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config),
        attn_implementation="eager",
        dtype=torch.float32,
        trust_remote_code=asked.trust_remote_code,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            std = (
                min(_MATRIX_STD, parameter.shape[-1] ** -0.5)
                if parameter.ndim > 1
                else _VECTOR_STD
            )
            parameter.add_(torch.randn_like(parameter), alpha=std)
    return model.train()


def forward_backward(
    model: PreTrainedModel,
    batch: Batch,
    *,
    times: Sequence[int] | None = None,
    copies: int = 1,
    outputs: "LayerOutputs | None" = None,
) -> MeanLoss:
    """Adds the gradient of a global batch's mean cross entropy, and of its routers' loss, to `.grad`.

    Args:
        times: how often the targets of each row count; default: once.
        copies: how often its tokens count for the routers.
        outputs: collects what the layers return.
    """
    times = times if times is not None else [1] * len(batch["labels"])
    targets = max(
        1,
        sum(
            count * int((row != IGNORED).sum())
            for count, row in zip(times, batch["labels"], strict=True)
        ),
    )
    router = RouterLoss.of(model)
    total, routed = 0.0, list[list[Tensor]]()
    objective = torch.zeros((), device=_device_of(model))
    for row, count in enumerate(times):
        for document in documents_of(batch, row):
            if document.padding and outputs is None:
                continue
            computed = _compute(model, document, outputs, routers=router is not None)
            labels = document.labels.to(_device_of(model))
            loss = count * F.cross_entropy(
                computed.logits[0].float(), labels, ignore_index=IGNORED, reduction="sum"
            )
            total += loss.item()
            if router is None:
                (loss / targets).backward()  # one document's graph at a time
            else:
                objective = objective + loss / targets
                if not document.padding:
                    # [tokens, experts] of each layer that routes
                    layers = filter(torch.is_tensor, computed.router_logits)
                    routed += [[each.flatten(0, -2) for each in layers]] * copies
    if router is None:
        return MeanLoss(total / targets, None)
    aux = _routers_loss(router, routed)
    (objective + router.coefficient * aux).backward()
    return MeanLoss(total / targets, aux.item())


def pairs_forward_backward(
    model: PreTrainedModel,
    batch: Batch,
    *,
    reference: PreTrainedModel,
    asked: DpoConfig,
    outputs: "LayerOutputs | None" = None,
) -> MeanLoss:
    """Adds the gradient of the mean loss of a global batch's pairs of answers (`train.objective: dpo`) to `.grad`.

    Args:
        reference: the model as it began, without adapters.
    """
    total, pairs = 0.0, max(1, num_pairs(batch))
    for row in range(len(batch["labels"])):
        gained, counts = [], []
        for document in documents_of(batch, row):
            with torch.no_grad():
                base = _log_probability(
                    _compute(reference, document, None).logits[0], document.labels
                )
            own = _log_probability(
                _compute(model, document, outputs).logits[0], document.labels
            )
            # Not padding, nor a row that fills up a batch.
            if (counted := (document.labels != IGNORED).sum()) > 0:
                gained.append(own - base)
                counts.append(counted)
        if gained:
            loss = pair_losses(
                asked, torch.stack(gained)[None].double(), torch.stack(counts)[None]
            ).sum()
            (loss / pairs).backward()
            total += loss.item()
    return MeanLoss(total / pairs, None)


def num_pairs(batch: Batch) -> int:
    """Pairs of answers in a global batch; each of a row's two documents with targets are one."""
    documents = batch["document_ids"].where(batch["labels"] != IGNORED, PADDING)
    return sum(len(row[row != PADDING].unique()) // 2 for row in documents)


def _log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Document:
    """A document of a row: its tokens [1, length], labels [length], and places [sequence] in the row."""

    row: int
    ids: Tensor
    labels: Tensor
    places: Tensor
    padding: bool


def documents_of(batch: Batch, row: int) -> Iterator[Document]:
    """The documents of a row in their order; a run of padding is one too."""
    numbers = (
        batch["document_ids"][row]
        if "document_ids" in batch
        else torch.zeros_like(batch["labels"][row])
    )
    if "padding" in batch:
        numbers = numbers.where(~batch["padding"][row], PADDING)
    for number in numbers.unique_consecutive().tolist():
        places = numbers == number
        ids = batch["input_ids"][row, places][None]
        yield Document(row, ids, batch["labels"][row, places], places, number == PADDING)


def _compute(
    model: Any, document: Document, outputs: "LayerOutputs | None", *, routers: bool = False
) -> Any:
    if outputs is not None:
        outputs.document = document
    asked: dict[str, Any] = {"output_router_logits": True} if routers else {}
    return model(input_ids=document.ids.to(_device_of(model)), use_cache=False, **asked)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _routers_loss(router: RouterLoss, routed: list[list[Tensor]]) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    by_layer = tuple(torch.cat(parts) for parts in zip(*routed, strict=True))
    loss: Tensor = load_balancing_loss_func(by_layer, router.num_experts, router.top_k)
    return loss


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradient of each parameter that is trained, by the name under which it is stored; zeros where it has none."""
    tied = dict(model.all_tied_weights_keys)
    return {
        tied.get(name, name): torch.zeros_like(parameter)
        if parameter.grad is None
        else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def norm_of(model: nn.Module) -> float:
    """The norm of the whole gradient."""
    norms = [
        parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None
    ]
    return torch.stack(norms).norm().item() if norms else 0.0


def train_alone(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    optimizer: torch.optim.Optimizer,
    lr: Callable[[int], float],
    grad_clip: float,
    step: Callable[..., MeanLoss] = forward_backward,
    observed_rows: int = 0,
) -> Training:
    """Trains a model on complete global batches in this process.

    Args:
        batches: one global batch per step.
        lr: the rate of a step, counted from 1.
        grad_clip: the norm that a gradient is clipped to; 0: no clipping.
        step: `forward_backward`, or a function with its signature.
        observed_rows: number of rows of the first batch for which the layers' outputs are kept.
    """
    training = Training()
    for number, batch in enumerate(batches, start=1):
        outputs = LayerOutputs(model, observed_rows) if number == 1 and observed_rows else None
        sums = step(model, batch, outputs=outputs)
        norm = norm_of(model)
        if outputs is not None:
            training.outputs = outputs.finish()
        if number == 1:
            training.gradients = gradients_of(model)
        if grad_clip:
            factor = min(1.0, grad_clip / (norm + 1e-6))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= factor
        for group in optimizer.param_groups:
            group["lr"] = lr(number) * group.get("lr_share", 1.0)
        optimizer.step()
        optimizer.zero_grad()
        training.losses.append(sums.loss)
        training.norms.append(norm)
    return training


def run_alone(
    config: Config,
    architecture: PretrainedConfig,
    batches: Sequence[Batch],
    *,
    num_steps: int,
    observed_rows: int,
) -> Training:
    """Trains the model of a config on complete global batches in this process, in float32.

    Args:
        architecture: of the random weights, or of the weights in `config.model.name_or_path`.
        batches: one global batch [rows, seq_len] a step.
        num_steps: length of the run that the schedule is for.
        observed_rows: number of rows of the first batch for which the layers' outputs are kept.
    """
    model = _load(config, architecture)
    step = forward_backward
    if config.train.objective == "dpo":
        reference = copy.deepcopy(model).eval().requires_grad_(False)
        step = partial(pairs_forward_backward, reference=reference, asked=config.dpo)
    if config.model.lora.r:
        lora.insert_whole(model, config.model.lora, seed=config.train.seed)
    return train_alone(
        model,
        batches,
        optimizer=build_optimizer(model, config.optimizer),
        lr=lambda number: learning_rate(number, num_steps=num_steps, config=config.optimizer),
        grad_clip=config.train.grad_clip,
        step=step,
        observed_rows=observed_rows,
    )


def _load(config: Config, architecture: PretrainedConfig) -> Any:
    settings: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    if config.model.name_or_path is None:
        torch.manual_seed(config.train.seed)
        return AutoModelForCausalLM.from_config(architecture, **settings).train()
    model = AutoModelForCausalLM.from_pretrained(
        config.model.name_or_path,
        config=architecture,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
        **settings,
    )
    return frozen_as_built(model, outline(architecture, config.model)).train()


def frozen_as_built(model: Any, built: Any) -> Any:
    """Freezes what the model's class freezes (sinusoids, balancing biases), where `from_pretrained` trains all.

    Args:
        built: the model without storage.
    """
    for name, parameter in built.named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    return model


class LayerOutputs:
    """Collects what each layer returns for the first rows, document by document.

    Attributes:
        document: the one that is being computed.
    """

    def __init__(self, model: Any, num_rows: int) -> None:
        self.document: Document | None = None
        self._num_rows = num_rows
        self._rows: list[dict[int, Tensor]] = []
        self._hooks = []
        for layer in layers_of(model):
            rows: dict[int, Tensor] = {}
            self._rows.append(rows)
            self._hooks.append(layer.register_forward_hook(self._keep_in(rows)))

    def _keep_in(self, rows: dict[int, Tensor]) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            document = self.document
            if document is not None and document.row < self._num_rows:
                hidden = output[0] if isinstance(output, tuple) else output
                whole = rows.setdefault(
                    document.row, torch.zeros(len(document.places), hidden.shape[-1])
                )
                whole[document.places] = hidden.detach()[0]

        return hook

    def finish(self) -> list[Tensor]:
        """The outputs of each layer, [rows, sequence, hidden]."""
        for hook in self._hooks:
            hook.remove()
        return [torch.stack([rows[row] for row in sorted(rows)]) for rows in self._rows]


@torch.no_grad()
def head_difference(model: PreTrainedModel, ids: Tensor) -> Difference:
    """The logits of our head compared with the model's own."""
    kind, _ = head.kind_of(model)
    if kind is None:
        return Difference(LOGITS.quantity, 0.0, LOGITS.limit)  # its own forward is used
    expected = model(input_ids=ids, use_cache=False).logits
    inner: Any = head.below_head(model)
    actual = head.logits_of(
        model, inner(input_ids=ids, use_cache=False).last_hidden_state, kind
    )
    (difference,) = compare_tensors(LOGITS, {"": actual}, {"": expected})
    return difference


@torch.no_grad()
def use_of_positions(model: PreTrainedModel, ids: Tensor) -> str:
    """How the model treats positions that restart in the middle of a row, as text."""
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "takes no position_ids"
    half = ids.shape[1] // 2
    plain = torch.arange(2 * half, device=ids.device)[None]
    anew = torch.arange(half, device=ids.device).repeat(2)[None]
    logits = [
        model(input_ids=ids[:, : 2 * half], position_ids=each, use_cache=False).logits
        for each in (plain, anew)
    ]
    return "ignores position_ids" if torch.equal(*logits) else "reads position_ids"
