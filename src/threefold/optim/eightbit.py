"""AdamW of torchao, with its moments in 8 bits, in blocks of 256 values (arXiv:2110.02861); an optional package.

A block's values share a scale, so the update of a part of a matrix is not that of the whole: only ranks that hold whole
matrices, dp ranks each with the whole model, compute what one process computes.
"""

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

from threefold.errors import ConfigError


@cache
def adamw_8bit() -> type[torch.optim.Optimizer]:
    """The class; a ConfigError if torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "optimizer.name = adamw_8bit: torchao is not installed",
            expected="torchao, whose optimizer it is",
            fix="pip install 'threefold[torchao]'   (or --optimizer.moments bfloat16, which needs no package)",
        )
    theirs: Any = importlib.import_module("torchao.optim").AdamW8bit

    class AdamW8bit(theirs):  # type: ignore[misc]
        """Theirs, whose rates are numbers between the steps, as of any other optimizer."""

        def step(self, closure: Any = None) -> Any:
            rates = [float(group["lr"]) for group in self.param_groups]
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = torch.tensor(rate)
            try:
                return super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate

    return AdamW8bit
