"""A hand-written single-process loop, the curve that every mesh must follow; it computes nothing with the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from threefold.check.compare import (
    GRADIENT,
    GRADIENT_NORM,
    LOSS,
    WEIGHT,
    Bound,
    Comparison,
    Difference,
    Training,
    compare_numbers,
    compare_tensors,
)

# Of models whose parameters all have a gradient that is more than rounding: none is compared with another's size.
STRICT = replace(GRADIENT, smallest=0.0)
# A gradient below this share of the largest is zero but for rounding, as that of a key's bias.
_ROUNDING = 1e-5
# (loss, gradient norm) of each step; what follows them in a step is not compared.
Curve: TypeAlias = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Bounds:
    """The bounds of a comparison of two trainings."""

    loss: Bound = LOSS
    norm: Bound = GRADIENT_NORM
    gradient: Bound = GRADIENT
    weight: Bound = WEIGHT


PARITY = Bounds(gradient=STRICT)


def compare_curves(actual: Curve, expected: Curve, bounds: Bounds | None = None) -> Comparison:
    """Compares the loss and the gradient norm of each step, in turn."""
    bounds = bounds or Bounds()
    losses, norms = (
        compare_numbers(
            bound, [step[place] for step in actual], [step[place] for step in expected]
        )
        for place, bound in enumerate((bounds.loss, bounds.norm))
    )
    return Comparison(in_turn(losses, norms))


def in_turn(losses: Sequence[Difference], norms: Sequence[Difference]) -> list[Difference]:
    """The loss and the norm of each step, one after the other."""
    pairs = zip_longest(losses, norms)
    return [difference for pair in pairs for difference in pair if difference is not None]


def compare_trainings(
    actual: Training, expected: Training, bounds: Bounds | None = None
) -> Comparison:
    """Compares step by step: loss, norm, in the first step the gradients; the weights at the end."""
    bounds = bounds or Bounds()
    losses = compare_numbers(bounds.loss, actual.losses, expected.losses)
    norms = compare_numbers(bounds.norm, actual.norms, expected.norms)
    gradients = compare_tensors(bounds.gradient, actual.gradients, expected.gradients)
    differences = in_turn([losses[0]], [norms[0]]) + gradients + in_turn(losses[1:], norms[1:])
    if actual.weights or expected.weights:
        differences += compare_tensors(bounds.weight, actual.weights, expected.weights)
    return Comparison(differences)


def compare_gradients(actual: dict[str, Any], expected: dict[str, Any]) -> list[Difference]:
    """Compares the gradients of any architecture: each one with its own size, unless it is zero but for rounding."""
    sizes = {name: float(abs(gradient).max()) for name, gradient in expected.items()}
    least = _ROUNDING * max(sizes.values(), default=0.0)
    clear = {name: gradient for name, gradient in expected.items() if sizes[name] > least}
    own = {name: actual[name] for name in clear if name in actual}
    return [*compare_tensors(GRADIENT, actual, expected), *compare_tensors(STRICT, own, clear)]


def curve_bounds(loss: float, norm: float, reason: str) -> Bounds:
    """Bounds of a test's own: of losses in nats, and of gradient norms, relative."""
    return Bounds(
        replace(LOSS, limit=loss, reason=reason),
        replace(GRADIENT_NORM, limit=norm, reason=reason),
    )


def require(comparison: Comparison | Sequence[Difference], case: object = "") -> Comparison:
    """The comparison, which holds; else the test fails with the first difference that exceeds its bound."""
    comparison = (
        comparison if isinstance(comparison, Comparison) else Comparison(list(comparison))
    )
    assert comparison.holds, f"{case}: {comparison}"
    return comparison


TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Wide enough for attention to be far from uniform, so that a wrong mask or position shows.
    "initializer_range": 0.2,
}


def make_batches(
    *, steps: int, rows: int, seq_len: int, vocab: int = 67
) -> list[dict[str, torch.Tensor]]:
    """`steps` global batches [rows, seq_len] whose ignored labels are spread unevenly over the rows."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(vocab, (rows, seq_len + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        for row in range(rows):
            ignored = (row * seq_len) // rows
            labels[row, torch.randperm(seq_len, generator=generator)[:ignored]] = -100
        positions = torch.arange(seq_len).expand(rows, -1).contiguous()
        batches.append(
            {
                "input_ids": tokens[:, :-1].contiguous(),
                "labels": labels,
                "position_ids": positions,
            }
        )
    return batches


def train_alone(
    model_config: dict[str, Any],
    batches: list[dict[str, torch.Tensor]],
    *,
    lr: float,
    clip: float,
    decay: float,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms before clipping, and the first step's clipped gradients, of one process."""
    torch.manual_seed(0)
    values = dict(model_config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    losses, norms, first = [], [], {}
    for batch in batches:
        logits = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
        total = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        loss = total / (batch["labels"] != -100).sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, first
