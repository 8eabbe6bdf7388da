"""From hidden states to the loss, without ever holding all logits.

A causal language model's own forward returns logits [batch, sequence, vocabulary]. Here it is replaced by one that
takes the labels too and returns sums: the head is applied to a chunk of tokens at a time, and a chunk's logits are
computed again in backward. What a model does to its logits behind the head (a cap, a scale) is done to each chunk; a
model that does something not known here keeps its own forward.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from threefold.model.fused_loss import Additions, fused_sums

_CHUNK_BYTES = 256 * 1024**2
# What a forward may do between the hidden states and the loss for it to be understood; anything else is not known.
_HIDDEN = (
    r"\w*outputs\[0\]",
    r"\w*outputs\.last_hidden_state",
    r"slice_logits_to_keep\(hidden_states, logits_to_keep\)",
)
_LOGITS = {
    r"self\.(lm_head|embed_out)\(hidden_states\)(\.contiguous\(\))?": "head",
    r"logits / self\.config\.logits_scaling": "divide",
    r"logits \* self\.logit_scale": "multiply",
    r"logits / self\.config\.final_logit_softcapping": "cap",
    r"torch\.tanh\(logits\)": "",
    r"logits \* self\.config\.final_logit_softcapping": "",
}


class TokenLoss(Additions, Protocol):
    """(logits [tokens, part of the vocabulary], labels [tokens]) -> (objective, cross entropy), both sums."""

    def __call__(self, logits: Tensor, labels: Tensor, /) -> tuple[Tensor, Tensor]: ...


class Sums(NamedTuple):
    """What a forward with labels returns: sums over this rank's target tokens, and each router's logits (or none)."""

    objective: Tensor
    cross_entropy: Tensor
    router_logits: tuple[Tensor, ...]


def operations(model: PreTrainedModel) -> tuple[list[str] | None, str]:
    """What the model does to hidden states to get logits, in order (None where that is not known), and why."""
    source = inspect.getsource(type(model).forward)
    source = re.sub(r"\s+#.*$", "", source, flags=re.MULTILINE)
    assigned = re.findall(r"^\s*(hidden_states|\w*logits) ([-+*/]?=) (.*?),?$", source, flags=re.MULTILINE)
    found: list[str] = []
    for name, sign, value in assigned:
        if name.endswith("router_logits") or (name == "logits" and value in ("logits", "None")):
            continue
        table = dict.fromkeys(_HIDDEN, "") if name == "hidden_states" else _LOGITS
        meanings = [meaning for pattern, meaning in table.items() if re.fullmatch(pattern, value)]
        if sign != "=" or name not in ("hidden_states", "logits") or not meanings:
            return None, f"its forward has `{name} {sign} {value}`"
        found += [meaning for meaning in meanings if meaning]
    if found[:1] != ["head"] or model.get_output_embeddings() is None:
        return None, "its forward has no head of a known kind"
    return found, "its head is of a known kind"


def chunk_tokens(asked: int | str, *, tokens: int, vocabulary: int) -> int:
    """Tokens whose logits are computed at a time: as asked, or with `auto` as many as 256 MiB of float32 hold."""
    if isinstance(asked, int):
        return asked or tokens
    return min(tokens, max(1, _CHUNK_BYTES // (4 * vocabulary)))


def install(
    model: PreTrainedModel,
    *,
    chunk: int | str,
    whole: Callable[[Tensor], Tensor] = lambda hidden: hidden,
    fused: bool = False,
) -> None:
    """Replaces the model's forward by one that returns `Sums`; before any wrapper is put around the model.

    Args:
        chunk: tokens at a time, `auto`, or 0 for all at once.
        whole: makes the hidden states of this rank's sequence whole where tp ranks share it.
        fused: head and loss in one kernel (`fused_loss.choose`).
    """
    steps, _ = operations(model)
    own_forward = model.forward

    def forward(*, labels: Tensor, token_loss: TokenLoss, output_router_logits: bool = False, **inputs: Any) -> Sums:
        extra = {"output_router_logits": True} if output_router_logits else {}
        if steps is None:
            outputs = own_forward(**inputs, **extra)
            objective, cross_entropy = token_loss(outputs.logits.flatten(0, 1), labels.flatten())
            return Sums(objective, cross_entropy, _router_logits(outputs))
        outputs = model.base_model(**inputs, **extra)
        hidden = whole(outputs.last_hidden_state)
        if fused:
            sums = fused_sums(model, hidden.flatten(0, 1), labels.flatten(), token_loss, steps)
        else:
            sums = _by_chunks(model, hidden, labels, token_loss, chunk, steps)
        objective, cross_entropy = sums
        return Sums(objective, cross_entropy, _router_logits(outputs))

    model.forward = forward  # type: ignore[method-assign]


def _by_chunks(
    model: PreTrainedModel, hidden: Tensor, labels: Tensor, token_loss: TokenLoss, asked: int | str, steps: list[str]
) -> tuple[Tensor, Tensor]:
    flat, targets = hidden.flatten(0, 1), labels.flatten()

    def one(states: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        return token_loss(_logits(model, states, steps), own)

    head: Any = model.get_output_embeddings()
    size = chunk_tokens(asked, tokens=len(flat), vocabulary=head.weight.shape[0])
    if size >= len(flat):
        return one(flat, targets)
    objective = cross_entropy = torch.zeros((), device=flat.device)
    for states, own in zip(flat.split(size), targets.split(size), strict=True):
        if torch.is_grad_enabled():
            sums = checkpoint(one, states, own, use_reentrant=False, preserve_rng_state=False)
        else:
            sums = one(states, own)
        objective, cross_entropy = objective + sums[0], cross_entropy + sums[1]
    return objective, cross_entropy


def _logits(model: PreTrainedModel, hidden: Tensor, steps: list[str]) -> Tensor:
    head: Any = model.get_output_embeddings()
    config: Any = model.config
    logits: Tensor = head(hidden)
    for step in steps:
        if step == "divide":
            logits = logits / config.logits_scaling
        elif step == "multiply":
            logits = logits * model.logit_scale
        elif step == "cap" and config.final_logit_softcapping is not None:
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


def _router_logits(outputs: Any) -> tuple[Tensor, ...]:
    return tuple(getattr(outputs, "router_logits", None) or ())
