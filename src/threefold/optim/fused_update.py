"""What a fused update is given, and the update by single operations, which is the reference of its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threefold.model.exact.sums import in_blocks
from threefold.optim.exact import update


class Tensors(NamedTuple):
    """What an update reads and writes of one parameter, all of one shape and layout.

    Attributes:
        gradient: float32 or bfloat16.
        mean, square: the moments, float32 or bfloat16; between their reading and writing they are float32.
        copy: bfloat16; None: there is none.
    """

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor | None


class Factors(NamedTuple):
    """Of the parameters of one update, float32 on their device.

    Attributes:
        rates, root_scales: [parameters]: -lr and 1 with the biases of the moments corrected (`exact.update`).
        clip: scalar, of all gradients.
        skip: scalar, 1 where nothing is to change, else 0.
    """

    rates: Tensor
    root_scales: Tensor
    clip: Tensor
    skip: Tensor


def update_by_operations(of_each: Sequence[Tensors], factors: Factors, group: dict[str, Any]) -> None:
    """The update by operations that round once, in the order in which the kernel rounds."""
    goes_on = factors.skip == 0
    for number, each in enumerate(of_each):
        rate, root_scale = factors.rates[number], factors.root_scales[number]
        for parts in in_blocks(*(own for own in each if own is not None)):
            weight, gradient, mean, square = (own.to(torch.float32, copy=True) for own in parts[:4])
            update(weight, gradient * factors.clip, mean, square, rate=rate, root_scale=root_scale, group=group)
            for own, value in zip(parts, (weight, None, mean, square, weight), strict=False):
                if value is not None:
                    own.copy_(value.where(goes_on, own))
