"""A bfloat16 copy of float32 weights, with which one process computes: no wrapper, and no cast in a micro-batch.

A model's parameters are its float32 weights, as optimizers, checkpoints, averages and exports see them. While it
computes (`in_place`), its modules hold the copies instead. Backward leaves each micro-batch's gradient in a copy, in
bfloat16 (from torch 2.15 on, one computed in float32 stays float32), from where it moves to the weight: unchanged
while it is the only one, in float32 from the second on. That is the sum that FSDP2 makes with
`reduce_dtype=float32`, bit for bit.

An optimizer that writes the copies beside the weights reports it (`note_written`). Copies of weights changed by
anything else, by torch's version counters of tensors, are written again before the next forward.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from threefold.errors import RunError
from threefold.model.weight_check import parameters_named


class WorkingCopy:
    """The copies of one model's weights; made when they are first needed, on the weights' device."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, kept: Collection[str]) -> None:
        """Args: `kept`: names of the parameters that stay float32 in computing too."""
        self._model = model
        self._dtype = dtype
        self._kept = frozenset(kept)
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._versions: dict[nn.Parameter, int] = {}
        # Where the modules have them, tied ones several times.
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._inside = 0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with its copies; backward belongs inside too."""
        if not self._inside:
            self.refresh()
            for parameters, name, weight in self._places:
                parameters[name] = self._copies[weight]
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                for parameters, name, weight in self._places:
                    parameters[name] = weight

    @torch.no_grad()
    def refresh(self) -> None:
        """Writes the copies of weights that were changed since they were last written."""
        if not self._places:
            self._make()
        stale = [
            weight for weight, version in self._versions.items() if weight._version != version
        ]
        if stale:
            torch._foreach_copy_([self._copies[weight] for weight in stale], stale)
            self.note_written(stale)
        for weight, copy in self._copies.items():
            copy.requires_grad_(weight.requires_grad)

    def copy_of(self, weight: nn.Parameter) -> Tensor | None:
        """The copy to be written beside a weight; None of one that computes in float32."""
        if not self._places:
            self.refresh()
        copy = self._copies.get(weight)
        return None if copy is None else copy.detach()

    def note_written(self, weights: Iterable[nn.Parameter]) -> None:
        """The copies of these weights are those of their present values."""
        for weight in weights:
            if weight in self._versions:
                self._versions[weight] = weight._version

    def forget(self) -> None:
        """Any weight may have been changed, in ways that torch does not count (`.data`, kernels of others)."""
        self._versions = dict.fromkeys(self._versions, -1)

    @torch.no_grad()
    def refuse_stale(self) -> None:
        """RunError if a copy that counts as written is not that of its weight; waits for the device."""
        self.refresh()
        names = {weight: name for name, weight in self._model.named_parameters()}
        bits = torch.int16
        for weight, copy in self._copies.items():
            if not torch.equal(weight.to(self._dtype).view(bits), copy.view(bits)):
                raise RunError(
                    f"the bfloat16 copy of {names[weight]} is not that of its float32 weight",
                    expected="weights changed in ways that torch counts: a step would compute with the old weights",
                    fix="with torch.no_grad(): parameter.copy_(...)   (in place of parameter.data)",
                )

    def _make(self) -> None:
        kept = parameters_named(self._model, self._kept)
        for module in self._model.modules():
            for name, weight in module._parameters.items():
                if weight is None or weight in kept or weight.dtype != torch.float32:
                    continue
                if weight not in self._copies:
                    copy = nn.Parameter(torch.empty_like(weight, dtype=self._dtype))
                    copy.register_post_accumulate_grad_hook(partial(_hand_over, weight))
                    if torch.__version__ >= "2.15":
                        copy.grad_dtype = None  # as FSDP2's parameters from there on
                    self._copies[weight] = copy
                    self._versions[weight] = -1
                    weight.grad_dtype = None  # its gradient may be in bfloat16
                self._places.append((module._parameters, name, weight))


def _hand_over(weight: nn.Parameter, copy: Tensor) -> None:
    """Adds a micro-batch's gradient to the weight's."""
    gradient, copy.grad = copy.grad, None
    weight.grad = gradient if weight.grad is None else weight.grad.float().add_(gradient)
