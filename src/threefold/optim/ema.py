"""A moving average of the trained weights, sharded like them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from threefold.checkpoint.state import averaged_name
from threefold.model.collectives import local_part


class Ema:
    """average <- decay x average + (1 - decay) x weight, after each step that updates the weights.

    It begins with the weights as they are. No rank sends anything for it.
    """

    def __init__(self, model: nn.Module, decay: float, *, exact: bool = False) -> None:
        """Args: `exact`: by operations that are rounded one at a time, the same bits for any shards."""
        self._exact = exact
        self._weights = {
            name: each for name, each in model.named_parameters() if each.requires_grad
        }
        self._averages = {name: each.detach().clone() for name, each in self._weights.items()}
        self._decay = decay

    def state(self) -> dict[str, Tensor]:
        """The averages, live, by their names in a checkpoint."""
        return {averaged_name(name): average for name, average in self._averages.items()}

    def resume(self, held: Mapping[str, Any]) -> dict[str, Tensor]:
        """What to read from a checkpoint that holds these names: all of it, or nothing from an older one."""
        return self.state() if any(name in held for name in self.state()) else {}

    @torch.no_grad()
    def begin(self) -> None:
        """Restarts from the present weights."""
        for name, average in self._averages.items():
            local_part(average).copy_(local_part(self._weights[name]))

    @torch.no_grad()
    def update(self, updated: Tensor) -> None:
        """Moves the averages towards the weights; `updated`: 1, or 0 after a step that was skipped, on any device."""
        share = updated * (1 - self._decay)
        for name, average in self._averages.items():
            local = local_part(average)
            share = share.to(local.device)
            if self._exact:
                local.add_((local_part(self._weights[name]) - local).mul_(share))
            else:
                local.lerp_(local_part(self._weights[name]), share)
