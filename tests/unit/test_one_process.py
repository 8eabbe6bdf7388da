"""The one process that every mesh is compared with is itself compared: with loops written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from ranks.reference import PARITY, TINY_LLAMA, compare_trainings, make_batches, require
from ranks.reference import train_alone as train_by_hand
from threefold.check.compare import (
    LOSS,
    ROUTERS_LOSS,
    Training,
    compare_number,
    compare_tensors,
)
from threefold.check.reference import forward_backward, gradients_of, norm_of, train_alone
from threefold.config.loading import validate
from threefold.optim.build import build_optimizer

MIXTRAL = {
    **TINY_LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MIXTRAL |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def model_of(values: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    kind = values["model_type"]
    config = AutoConfig.for_model(
        kind, **{name: value for name, value in values.items() if name != "model_type"}
    )
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )


def test_steps_are_those_of_a_loop_by_hand() -> None:
    batches = make_batches(steps=6, rows=4, seq_len=16)
    losses, norms, _ = train_by_hand(TINY_LLAMA, batches, lr=3e-3, clip=0.5, decay=0.1)
    unclipped = train_by_hand(TINY_LLAMA, batches[:1], lr=3e-3, clip=1e9, decay=0.1)[2]
    model = model_of(TINY_LLAMA)
    optimizer = build_optimizer(
        model, validate({"optimizer": {"lr": 3e-3, "weight_decay": 0.1}}).optimizer
    )
    training = train_alone(
        model, batches, optimizer=optimizer, lr=lambda step: 3e-3, grad_clip=0.5
    )
    assert min(norms) > 0.5, "no gradient is clipped"
    require(compare_trainings(training, Training(losses, norms, unclipped), PARITY))


def test_documents_are_computed_alone_and_padding_not_at_all() -> None:
    (batch,) = make_batches(steps=1, rows=2, seq_len=16)
    batch["document_ids"] = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [-1] * 7])
    batch["labels"][0, 4] = batch["labels"][1, 8] = -100
    batch["labels"][1, 9:] = -100
    model, by_hand = model_of(TINY_LLAMA), model_of(TINY_LLAMA)
    sums = forward_backward(model, batch)
    total = torch.zeros(())
    for row, begin, end in ((0, 0, 5), (0, 5, 16), (1, 0, 9)):
        logits = by_hand(input_ids=batch["input_ids"][row : row + 1, begin:end]).logits[0]
        total = total + F.cross_entropy(
            logits, batch["labels"][row, begin:end], reduction="sum"
        )
    loss = total / (batch["labels"] != -100).sum()
    loss.backward()
    expected = {name: parameter.grad for name, parameter in by_hand.named_parameters()}
    require(
        [
            compare_number(LOSS, sums.loss, loss.item()),
            *compare_tensors(PARITY.gradient, gradients_of(model), expected),
        ]
    )
    assert norm_of(model) == pytest.approx(
        torch.nn.utils.get_total_norm(expected.values()).item(), rel=1e-5
    )


def test_the_routers_loss_is_transformers_own() -> None:
    (batch,) = make_batches(steps=1, rows=2, seq_len=16)
    model, by_hand = model_of(MIXTRAL), model_of(MIXTRAL)
    sums = forward_backward(model, batch)
    output = by_hand(input_ids=batch["input_ids"], use_cache=False)
    loss = F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten())
    (loss + 0.5 * output.aux_loss).backward()
    assert sums.aux_loss is not None
    numbers = [
        compare_number(LOSS, sums.loss, loss.item()),
        compare_number(ROUTERS_LOSS, sums.aux_loss, output.aux_loss.item()),
    ]
    expected = {name: parameter.grad for name, parameter in by_hand.named_parameters()}
    require([*numbers, *compare_tensors(PARITY.gradient, gradients_of(model), expected)])


def test_a_parameter_without_a_gradient_has_zeros() -> None:
    model = model_of(TINY_LLAMA)
    assert norm_of(model) == 0.0
    gradients = gradients_of(model)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert not any(gradient.any() for gradient in gradients.values())
    model.lm_head.weight.requires_grad_(False)
    assert "lm_head.weight" not in gradients_of(model)
