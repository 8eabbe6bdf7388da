"""AdamW whose two moments are kept in bfloat16: half of their memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from threefold.model.collectives import local_part

MOMENTS = ("exp_avg", "exp_avg_sq")
# Size of parameters that step together: their moments are in float32 meanwhile.
_TOGETHER_BYTES = 64 * 1024**2


class NarrowAdamW(torch.optim.AdamW):
    """torch's AdamW in float32, some parameters at a time; between steps the moments are rounded to bfloat16.

    With `found_inf` set, a step changes nothing, as with torch's fused one.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all parameters."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = {
            parameter: parameter.grad for parameter in every if parameter.grad is not None
        }
        for parameter in gradients:
            parameter.grad = None
        for together in _pieces(list(gradients)):
            for parameter in together:
                parameter.grad = gradients[parameter]
                self._keep(parameter, torch.float32)
            super().step(closure)
            for parameter in together:
                parameter.grad = None
                self._keep(parameter, torch.bfloat16)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def _keep(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        state: dict[str, Tensor] = self.state[parameter]
        for name in MOMENTS:
            if name in state:
                state[name] = state[name].to(dtype)


def _pieces(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    piece: list[nn.Parameter] = []
    for parameter in parameters:
        if (
            piece
            and sum(local_part(each).nbytes for each in [*piece, parameter]) > _TOGETHER_BYTES
        ):
            yield piece
            piece = []
        piece.append(parameter)
    if piece:
        yield piece
