"""Layers compiled one at a time: each layer becomes one graph, shared by the layers of its kind.

Compiling layer by layer takes seconds where a whole model takes minutes, and leaves the wrappers of data parallelism
and the loss as they are. A layer is recompiled if an assumption of its graph no longer holds: another
kind of layer, rows of another length (from then on of any length), evaluation without gradients.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from threefold.mesh.environment import keep_compiled
from threefold.model.load import layers_of

# Beyond, torch runs a layer uncompiled: kinds of layers x (training, evaluation) x (one length, any length), and more.
_MOST_GRAPHS = 32
# More often than that a layer is hardly compiled again for a reason of the above.
MANY = 8


def waiting_layers(model: nn.Module, *, dtype: torch.dtype, device: str) -> list[nn.Module]:
    """The layers that would wait for the device each time, if they were compiled; those of experts in float32 on CUDA.

    In a graph transformers multiplies only bfloat16 by grouped products, and else asks for the tokens of each expert.
    """
    if dtype != torch.float32 or device != "cuda":
        return []
    # As transformers marks a class of experts.
    return [
        each
        for each in layers_of(model)
        if any(hasattr(part, "_apply_gate") for part in each.modules())
    ]


def compile_layers(
    model: nn.Module, *, recomputed_around: bool = False, left_out: Collection[nn.Module] = ()
) -> None:
    """Compiles each layer, in place, at its first call; what was compiled before is found in this user's cache.

    Args:
        left_out: layers that stay as they are.
        recomputed_around: the recomputation of a whole layer stays outside its graph. torch cannot compile it with
            weights that tp has split, nor what sends a layer's inputs to the host.
    """
    from torch._dynamo import config

    keep_compiled()
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    # DDP reduces in the backward of each layer as it is; splitting a layer's graph by buckets gains nothing.
    config.optimize_ddp = False
    # Notes that tp's projections make for one another must not be repeated when a layer is recomputed.
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for layer in (each for each in layers_of(model) if each not in left_out):
        if recomputed_around and getattr(layer, "gradient_checkpointing", False):
            _recompute_around(layer)
        else:
            layer.compile()


def _recompute_around(layer: Any) -> None:
    again, layer.gradient_checkpointing = layer._gradient_checkpointing_func, False
    inner = torch.compile(layer.forward)

    def forward(*arguments: Any, **named: Any) -> Any:
        return (
            again(partial(inner, **named), *arguments)
            if layer.training
            else inner(*arguments, **named)
        )

    layer.forward = forward


class Recompiled:
    """Counts recompilations in this process, and reports once whatever is recompiled too often."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Args: `say`: prints a line."""
        self._say, self._said = say, set[Any]()

    def look(self) -> int:
        """Recompilations so far; names what was compiled again more than `MANY` times."""
        by_code = _reasons()
        for code, (times, reason) in by_code.items():
            if times > MANY and code not in self._said:
                self._said.add(code)
                why = " ".join(reason.split())
                self._say(
                    f"{code.co_qualname} was compiled again {times} times, each of which takes seconds or more; "
                    f"the last time because of {why}. --train.compile false trains without"
                )
        return sum(times for times, _ in by_code.values())


def _reasons() -> dict[Any, tuple[int, str]]:
    """The code of each function that dynamo has compiled again: how often, and the last reason.

    Each time it notes one reason for each graph that it has of the function, "GRAPH: REASON".
    """
    noted: Any = getattr(sys.modules.get("torch._dynamo.utils"), "guard_failures", {})
    by_code = {}
    for code, reasons in noted.items():
        graphs = Counter(reason.partition(":")[0] for reason in reasons)
        by_code[code] = max(graphs.values()), reasons[-1].partition(":")[2]
    return by_code
