"""The arguments of a fused update, and the update by single operations, the reference for its kernel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from threefold.model.exact.sums import in_blocks
from threefold.optim.exact import update


class Tensors(NamedTuple):
    """The tensors of one parameter that an update reads and writes, all of one shape and layout.

    Attributes:
        gradient: float32 or bfloat16.
        mean, square: the moments: float32, bfloat16, or torchao's of 8 bits (`eightbit`), both alike; between their
            reading and writing they are float32.
        copy: bfloat16; None: there is none.
    """

    weight: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    copy: Tensor | None

    @property
    def stored(self) -> list[Any]:
        """The tensors in memory: for 8-bit moments their codes, and at the end their scales and then maps of codes."""
        if not is_traceable_wrapper_subclass(self.mean):
            return list(self)
        parts = [getattr(own, name) for name in ("codes", "scale", "qmap") for own in self[2:4]]
        return [*self[:2], *parts[:2], self.copy, *parts[2:]]


class Factors(NamedTuple):
    """Factors for the parameters of one update, float32 on their device.

    Attributes:
        rates, root_scales: [parameters]: -lr and 1 with the biases of the moments corrected (`exact.update`).
        clip: scalar, of all gradients.
        skip: scalar, 1 where nothing is to change, else 0.
    """

    rates: Tensor
    root_scales: Tensor
    clip: Tensor
    skip: Tensor


def update_by_operations(
    of_each: Sequence[Tensors], factors: Factors, group: dict[str, Any]
) -> None:
    """The update by operations that round once, in the order in which the kernel rounds."""
    goes_on = factors.skip == 0
    for number, each in enumerate(of_each):
        rate = factors.rates[number]
        root_scale = factors.root_scales[number]
        wide = each
        if is_traceable_wrapper_subclass(each.mean):
            if not goes_on:
                continue  # rewritten ones have other scales
            wide = each._replace(mean=each.mean.dequantize(), square=each.square.dequantize())
        for parts in in_blocks(*(own for own in wide if own is not None)):
            weight, gradient, mean, square = (
                own.to(torch.float32, copy=True) for own in parts[:4]
            )
            update(
                weight,
                gradient * factors.clip,
                mean,
                square,
                rate=rate,
                root_scale=root_scale,
                group=group,
            )
            for own, value in zip(parts, (weight, None, mean, square, weight), strict=False):
                if value is not None:
                    own.copy_(value.where(goes_on, own))
        # Of 8 bits; others are the same tensors.
        each.mean.copy_(wide.mean)
        each.square.copy_(wide.square)
