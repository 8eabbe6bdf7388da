"""Which tp ranks draw the same dropout, and which their own.

Ranks that hold the same activations must drop the same of them. Ranks that hold other tokens (they share the sequence)
or other heads must not, or the noise of one would repeat on the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from threefold.mesh.mesh import Mesh


def places(mesh: Mesh, sequence_group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """What the seed of this rank's random numbers depends on: its rows, its part of them, its own tokens.

    Args:
        sequence_group: the tp ranks that share the sequence between the split parts, if they do.
    """
    tokens = (mesh.tp_rank,) if sequence_group is not None else ()
    return mesh.dp_rank, mesh.cp_rank, *tokens


@contextmanager
def of_heads(tp_rank: int, device: torch.device) -> Iterator[None]:
    """Random numbers of this tp rank's own inside, which depend on those outside, and leave them in step.

    A layer that is computed again finds the same ones: the seed is drawn from the state that recomputation restores.
    """
    seed = int(torch.randint(2**62, ()).item())  # on the CPU: no wait for a device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + tp_rank)
        yield
