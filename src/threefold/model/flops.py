"""Floating-point operations per token in training, from the modules of a model.

A multiplication with a matrix of n parameters costs 2 n a token forward, 2 n for the gradient of its input and 2 n for
that of the matrix, which a frozen one does not have. An embedding is a look-up and costs nothing; the head costs even
if tied to it; of experts, only those chosen for the token count. Attention costs 2 x heads x (width of a query + width
of a value) x keys forward, twice that backward. By the convention of published figures (arXiv:2204.02311, appendix B) a
token of a causal row of S has S keys, although it sees half of them on average: here a token that sees n keys has
2 n - 1, whose mean is S for such a row, and less for windows and documents. Norms, activations, the softmax,
recurrences and recomputation are not counted.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from threefold.model.layer_kinds import CHOSEN_EXPERTS, NUM_EXPERTS
from threefold.model.weight_check import is_adapter
from threefold.plan.operations import Attention, Flops

_EXPERT = re.compile(r"\.experts\.")
_NOT_COUNTED = re.compile(r"(DeltaNet|LinearAttention|Mamba\w*|Mixer|SSM\w*)$")


class KeysSeen:
    """Keys of a token on average over the rows that were read, by their positions."""

    def __init__(self, flops: Flops) -> None:
        self._seen: dict[int | None, int] = dict.fromkeys(
            {each.window for each in flops.attention}, 0
        )
        self._tokens = 0

    def read(self, position_ids: NDArray[np.integer]) -> None:
        """Adds rows [rows, sequence] whose positions count from 0 in each document, or row without documents."""
        self._tokens += position_ids.size
        for window in self._seen:
            seen = position_ids + 1 if window is None else np.minimum(position_ids + 1, window)
            self._seen[window] += int(seen.sum())

    def __call__(self, window: int | None) -> float:
        return 2 * self._seen[window] / self._tokens - 1 if self._tokens else 0.0


def flops_of(model: PreTrainedModel) -> Flops:
    """Counted from the modules of a causal model, on any device or mesh, with its adapters.

    Of a model of several parts, which also sees or hears: its decoder and its head.
    """
    head = model.get_output_embeddings()
    decoder = model.get_decoder()
    # modernbert-decoder calls its head so.
    language = nn.ModuleDict({"decoder": model if decoder is head else decoder})
    if head is not None:
        language["head"] = head
    looked_up = {
        id(module.weight) for module in language.modules() if isinstance(module, nn.Embedding)
    }
    multiplied = (
        {id(parameter) for parameter in head.parameters()} if head is not None else set()
    )
    share = _share_of_experts(model)
    counts = {True: 0.0, False: 0.0}
    for name, parameter in language.named_parameters():
        if parameter.ndim < 2 or (
            id(parameter) in looked_up and id(parameter) not in multiplied
        ):
            continue
        met = parameter.numel() * (
            share if _EXPERT.search(name) and not is_adapter(name) else 1.0
        )
        counts[parameter.requires_grad] += met
    return Flops(
        counts[True],
        counts[False],
        Counter(_attention_of(language, model.config.get_text_config())),
    )


def _share_of_experts(model: PreTrainedModel) -> float:
    config = model.config.get_text_config()
    experts, chosen = (
        next(
            (value for name in names if isinstance(value := getattr(config, name, None), int)),
            None,
        )
        for names in (NUM_EXPERTS, CHOSEN_EXPERTS)
    )
    return chosen / experts if experts and chosen else 1.0


def _attention_of(model: nn.Module, text: PretrainedConfig) -> Iterator[Attention]:
    for module in model.modules():
        name = type(module).__name__
        if (
            not name.endswith("Attention")
            or _NOT_COUNTED.search(name)
            or not hasattr(module, "layer_idx")
        ):
            continue
        config: Any = getattr(module, "config", None) or text
        heads = _first(module, ("num_heads", "num_attention_heads", "n_heads"))
        if (heads := heads or getattr(config, "num_attention_heads", None)) is None:
            continue
        width = _first(module, ("qk_head_dim", "head_dim")) or config.hidden_size // heads
        yield Attention(
            heads, width, _first(module, ("v_head_dim",)) or width, _window_of(module, config)
        )


def _window_of(module: Any, config: Any) -> int | None:
    kinds = getattr(config, "layer_types", None)
    number = getattr(module, "layer_idx", None)
    kind = kinds[number] if kinds and number is not None and number < len(kinds) else None
    if kind == "full_attention":
        return None
    if kind == "chunked_attention":
        # A chunk of C tokens is a separate row: as many keys on average as a window of half its size.
        return max(1, config.attention_chunk_size // 2)
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    return (
        getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True)
        else None
    )


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next(
        (value for name in names if isinstance(value := getattr(module, name, None), int)), None
    )
