"""Triton kernels of the cross entropy: a chunk's logits are read twice, and their gradient is written once.

They compute what `loss` computes by operations of torch. A program reads one row of logits, so that its bits
do not depend on the rows beside it. The head's products stay torch's.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton looks up annotations of a kernel in its own language.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from threefold.optim.fused_kernel import as_bfloat16, larger

# Numbers of a row that a program reads at once: 16 for each thread of 8 warps.
_BLOCK = 4096
# Products and sums may be fused, whatever a version of Triton does by default.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


@triton.jit
def _sums(logits, largest_of, logs, totals, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    start = logits + row * width
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for begin in range(0, width, BLOCK):
        inside = begin + places < width
        values = tl.load(start + begin + places, mask=inside, other=-float("inf")).to(
            tl.float32
        )
        largest = tl.maximum(largest, values)
    most = tl.reduce(largest, 0, larger)
    shares = tl.full((BLOCK,), 0.0, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, width, BLOCK):
        inside = begin + places < width
        values = tl.load(start + begin + places, mask=inside, other=-float("inf")).to(
            tl.float32
        )
        shares += tl.exp(values - most)
        total += tl.where(inside, values, 0.0)
    tl.store(largest_of + row, most)
    tl.store(logs + row, tl.log(tl.reduce(shares, 0, _sum)))
    tl.store(totals + row, tl.reduce(total, 0, _sum))


@triton.jit
def _sum(one, other):
    return one + other


@triton.jit
def _gradients(
    logits, gradients, largest_of, logs, targets, width, z_factor, spread, at_target,
    NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.load(largest_of + row)
    log = tl.load(logs + row)
    inside = places < width
    values = tl.load(logits + row * width + places, mask=inside, other=0.0).to(tl.float32)
    values = tl.exp(values - largest - log) * (1 + z_factor * (largest + log)) - spread
    values = tl.where(places == tl.load(targets + row), values - at_target, values)
    tl.store(
        gradients + row * width + places, as_bfloat16(values) if NARROW else values, mask=inside
    )


def row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of logits [tokens, width], whole in memory, float32.

    Returns:
        [2, tokens]: its largest number, and the log of the sum of exp(logits - that); and its sum, [tokens].
    """
    largest, logs, totals = sums = torch.empty(3, len(logits), device=logits.device)
    if len(logits):
        _sums[(len(logits),)](logits, largest, logs, totals, logits.shape[1], _BLOCK, **OPTIONS)
    return sums[:2], totals


def gradients(
    logits: Tensor,
    largest: Tensor,
    logs: Tensor,
    targets: Tensor,
    *,
    z_loss: float,
    spread: float,
    at_target: float,
    dtype: torch.dtype,
) -> Tensor:
    """exp(logits - n) * (1 + 2 z_loss n) - spread, where n is largest + logs, and at a row's target - at_target more.

    Args:
        logits: [tokens, width], whole in memory; largest, logs: float32 [tokens].
        targets: int64 [tokens], a place in the row, or -1.
        dtype: of the result, [tokens, width].
    """
    tokens, width = logits.shape
    gradient = torch.empty_like(logits, dtype=dtype)
    if tokens:
        _gradients[tokens, triton.cdiv(width, _BLOCK)](
            logits,
            gradient,
            largest,
            logs,
            targets,
            width,
            2 * z_loss,
            spread,
            at_target,
            dtype == torch.bfloat16,
            _BLOCK,
            **OPTIONS,
        )
    return gradient
