"""The Triton kernel of `fused_adamw`: one launch updates many tensors, a block of one tensor in each program.

A table has the tensors' addresses. Products and sums are not fused, and roots and quotients are rounded as IEEE 754
says, so the bits are those of single operations.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton looks up annotations of a kernel in its own language.

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from threefold.optim.fused_update import Factors, Tensors, update_by_operations

# Numbers that a program updates: 8 for each thread of 8 warps, which reads 16 or 32 bytes of each tensor at once.
_BLOCK, _WARPS = 2048, 8
_ALIGNED_BYTES = 16
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _load(start, left, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    # The last block of a tensor alone needs a mask, which would keep the others from reading whole vectors.
    if left >= BLOCK:  # noqa: SIM108
        values = tl.load(start + places)
    else:
        values = tl.load(start + places, mask=places < left, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _store(start, values, left, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    if tl.bfloat16 == TYPE:
        values = _as_bfloat16(values)
    if left >= BLOCK:
        tl.store(start + places, values)
    else:
        tl.store(start + places, values, mask=places < left)


@triton.jit
def _as_bfloat16(values):
    """To the nearest, ties to even, by the bits: Triton's interpreter, which tests run it in, cuts them off."""
    bits = values.to(tl.int32, bitcast=True)
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)
    nearest = tl.where(values != values, 0x7FC00000, nearest)  # a NaN's could run over into a number
    return (nearest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _start(table, row, begin, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(table + row).to(tl.pointer_type(TYPE)), 16) + begin


@triton.jit
def _update(
    table, sizes, firsts, owners, count, rates, root_scales, clip, skip,
    decay, beta, rest, beta_square, rest_square, eps,
    GRADIENT: tl.constexpr, MOMENTS: tl.constexpr, WITH_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor.

    Args:
        table: int64 [5, count]: addresses of weights, gradients, means, squares and copies.
        sizes: int64 [count]: numbers of each tensor; firsts: int32 [count]: its first block.
        owners: int32 [blocks]: the tensor of each block.
    """
    if tl.load(skip) != 0.0:
        return
    number = tl.load(owners + tl.program_id(0))
    begin = (tl.program_id(0) - tl.load(firsts + number)).to(tl.int64) * BLOCK
    left = tl.load(sizes + number) - begin
    weights = _start(table, number, begin, tl.float32)
    gradients = _start(table, count + number, begin, GRADIENT)
    means = _start(table, 2 * count + number, begin, MOMENTS)
    squares = _start(table, 3 * count + number, begin, MOMENTS)
    gradient = _load(gradients, left, BLOCK) * tl.load(clip)
    mean = _load(means, left, BLOCK) * beta + gradient * rest
    square = _load(squares, left, BLOCK) * beta_square + (gradient * gradient) * rest_square
    root = tl.sqrt_rn(square) * tl.load(root_scales + number) + eps
    weight = _load(weights, left, BLOCK) * decay + tl.div_rn(mean, root) * tl.load(rates + number)
    _store(weights, weight, left, tl.float32, BLOCK)
    _store(means, mean, left, MOMENTS, BLOCK)
    _store(squares, square, left, MOMENTS, BLOCK)
    if WITH_COPY:
        copies = _start(table, 4 * count + number, begin, tl.bfloat16)
        _store(copies, weight, left, tl.bfloat16, BLOCK)


def update_by_kernel(of_each: Sequence[Tensors], factors: Factors, group: dict[str, Any]) -> None:
    """The update of tensors of one kind in one launch; waits for no device."""
    first, device = of_each[0], of_each[0].weight.device
    sizes, firsts, owners = _blocks(tuple(each.weight.numel() for each in of_each), device)
    rows = [[0 if own is None else own.data_ptr() for own in row] for row in zip(*of_each, strict=True)]
    if any(address % _ALIGNED_BYTES for row in rows for address in row):
        return update_by_operations(of_each, factors, group)
    if not len(owners):
        return None
    table = torch.tensor(rows, dtype=torch.int64)
    if device.type != "cpu":
        table = table.pin_memory().to(device, non_blocking=True)
    (beta, beta_square), decay = group["betas"], 1 - group["lr"] * group["weight_decay"]
    _update[(len(owners),)](
        *(table, sizes, firsts, owners, len(of_each), *factors),
        *(decay, beta, 1 - beta, beta_square, 1 - beta_square, group["eps"]),
        *(_TYPES[first.gradient.dtype], _TYPES[first.mean.dtype], first.copy is not None, _BLOCK),
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    for each in of_each:
        torch.autograd.graph.increment_version(each[:1] + each[2:4])


@lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(sizes, first blocks, the tensor of each block) of tensors of these sizes, on the device."""
    whole = torch.tensor(sizes, dtype=torch.int64)
    counts = (whole + _BLOCK - 1) // _BLOCK
    owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
    firsts = (counts.cumsum(0) - counts).int()
    return whole.to(device), firsts.to(device), owners.to(device)
