"""Gradients whose sum has the same bits on any number of data ranks: `train.reduce: exact`.

Sums in floating point depend on their order, and so on how many ranks share the micro-batches; sums of integers do not.
So each micro-batch's gradient is rounded to a multiple of one power of two, in 64 bits, and those are added: over the
micro-batches of a rank, over the shards, over the copies. The power belongs to a unit of parameters (`data_parallel`)
and comes from figures that any number of ranks agrees on: the largest gradient in the global batch's first micro-batch,
which is always dp rank 0's first, on all of its cp and tp ranks. If a later one is more than 2**HEADROOM times larger,
which all ranks find together, the step is computed again with the largest of all. Nothing is scaled by the number of
ranks. Communication of cp and tp ranks in forward and backward is floating point: their number must stay the same.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from threefold.errors import RunError
from threefold.mesh.mesh import Mesh
from threefold.model.collectives import local_part
from threefold.model.gradient_sums import SplitGradients

# Binary places by which a gradient may exceed the first micro-batch's largest before the step is done again.
HEADROOM = 8
# Sums stay below 2**62: one place is the sign's, one is spare.
_PLACES = 62
# The grid of a micro-batch's loss: float64 adds multiples of it exactly up to 2**29.
_LOSS_GRID = 2.0**24
# Bits of a square in [0, 1] that each of two 64-bit sums takes: room for 2**31 numbers on a rank.
_SQUARE_PLACES = 31
# Below the exponent of any float32 but 0.
_NOTHING = -300
# Numbers that are taken together: as many as stay in a core's cache from one operation on them to the next.
_BLOCK = 2**16

_Result = TypeVar("_Result")


class ExactSums:
    """The exact sums of one model's gradients; every rank calls these in the same order."""

    def __init__(self, units: Sequence[FSDPModule], model: nn.Module, mesh: Mesh) -> None:
        """Args: `units`: one module of each unit that FSDP2 shards, over shards alone and not over copies."""
        self._mesh, self._model = mesh, model
        self._places = 0
        self._units = [_Unit(self) for _ in units]
        for module, unit in zip(units, self._units, strict=True):
            if mesh.size("fsdp") > 1:
                module.set_custom_reduce_scatter(unit)
            else:
                module.set_all_reduce_hook(unit.alone)

    @property
    def averaged_over(self) -> int:
        """Nothing is divided by the number of ranks."""
        return 1

    def summand(self, loss: Tensor) -> Tensor:
        """As float64, a multiple of 2**-24, so that sums below 2**29 are exact."""
        return loss.detach().double().mul(_LOSS_GRID).round().div(_LOSS_GRID)

    def norm(self, gradients: SplitGradients) -> Tensor:
        """By sums of integers; NaN if a number is none."""
        split, whole = (
            [*gradients[over_tp, True], *gradients[over_tp, False]] for over_tp in (True, False)
        )
        return exact_norm(split, whole, self._mesh)

    def complete(self, backward: Callable[[], _Result], num_micro_batches: int) -> _Result:
        """Calls `backward`, which goes through a rank's micro-batches, again if need be, and completes the gradients.

        Args:
            num_micro_batches: of this dp rank, as many as of the others.

        Raises:
            RunError: the gradients were others when they were computed again; on every rank.
        """
        summands = num_micro_batches * self._mesh.size("loss")
        self._places = _PLACES - HEADROOM - (summands - 1).bit_length()
        for unit in self._units:
            unit.begin(None)
        result = backward()
        largest, overflows = self._looked_at()
        if overflows:
            self._model.zero_grad(set_to_none=True)
            for unit, own in zip(self._units, largest, strict=True):
                unit.begin(_exponent(own))
            result = backward()
            largest, overflows = self._looked_at()
            if overflows:
                raise RunError(
                    "a step that was computed again had different gradients",
                    expected="the same bits each time: train.reduce exact sums them with a scale that the first gave",
                    fix="--train.reduce fast, and report the model",
                )
        self._finish(largest)
        return result

    def agreed(self, largest: Tensor) -> Tensor:
        """The exponent of a unit's largest gradient in the global batch's first micro-batch."""
        if self._mesh.group("world") is not None:
            first = self._mesh.dp_rank == 0
            largest = (
                largest.nan_to_num(nan=math.inf, posinf=math.inf)
                if first
                else torch.zeros_like(largest)
            )
            self._mesh.all_reduce("world", largest, dist.ReduceOp.MAX)
        return torch.where(largest > 0, _exponent(largest), _NOTHING)

    @property
    def places(self) -> int:
        """Binary places of a sum's unit below the largest gradient's exponent."""
        return self._places

    def _looked_at(self) -> tuple[Tensor, bool]:
        """Each unit's largest gradient over all ranks and micro-batches, and whether one is too large for its sums."""
        units = self._units
        # A unit without any gradient is one on every rank.
        largest = torch.stack([unit.largest for unit in units]).nan_to_num(
            nan=math.inf, posinf=math.inf
        )
        self._mesh.all_reduce("world", largest, dist.ReduceOp.MAX)
        exponents = torch.stack([unit.exponent for unit in units])
        too_large = (
            (largest > 0) & largest.isfinite() & (_exponent(largest) > exponents + HEADROOM)
        )
        return largest, bool(too_large.any()) and bool(largest.isfinite().all())

    def _finish(self, largest: Tensor) -> None:
        for unit, own in zip(self._units, largest, strict=True):
            if unit.sums is None or unit.gradient is None:
                continue
            self._mesh.all_reduce("dp_replicate", unit.sums)
            scale = _power_of_two(unit.exponent - self._places)
            # NaN if one of them was not finite: then nothing is updated.
            nothing = torch.where(own.isfinite(), 0.0, math.nan)
            for sums, gradient in in_blocks(unit.sums, unit.gradient):
                gradient.copy_(sums.double().mul_(scale).add_(nothing))
            unit.sums = None
        _refuse_strangers(self._model, [unit.gradient for unit in self._units])


class _Unit:
    """FSDP2's reduce-scatter of one unit of parameters.

    Attributes:
        largest: absolute value, of all gradients since `begin` on this rank; float32.
        exponent: all gradients up to 2**(exponent + HEADROOM) fit; int64.
        sums: int64 [shard], in units of 2**(exponent - places).
        gradient: [shard], of which FSDP2 has made the parameters' gradients.
    """

    def __init__(self, of: ExactSums) -> None:
        self._of = of
        self.begin(None)

    def begin(self, exponent: Tensor | None) -> None:
        """Before the first micro-batch of a step; without an exponent, that gives it."""
        self.largest = torch.zeros(())
        self._known = exponent is not None
        self.exponent = torch.tensor(_NOTHING) if exponent is None else exponent
        self.sums: Tensor | None = None
        self.gradient: Tensor | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._add(input_tensor, output_tensor, group)

    def alone(self, gradient: Tensor) -> None:
        """In place of the reduction, where the shard is the whole."""
        self._add(gradient, gradient, None)

    def _add(self, whole: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> None:
        own = _largest(whole)
        self.largest = torch.maximum(self.largest, own)
        if not self._known:
            self.exponent = self._of.agreed(own)
            self._known = True
        scale = _power_of_two(self._of.places - self.exponent)
        numbers = torch.empty(whole.shape, dtype=torch.int64, device=whole.device)
        for part, number in in_blocks(whole, numbers):
            number.copy_(part.double().mul_(scale).round_())
        if group is not None:
            # gloo implements reduce-scatter by an all-reduce too, after a copy.
            dist.all_reduce(numbers, group=group)
            numbers = numbers.view(group.size(), -1)[group.rank()].clone()
        if self.sums is None:
            # FSDP2 adds what follows to this, which `_finish` replaces.
            self.sums, self.gradient = numbers, shard
        else:
            if self.sums.shape != numbers.shape:
                raise RunError(
                    f"micro-batches of one step gave gradients of {self.sums.numel()} and {numbers.numel()} numbers",
                    expected="every trained parameter in every micro-batch: otherwise sums mix different parameters",
                    fix="--train.reduce fast",
                )
            self.sums += numbers
        if group is not None:
            shard.zero_()


@torch.no_grad()
def exact_norm(split: Sequence[Tensor], whole: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """The norm of what the shards hold, by sums of integers; NaN if a number is none.

    Args:
        split: of which tp ranks hold other parts.
        whole: of which they hold the same.
    """
    # A shard may have none of a small parameter.
    every = [each for each in (*split, *whole) if each.numel()]
    largest = (
        torch.zeros(()) if not every else torch.stack([_largest(each) for each in every]).max()
    )
    largest = largest.nan_to_num(nan=math.inf, posinf=math.inf)
    mesh.all_reduce("world", largest, dist.ReduceOp.MAX)
    exponent = _exponent(largest)
    sums = torch.stack([_square_sums(own, _power_of_two(-exponent)) for own in (split, whole)])
    mesh.all_reduce("fsdp", sums)
    of_split, of_whole = sums
    mesh.all_reduce("tp", of_split)
    upper, lower = ((of_split + of_whole).double() / 2.0**_SQUARE_PLACES).unbind()
    norm = (upper + lower / 2.0**_SQUARE_PLACES).sqrt() * _power_of_two(exponent)
    return torch.where(largest.isfinite(), norm, math.nan).float()


def _square_sums(gradients: Sequence[Tensor], scale: Tensor) -> Tensor:
    """[2] int64: what the squares of the scaled numbers have above and below `_SQUARE_PLACES` binary places."""
    sums = torch.zeros(2, dtype=torch.int64)
    places = 2.0**_SQUARE_PLACES
    for gradient in gradients:
        for (part,) in in_blocks(gradient):
            squares = part.double().mul_(scale).square_().mul_(places)
            upper = squares.floor()
            lower = squares.sub_(upper).mul_(places).round_()
            sums += torch.stack([upper.to(torch.int64).sum(), lower.to(torch.int64).sum()])
    return sums


def _largest(values: Tensor) -> Tensor:
    """The largest absolute value; NaN if there is one."""
    least, most = values.aminmax()
    return torch.maximum(least.abs(), most.abs())


def in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same numbers of some tensors of one shape, a block after the other."""
    if all(each.is_contiguous() for each in tensors):
        tensors = tuple(each.view(-1) for each in tensors)
    return zip(*(each.split(_BLOCK) for each in tensors), strict=True)


def _exponent(values: Tensor) -> Tensor:
    """The least e with |value| < 2**e, int64; 0 for non-finite values."""
    return torch.frexp(values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)).exponent.long()


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as float64, made of its bits: no function's rounding is asked. For |exponent| < 1000."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _refuse_strangers(model: nn.Module, gradients: Sequence[Tensor | None]) -> None:
    """RunError if a parameter has a gradient that is not a part of a unit's, and so was not summed."""
    summed = {each.untyped_storage().data_ptr() for each in gradients if each is not None}
    for name, parameter in model.named_parameters():
        own = None if parameter.grad is None else local_part(parameter.grad)
        if own is not None and own.numel() and own.untyped_storage().data_ptr() not in summed:
            raise RunError(
                f"the gradient of {name} was not summed exactly",
                expected="gradients that FSDP2 makes of what it reduced, as in torch 2.11 to 2.13",
                fix="--train.reduce fast",
            )
