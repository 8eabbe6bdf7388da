"""What a rank holds and sends in a step, on real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def held_and_sent(
    sizes: dict[str, int], configs: Sequence[Any], *, rows: int, batches: int
) -> list[tuple[int, dict[Any, Any]]]:
    """(most bytes alive, what was sent) of this rank for each config: of a step that is not the first."""
    import torch
    from torch.utils._pytree import tree_leaves

    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.plan.live_tensors import LiveTensors
    from threefold.run.plan_trace import SentBytes
    from threefold.training.step import TrainStep

    mesh, found = init_mesh(**sizes, device="cpu"), []
    for config in configs:
        seq_len = config.data.seq_len
        model = build(config, load.read_config(config.model), mesh)
        optimizer = build_optimizer(
            model.module, config.optimizer, exact=config.train.reduce == "exact"
        )
        step = TrainStep(model, optimizer, grad_clip=1.0)
        ids = torch.zeros(rows, seq_len, dtype=torch.int64)
        batch = {
            "input_ids": ids,
            "labels": ids.clone(),
            "position_ids": torch.arange(seq_len).expand_as(ids),
        }
        step.run([batch] * batches, lr=1e-4)
        moments = [
            each
            for each in tree_leaves([*optimizer.state.values()])
            if isinstance(each, torch.Tensor)
        ]
        tensors = [*model.module.parameters(), *model.module.buffers(), *moments]
        with LiveTensors(tensors) as memory, SentBytes(mesh) as sent:
            step.run([batch] * batches, lr=1e-4)
        found.append((memory.peak, sent.found))
        del model, optimizer, step, moments, tensors
    return found
