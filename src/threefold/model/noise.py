"""Which ranks share dropout masks, and which draw their own.

Ranks that hold the same activations must drop the same of them. Ranks that hold other tokens (they share the sequence)
or other heads must not, or the noise of one would repeat on the next. In a run the noise belongs to a micro-batch,
wherever and however often it is computed. A forward outside a run leaves no trace in it.
"""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from threefold.mesh.mesh import Mesh

_Piece = TypeVar("_Piece")
# Not its hooks, which transformers puts on modules in their first forward. FSDP2 puts others there, which must stay.
_OF_TORCH = {name for name in vars(nn.Module()) if not name.startswith("_forward_")}


def places(mesh: Mesh, sequence_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The inputs of the seed of this rank's random numbers: its rows, its part of them, its own tokens.

    Args:
        sequence_group: the tp ranks that share the sequence between the split parts, if they do.
    """
    return mesh.dp_rank, *places_in_row(mesh, sequence_group)


def places_in_row(mesh: Mesh, sequence_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Like `places`, without the rows: for random numbers that belong to rows and not to ranks."""
    tokens = (mesh.tp_rank,) if sequence_group is not None else ()
    return mesh.cp_rank, *tokens


class Keyed(list[_Piece]):
    """Micro-batches that seed this rank's random numbers when they are taken in turn: all that torch's generators draw.

    So they have the same noise each time, and it does not depend on what was drawn before.
    """

    def __init__(
        self, pieces: Iterable[_Piece], seeds: Sequence[int], device: torch.device
    ) -> None:
        """Args: `seeds`: one for each piece, below 2**63."""
        super().__init__(pieces)
        self._seeds, self._device = seeds, device

    def __iter__(self) -> Iterator[_Piece]:
        for piece, seed in zip(super().__iter__(), self._seeds, strict=True):
            torch.default_generator.manual_seed(seed)
            if self._device.type == "cuda":
                torch.cuda.manual_seed(seed)
            yield piece


@contextmanager
def of_heads(tp_rank: int, device: torch.device) -> Iterator[None]:
    """Random numbers of this tp rank's own inside, which depend on those outside, and leave them in step.

    A layer that is computed again finds the same ones: the seed is drawn from the state that recomputation restores.
    """
    seed = int(torch.randint(2**62, ()).item())  # on the CPU: no wait for a device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + tp_rank)
        yield


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Afterwards torch, numpy and Python draw what they would have drawn."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def without_trace(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards buffers, attributes (a counter of calls, a length seen) and random numbers are as they were.

    Not the weights, which a forward does not write.
    """
    snapshots = [
        (own, _snapshot(own))
        for module in model.modules()
        for own in (module._buffers, vars(module))
    ]
    try:
        with preserved(device):
            yield
    finally:
        with torch.no_grad():
            for own, before in snapshots:
                _restore(own, before)


def _snapshot(own: dict[str, Any]) -> dict[str, tuple[Any, Any, Any]]:
    """By name: a value, what it holds, and the version of a tensor."""
    values: dict[str, tuple[Any, Any, Any]] = {}
    for name in own.keys() - _OF_TORCH:
        value = own[name]
        if isinstance(value, Tensor):
            values[name] = value, value.detach().clone(), value._version
        else:
            values[name] = (
                value,
                value.copy() if isinstance(value, dict | list | set | deque) else None,
                None,
            )
    return values


def _restore(own: dict[str, Any], before: dict[str, tuple[Any, Any, Any]]) -> None:
    for name in own.keys() - _OF_TORCH - before.keys():
        del own[name]
    for name, (value, holds, version) in before.items():
        if isinstance(value, Tensor):
            if value._version != version:
                value.copy_(holds)
        elif holds is not None:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(holds)
        own[name] = value
