"""From hidden states to the loss, without ever holding all logits.

A causal language model's own forward returns logits [batch, sequence, vocabulary]. Here it is replaced by one that
takes the labels too and returns sums, or the log-probability of each label: the head is applied to a chunk of tokens at
a time. The gradient of sums is computed in the forward (`head_gradient`); for log-probabilities, whose gradient is
known in backward only, a chunk's logits are recomputed there. Operations of a model on its logits after the head (a
cap, a scale) are applied to each chunk; a model whose class does anything that is not understood keeps its own forward.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from threefold.model.collectives import gather_parts, join, sum_gradient
from threefold.model.head_gradient import Bend, Loss, is_product, sums_of
from threefold.plan import operations
from threefold.plan.choices import chunk_tokens

# What a forward may assign to its hidden states and its logits before the loss, and the resulting kind of logits:
# the head's product alone, or logit_scale * x, x / logits_scaling, cap * tanh(x / cap) of it.
_OF_HIDDEN_STATES = {
    r"\w*outputs\[0\]|\w*outputs\.last_hidden_state": "",
    r"slice_logits_to_keep\((hidden_states|outputs\.last_hidden_state), logits_to_keep\)": "",
}
_ASSIGNED = r"^\s*(hidden_states|\w*logits) ([-+*/]?=) (.*?),?$"
_OF_LOGITS = {
    r"self\.(lm_head|embed_out)\(hidden_states\)(\.contiguous\(\))?": "plain",
    r"logits / self\.config\.logits_scaling": "divided",
    r"logits \* self\.logit_scale": "multiplied",
    r"logits / self\.config\.final_logit_softcapping": "capped",
    r"torch\.tanh\(logits\)|logits \* self\.config\.final_logit_softcapping|logits|None": "",
}


class Sums(NamedTuple):
    """The result of a forward with labels: sums over this rank's target tokens, and each router's logits (or none).

    `of_rows`: the cross entropy of each row's part here, [rows].
    """

    objective: Tensor
    cross_entropy: Tensor
    router_logits: tuple[Tensor, ...]
    of_rows: Tensor


class Outputs(NamedTuple):
    """Other results of a forward: logits, hidden states or log-probabilities, and each router's logits."""

    values: Tensor
    router_logits: tuple[Tensor, ...]


def kind_of(model: PreTrainedModel) -> tuple[str | None, str]:
    """How the model makes its logits (`plain`, `multiplied`, `divided`, `capped`; None: not known), and why."""
    cls = type(model)
    kind = _kind_of_class(cls) if cls.__module__.startswith("transformers.") else None
    # A head with its own layers (roberta's: dense, norm, decoder) is more than the product at its end.
    head = model.get_output_embeddings()
    if (
        kind is None
        or head is None
        or below_head(model) is None
        or all(child is not head for child in model.children())
    ):
        return None, f"the head of {cls.__name__} is not known"
    return kind, "its head is of a known kind"


def _kind_of_class(cls: type) -> str | None:
    try:
        return read_kind(inspect.getsource(cls.forward))  # type: ignore[attr-defined]
    except OSError:  # installed without its source
        return None


def read_kind(source: str) -> str | None:
    """How a forward makes its logits, by its source; None if it assigns anything that is not understood."""
    source = re.sub(r"\s+#.*$", "", source, flags=re.MULTILINE)
    steps = []
    for name, sign, value in re.findall(_ASSIGNED, source, flags=re.MULTILINE):
        if name.endswith("router_logits"):
            continue
        patterns = {"hidden_states": _OF_HIDDEN_STATES, "logits": _OF_LOGITS}.get(name, {})
        step = next(
            (step for pattern, step in patterns.items() if re.fullmatch(pattern, value)), None
        )
        if sign != "=" or step is None:
            return None
        steps += [step] if step else []
    return steps[-1] if steps[:1] == ["plain"] and len(steps) <= 2 else None


def below_head(model: PreTrainedModel) -> nn.Module | None:
    """The model below the head; the only submodel, if a class does not name it by its prefix (llama4)."""
    if model.base_model is not model:
        return model.base_model
    models = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return models[0] if len(models) == 1 else None


def first_position(model: nn.Module) -> int:
    """The number of a row's first position; roberta and similar models start after the index of the padding token."""
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if hasattr(module, "create_position_ids_from_input_ids") and isinstance(
            table, nn.Embedding
        ):
            return 0 if table.padding_idx is None else table.padding_idx + 1
    return 0


def longest_row(architecture: PretrainedConfig, model: nn.Module) -> int:
    """Tokens of the longest row that the model has positions for; 0: its config names none."""
    longest = operations.longest_row(architecture.get_text_config().to_dict())
    return longest - first_position(model) if longest else 0


def install(
    model: PreTrainedModel,
    *,
    chunk: int | str,
    sharers: dist.ProcessGroup | None = None,
    splitters: dist.ProcessGroup | None = None,
) -> None:
    """Replaces the model's forward by one that returns `Sums`, or `Outputs`; before any wrapper is put around it.

    Args:
        chunk: tokens at a time, as `plan.choices.chunk_tokens` takes them.
        sharers: the tp ranks that share the sequence of the hidden states, if they do.
        splitters: the tp ranks that hold parts of the vocabulary, if they do.
    """
    kind, _ = kind_of(model)
    own_forward = model.forward
    inner = below_head(model)
    first = first_position(model)
    end = _End(model, kind, chunk, sharers, splitters)

    def forward(
        *,
        labels: Tensor | None = None,
        token_loss: Loss | None = None,
        outputs: str = "",
        output_router_logits: bool = False,
        **inputs: Any,
    ) -> Sums | Outputs:
        if output_router_logits:
            inputs["output_router_logits"] = True
        if first:
            inputs["position_ids"] = inputs["position_ids"] + first
        by_itself = inner is None or (kind is None and outputs != "hidden_states")
        computed = own_forward(**inputs) if by_itself else inner(**inputs)  # type: ignore[misc]
        routers = tuple(getattr(computed, "router_logits", None) or ())
        if labels is None or token_loss is None:
            return Outputs(end.values(computed, outputs), routers)
        if outputs == "log_probabilities":
            parts = end.by_chunks(computed, labels.flatten(), token_loss)
            return Outputs(-torch.cat([each for each, _ in parts]).view_as(labels), routers)
        objective, cross_entropy, each = end.sums(computed, labels.flatten(), token_loss)
        return Sums(objective, cross_entropy, routers, each.view(labels.shape).sum(1))

    model.forward = forward  # type: ignore[method-assign]


@dataclass(frozen=True)
class _End:
    """From the output of the model below the head to the requested result; `outputs` is it, or has logits if `kind`
    is None."""

    model: PreTrainedModel
    kind: str | None
    chunk: int | str
    sharers: dist.ProcessGroup | None
    splitters: dist.ProcessGroup | None

    def values(self, outputs: Any, of: str) -> Tensor:
        """Hidden states or logits."""
        if of == "hidden_states":
            hidden: Tensor = outputs.last_hidden_state
            return hidden if self.sharers is None else join(hidden, self.sharers, dim=1)
        return (
            outputs.logits
            if self.kind is None
            else logits_of(self.model, self._whole(outputs), self.kind)
        )

    def sums(
        self, outputs: Any, labels: Tensor, token_loss: Loss
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(the objective, the cross entropy alone) over labels [tokens], and the objective of each token."""
        head: Any = self.model.get_output_embeddings()
        if self.kind is None or not is_product(head):
            parts = self.by_chunks(outputs, labels, token_loss)
            objectives, entropies = zip(
                *((each.sum(), entropy.detach()) for each, entropy in parts), strict=True
            )
            each = torch.cat(entropies)
            return sum(objectives[1:], objectives[0]), each.sum(), each
        hidden = self._whole(outputs).flatten(0, 1)
        if self.splitters is not None and self.sharers is None:
            # Each rank knows what its part of the vocabulary contributes.
            hidden = sum_gradient(hidden, self.splitters)
        bend = _bend(self.model, self.kind)
        return sums_of(hidden, head, labels, token_loss, bend=bend, size=self._size(hidden))

    def by_chunks(
        self, outputs: Any, labels: Tensor, token_loss: Loss
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The result of `token_loss` for each token of each chunk; backward recomputes its logits."""
        if self.kind is None:
            yield token_loss.of_each(outputs.logits.flatten(0, 1), labels)
            return
        hidden = self._whole(outputs).flatten(0, 1)
        kind, size = self.kind, self._size(hidden)

        def one(states: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
            return token_loss.of_each(logits_of(self.model, states, kind), own)

        again = partial(checkpoint, one, use_reentrant=False, preserve_rng_state=False)
        for pair in zip(hidden.split(size), labels.split(size), strict=True):
            yield again(*pair) if torch.is_grad_enabled() and size < len(hidden) else one(*pair)

    def _whole(self, outputs: Any) -> Tensor:
        hidden: Tensor = outputs.last_hidden_state
        return hidden if self.sharers is None else gather_parts(hidden, self.sharers)

    def _size(self, hidden: Tensor) -> int:
        head: Any = self.model.get_output_embeddings()
        # By the largest part of the vocabulary: the same on all ranks.
        vocabulary = -(
            -head.weight.shape[0]
            // (self.splitters.size() if self.splitters is not None else 1)
        )
        return chunk_tokens(
            self.chunk, tokens=len(hidden), vocabulary=vocabulary, device=hidden.device.type
        )


def logits_of(model: PreTrainedModel, hidden: Tensor, kind: str) -> Tensor:
    """The model's logits of hidden states [.., hidden], or this rank's part of them."""
    head: Any = model.get_output_embeddings()
    return _bend(model, kind).logits(head(hidden))


def _bend(model: PreTrainedModel, kind: str) -> Bend:
    config: Any = model.config
    if kind == "divided":
        return Bend(1 / config.logits_scaling)
    if kind == "multiplied":
        return Bend(float(model.logit_scale))  # type: ignore[arg-type]
    return Bend(cap=config.final_logit_softcapping if kind == "capped" else None)
