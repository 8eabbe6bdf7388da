"""Head and cross entropy in one kernel: Liger's (arXiv:2410.10989), on CUDA, where it is asked for by name.

Like `head_gradient` it takes hidden states, the head's weight and the labels, works through the tokens by chunks, makes
the gradient in the forward and keeps no logits; a chunk's softmax and gradient are one kernel instead of several
operations. It cannot smooth labels and report the cross entropy alone, nor work on a part of the vocabulary, so it is
no run's default: the loss would be rounded in another way on other meshes.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from threefold.errors import Problem


def problems(*, device: str, tp: int, label_smoothing: float) -> list[Problem]:
    """Why the kernel cannot be used although it was asked for; empty if it can."""
    if not (why := _obstacle(device, tp, label_smoothing)):
        return []
    install = "pip install 'threefold[liger]', or " if "installed" in why else ""
    expected = "CUDA, the liger-kernel package, the whole vocabulary on each rank and no smoothed labels"
    fix = f"{install}--train.fused_loss auto   (the loss by chunks gives the same sums)"
    return [Problem(f"train.fused_loss = liger, but {why}", expected, fix)]


def _obstacle(device: str, tp: int, label_smoothing: float) -> str:
    if importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("triton") is None:
        return "liger-kernel is not installed"
    import triton

    if device != "cuda" and not triton.knobs.runtime.interpret:
        return "its kernels run on CUDA only"
    if tp > 1:
        return f"each of {tp} tp ranks has a part of the vocabulary"
    return "it does not report the cross entropy alone if labels are smoothed" if label_smoothing else ""


def fused_sums(model: PreTrainedModel, hidden: Tensor, labels: Tensor, loss: Any, kind: str) -> tuple[Tensor, Tensor]:
    """(what is minimised, the cross entropy alone): scalar sums over the labels that are not -100.

    Args:
        hidden: [tokens, hidden], before the head.
        loss: its `ignored` label and its `z_loss`, as `training.loss.TokenLoss` has them.
        kind: how the model makes its logits (`head.kind_of`).
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    head: Any = model.get_output_embeddings()
    config: Any = model.config
    weight, bias = head.weight, getattr(head, "bias", None)
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    hidden = hidden.to(weight.dtype)
    softcap = config.final_logit_softcapping if kind == "capped" else None
    if kind in ("divided", "multiplied"):
        # The head is linear: a scale of the logits is one of the hidden states, and of a bias.
        scale: Any = model.logit_scale if kind == "multiplied" else 1 / config.logits_scaling
        hidden, bias = hidden * scale, bias * scale if bias is not None else None
    settings = (None, loss.ignored, loss.z_loss, 0.0, "sum", softcap, bool(loss.z_loss), torch.float32)
    total, z_loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, bias, *settings)
    cross_entropy = total.detach() - z_loss.detach() if z_loss is not None else total.detach()
    return total, cross_entropy
