"""The Triton kernel of `fused_adamw`: one launch updates many tensors, a block of one tensor in each program.

A table has the tensors' addresses. Products and sums are not fused, and roots and quotients follow IEEE 754
rounding, so the bits are those of single operations.
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
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.uint8: tl.uint8}
# Numbers that share a scale, of moments in 8 bits.
_SCALED = tl.constexpr(256)


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
        values = as_bfloat16(values)
    if left >= BLOCK:
        tl.store(start + places, values)
    else:
        tl.store(start + places, values, mask=places < left)


@triton.jit
def as_bfloat16(values):
    """To the nearest, ties to even, by the bits: Triton's interpreter, which tests run it in, cuts them off."""
    bits = values.to(tl.int32, bitcast=True)
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)
    # A NaN's could run over into a number.
    nearest = tl.where(values != values, 0x7FC00000, nearest)
    return (nearest >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _start(table, row, begin, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(table + row).to(tl.pointer_type(TYPE)), 16) + begin


@triton.jit
def _load_moment(table, row, count, begin, left, MOMENTS: tl.constexpr, BLOCK: tl.constexpr):
    values = _load(_start(table, row, begin, MOMENTS), left, BLOCK)
    if tl.uint8 == MOMENTS:
        numbers = _start(table, row + 5 * count, 0, tl.float32) + values.to(tl.int32)
        scales = _start(table, row + 3 * count, begin // _SCALED, tl.float32)
        places = tl.arange(0, BLOCK)
        values = tl.load(numbers) * tl.load(scales + places // _SCALED, mask=places < left)
    return values


@triton.jit
def _store_moment(
    values, table, row, count, begin, left, MOMENTS: tl.constexpr, BLOCK: tl.constexpr
):
    if tl.uint8 == MOMENTS:
        apart = tl.reshape(values, (BLOCK // _SCALED, _SCALED))
        # The largest, and 1e-12 at least, by their bits, in whose order a NaN is above all numbers.
        scale = tl.reduce(tl.abs(apart).to(tl.int32, bitcast=True), 1, larger)
        scale = tl.maximum(scale, 0x2B8CBCCC).to(tl.float32, bitcast=True)
        places = tl.arange(0, BLOCK // _SCALED)
        scales = _start(table, row + 3 * count, begin // _SCALED, tl.float32)
        tl.store(scales + places, scale, mask=places * _SCALED < left)
        values = tl.reshape(tl.div_rn(apart, tl.expand_dims(scale, 1)), (BLOCK,))
        # The nearest number of an ascending map, which is halved eight times; of two that are as near, the larger.
        numbers = _start(table, row + 5 * count, 0, tl.float32)
        codes = 0
        for bit in tl.static_range(8):
            codes += tl.where(values >= tl.load(numbers + codes + (128 >> bit)), 128 >> bit, 0)
        above = tl.minimum(codes + 1, 255)
        low = tl.load(numbers + codes)
        high = tl.load(numbers + above)
        values = tl.where(values - low >= (high - low) * 0.5, above, codes).to(tl.uint8)
    _store(_start(table, row, begin, MOMENTS), values, left, MOMENTS, BLOCK)


@triton.jit
def larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _update(
    table, sizes, firsts, owners, count, rates, root_scales, clip, skip,
    decay, beta, rest, beta_square, rest_square, eps,
    GRADIENT: tl.constexpr, MOMENTS: tl.constexpr, WITH_COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor.

    Args:
        table: int64 [5, count]: addresses of weights, gradients, means, squares and copies. Of moments in 8 bits [9,
            count]: their scales and maps too, as `Tensors.stored` has them.
        sizes: int64 [count]: numbers of each tensor; firsts: int32 [count]: its first block.
        owners: int32 [blocks]: the tensor of each block.
    """
    if tl.load(skip) != 0.0:
        return
    number = tl.load(owners + tl.program_id(0))
    begin = (tl.program_id(0) - tl.load(firsts + number)).to(tl.int64) * BLOCK
    left = tl.load(sizes + number) - begin
    weights = _start(table, number, begin, tl.float32)
    means = 2 * count + number
    gradient = _load(_start(table, count + number, begin, GRADIENT), left, BLOCK)
    gradient *= tl.load(clip)
    mean = _load_moment(table, means, count, begin, left, MOMENTS, BLOCK)
    mean = mean * beta + gradient * rest
    square = _load_moment(table, means + count, count, begin, left, MOMENTS, BLOCK)
    square = square * beta_square + (gradient * gradient) * rest_square
    root = tl.sqrt_rn(square) * tl.load(root_scales + number) + eps
    update = tl.div_rn(mean, root) * tl.load(rates + number)
    weight = _load(weights, left, BLOCK) * decay + update
    _store(weights, weight, left, tl.float32, BLOCK)
    _store_moment(mean, table, means, count, begin, left, MOMENTS, BLOCK)
    _store_moment(square, table, means + count, count, begin, left, MOMENTS, BLOCK)
    if WITH_COPY:
        _store(
            _start(table, 4 * count + number, begin, tl.bfloat16),
            weight,
            left,
            tl.bfloat16,
            BLOCK,
        )


def update_by_kernel(
    of_each: Sequence[Tensors], factors: Factors, group: dict[str, Any]
) -> None:
    """The update of tensors of one kind in one launch; waits for no device."""
    first, device = of_each[0], of_each[0].weight.device
    sizes, firsts, owners = _blocks(tuple(each.weight.numel() for each in of_each), device)
    stored = [each.stored for each in of_each]
    rows = [
        [0 if own is None else own.data_ptr() for own in row]
        for row in zip(*stored, strict=True)
    ]
    if any(address % _ALIGNED_BYTES for row in rows for address in row):
        return update_by_operations(of_each, factors, group)
    if not len(owners):
        return None
    table = torch.tensor(rows, dtype=torch.int64)
    if device.type != "cpu":
        table = table.pin_memory().to(device, non_blocking=True)
    (beta, beta_square), decay = group["betas"], 1 - group["lr"] * group["weight_decay"]
    _update[(len(owners),)](
        table,
        sizes,
        firsts,
        owners,
        len(of_each),
        *factors,
        decay,
        beta,
        1 - beta,
        beta_square,
        1 - beta_square,
        group["eps"],
        _TYPES[first.gradient.dtype],
        _TYPES[stored[0][2].dtype],
        first.copy is not None,
        _BLOCK,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )
    for each in stored:
        torch.autograd.graph.increment_version(each[:1] + each[2:4])


@lru_cache(maxsize=64)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(sizes, first blocks, the tensor of each block) of tensors of these sizes, on the device."""
    whole = torch.tensor(sizes, dtype=torch.int64)
    counts = (whole + _BLOCK - 1) // _BLOCK
    owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
    return whole.to(device), (counts.cumsum(0) - counts).int().to(device), owners.to(device)
