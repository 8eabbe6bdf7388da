"""What must have happened before the first step, so that a run that goes on adds up as one that was never stopped.

torch's DistributedDataParallel lays out its buckets anew after the first backward, in the order in which the gradients
came. Where a gradient lies in a bucket decides in which order the ranks' parts of it are added. Without this a resumed
run would make its first step with other sums than the run that went on, on more than two ranks.
"""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from threefold.mesh.mesh import Mesh
from threefold.model.build import ParallelModel
from threefold.training.step import forward_sums, token_loss_of


def settle_buckets(model: ParallelModel, mesh: Mesh, *, rows: int, seq_len: int) -> None:
    """One backward over [rows, seq_len] tokens, as a micro-batch has; nothing of it stays. Every rank calls it."""
    if not isinstance(model.forward, DistributedDataParallel):
        return
    tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(seq_len).expand(rows, -1)}
    with (
        torch.random.fork_rng(devices=[mesh.device] if mesh.device.type == "cuda" else []),
        forward_sums(model, batch, mesh, token_loss_of(model, mesh)) as sums,
    ):
        sums.objective.backward()
    model.module.zero_grad(set_to_none=True)
