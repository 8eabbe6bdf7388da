"""What a probe is compared with: the model's own forward in one process, each document alone.

Its own attention, its own head, transformers' masks and its own positions: nothing here comes from `threefold.model`
but the head that is compared with the model's logits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from threefold.data.rows.concat import IGNORED
from threefold.model import head
from threefold.training.admission.probe_rows import Batch
from threefold.training.loss import RouterLoss

# Added to every weight, so that attention, routers and norms are far from uniform: standard deviations of matrices and
# of vectors.
_MATRIX_STD, _VECTOR_STD = 0.1, 0.03


@dataclass(frozen=True)
class Alone:
    """The step of one process.

    Attributes:
        loss: mean cross entropy of the target tokens.
        aux_loss: of the routers, or None if the config asks for none.
        grad_norm: of the whole objective.
        gradients: by parameter.
        head_departs: largest difference between the logits of our head and the model's, relative to the largest logit.
        positions: what the model does with `position_ids`.
    """

    loss: float
    aux_loss: float | None
    grad_norm: float
    gradients: dict[str, Tensor]
    head_departs: float
    positions: str


def model_alone(config: PretrainedConfig, *, seed: int, trust_remote_code: bool) -> Any:
    """The architecture with its own eager attention and random weights far from zero, on the CPU."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=_MATRIX_STD if parameter.ndim > 1 else _VECTOR_STD)
    return model.train()


def step_alone(model: PreTrainedModel, rows: Batch, *, times: list[int], copies: int) -> Alone:
    """Loss and gradients over rows [4, sequence] that the dp ranks have together.

    Args:
        times: how often the targets of each row count.
        copies: how often its tokens count for the routers.
    """
    device = next(model.parameters()).device
    router = RouterLoss.of(model)
    targets = sum(count * (row != IGNORED).sum().item() for count, row in zip(times, rows["labels"], strict=True))
    total, routed = torch.zeros((), device=device), []
    for ids, labels, count in _documents(rows, times):
        outputs = _outputs(model, ids.to(device), routers=router is not None)
        logits = outputs.logits[0].float()
        total = total + count * F.cross_entropy(logits, labels.to(device), ignore_index=IGNORED, reduction="sum")
        routed += [_by_token(outputs.router_logits)] * copies if router is not None else []
    objective, aux_loss = total / max(1, targets), None
    if router is not None:
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        by_layer = tuple(torch.cat(parts) for parts in zip(*routed, strict=True))
        aux = load_balancing_loss_func(by_layer, router.num_experts, router.top_k)
        aux_loss, objective = aux.item(), objective + router.coefficient * aux
    objective.backward()
    tied = dict(model.all_tied_weights_keys)
    gradients = {tied.get(name, name): p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    departs = _head_departs(model, rows["input_ids"][:1].to(device))
    positions = _positions(model, rows["input_ids"][:1].to(device))
    return Alone(total.item() / max(1, targets), aux_loss, norm, gradients, departs, positions)


def _documents(rows: Batch, times: list[int]) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(tokens [1, length], labels [length], how often it counts) of each document."""
    for row, count in enumerate(times):
        real = ~rows["padding"][row]
        numbers = rows["document_ids"][row] if "document_ids" in rows else torch.zeros_like(rows["labels"][row])
        for number in numbers[real].unique_consecutive().tolist():
            place = (numbers == number) & real
            yield rows["input_ids"][row][place][None], rows["labels"][row][place], count


def _by_token(router_logits: tuple[Tensor, ...]) -> list[Tensor]:
    """[tokens, experts] of each layer that routes."""
    return [logits.flatten(0, -2) for logits in router_logits if logits is not None]


def _outputs(model: PreTrainedModel, ids: Tensor, *, routers: bool) -> Any:
    asked: dict[str, Any] = {"output_router_logits": True} if routers else {}
    return model(input_ids=ids, use_cache=False, **asked)


@torch.no_grad()
def _head_departs(model: PreTrainedModel, ids: Tensor) -> float:
    kind, _ = head.kind_of(model)
    if kind is None:
        return 0.0  # its own forward is used
    own = model(input_ids=ids, use_cache=False).logits
    inner: Any = head.below_head(model)
    ours = head.logits_of(model, inner(input_ids=ids, use_cache=False).last_hidden_state, kind)
    return ((ours - own).abs().max() / own.abs().max()).item()


@torch.no_grad()
def _positions(model: PreTrainedModel, ids: Tensor) -> str:
    """What the model does with positions that begin anew in the middle of a row."""
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return "takes no position_ids"
    half = ids.shape[1] // 2
    plain, anew = torch.arange(2 * half, device=ids.device)[None], torch.arange(half, device=ids.device).repeat(2)[None]
    logits = [model(input_ids=ids[:, : 2 * half], position_ids=each, use_cache=False).logits for each in (plain, anew)]
    return "ignores position_ids" if torch.equal(*logits) else "reads position_ids"
