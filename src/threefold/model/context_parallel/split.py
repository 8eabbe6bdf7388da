"""How a row is split over cp ranks, and which models allow it: arithmetic, before anything is computed.

A row becomes [sequence / cp] on each cp rank: its head chunk and its tail chunk of 2 x cp equal ones, so that causal
work is balanced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from threefold.errors import Problem
from threefold.mesh.topology import Topology
from threefold.model.context_parallel import limits
from threefold.model.layer_kinds import common_number
from threefold.plan.choices import heads_divide

# Layers that carry a state along the sequence, which neither method keeps.
_RECURRENT = ("mamba", "rwkv", "linear_attention", "recurrent", "xlstm", "conv", "hybrid")


def local_positions(sequence: int, *, cp_size: int, cp_rank: int) -> Tensor:
    """True positions in the row of the tokens that a cp rank holds, in the order in which it holds them.

    Args:
        sequence: length of the entire row, a multiple of 2 x cp_size (any length if cp_size is 1).

    Returns:
        int64 [sequence / cp_size]: chunk cp_rank, then chunk 2 x cp_size - 1 - cp_rank.
    """
    if cp_size == 1:
        return torch.arange(sequence)
    chunks = torch.arange(sequence).chunk(2 * cp_size)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])


def gathered_positions(sequence: int, *, cp_size: int) -> Tensor:
    """True positions in the row of the tokens of all cp ranks, in rank order; int64 [sequence]."""
    return torch.cat(
        [local_positions(sequence, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    )


def split_problems(
    method: str, config: PretrainedConfig, topology: Topology, model: Any = None
) -> list[Problem]:
    """Why this architecture's sequences cannot be split as asked; empty if they can.

    Args:
        model: of this config, without storage; its modules say more than its config does.
    """
    if topology.cp == 1:
        return []
    text = config.get_text_config()
    kinds = [
        *(getattr(text, "layer_types", None) or ()),
        *(getattr(text, "layers_block_type", None) or ()),
    ]
    carried = sorted(
        {
            kind
            for kind in (config.model_type, *kinds)
            if any(word in kind for word in _RECURRENT)
        }
    )
    if carried:
        what = f"mesh.cp = {topology.cp}, but {config.model_type!r} has recurrent layers ({', '.join(carried)})"
        expected = "attention layers only: a recurrent state runs along the whole sequence"
        return [Problem(what, expected, "--mesh.cp 1   (use mesh.dp or mesh.tp instead)")]
    if model is not None and (problems := limits.cp_problems(model, topology)):
        return problems
    if method == "ulysses" and not heads_divide(heads_of(config), topology):
        what = f"mesh.cp_method = ulysses, but the heads of a tp rank do not divide by mesh.cp ({topology.cp})"
        expected = "attention heads and key-value heads that are multiples of mesh.tp x mesh.cp"
        return [
            Problem(what, expected, "--mesh.cp_method gather   (works for any number of heads)")
        ]
    return []


def heads_of(config: PretrainedConfig) -> tuple[int, int] | None:
    """Attention heads, and heads of keys and values; None where they are not known."""
    text = config.get_text_config()
    heads = common_number(text, "num_attention_heads")
    if heads is None:
        return None
    shared = getattr(text, "multi_query", False)
    return heads, 1 if shared else common_number(text, "num_key_value_heads") or heads
