"""Activation checkpointing: what a layer computed is forgotten and computed again in backward.

`full` forgets everything inside a layer. `selective` keeps what is dear to compute and small to keep, the results of
matrix products and of attention, and forgets the rest (norms, activations, rotations).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}


def install(model: PreTrainedModel, kind: str) -> None:
    """Checkpoints each layer of the model: `full` or `selective`."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
