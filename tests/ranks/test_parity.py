"""Same curve: every mesh follows the hand-written single-process loop on the same global batches."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ranks.reference import (
    PARITY,
    TINY_LLAMA,
    compare_trainings,
    make_batches,
    require,
    train_alone,
)
from ranks.spawn import run_ranks
from threefold.check.compare import Training

STEPS, ROWS, SEQ_LEN, LR, CLIP, DECAY = 20, 8, 16, 3e-3, 1.0, 0.1

MESHES = [
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (2, 2, 1, 1),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    *(
        pytest.param(sizes, marks=pytest.mark.ranks)
        for sizes in ((1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2), (1, 1, 4, 2))
    ),
]
# On these the tp ranks share the sequence between the split parts, which they do not by default on a CPU.
SHARED = {(2, 1, 1, 2), (1, 2, 2, 2), (1, 1, 4, 2)}


def train_on_mesh(
    sizes: tuple[int, int, int, int],
    model_config: dict[str, Any],
    micro_batch: int,
    ep: int = 1,
    scatter: bool | str = "auto",
) -> Any:
    """Losses, gradient norms and the first step's clipped gradients on one rank of a mesh."""
    import torch

    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep, mean_loss

    replicate, shard, cp, tp = sizes
    mesh = init_mesh(replicate * shard, dp_shard=shard, cp=cp, tp=tp, device="cpu")
    config = Config.model_validate(
        {
            "model": {"config": model_config},
            "optimizer": {"lr": LR, "weight_decay": DECAY},
            "train": {"grad_clip": CLIP},
            "mesh": {"ep": ep, "sequence_parallel": scatter},
        }
    )
    model = build(config, load.read_config(config.model), mesh)
    optimizer = build_optimizer(model.module, config.optimizer)
    first: dict[str, torch.Tensor] = {}
    step_of_optimizer = optimizer.step

    def capture_then_step() -> None:
        if not first:
            for name, parameter in model.module.named_parameters():
                gradient = parameter.grad
                assert gradient is not None, name
                first[name] = (
                    gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                ).clone()
        step_of_optimizer()

    optimizer.step = capture_then_step  # type: ignore[method-assign]
    step = TrainStep(model, optimizer, grad_clip=CLIP)
    losses, norms = [], []
    for batch in make_batches(steps=STEPS, rows=ROWS, seq_len=SEQ_LEN):
        own = {name: rows[mesh.dp_rank :: mesh.dp_size] for name, rows in batch.items()}
        count = len(own["labels"])
        pieces = [
            {name: rows[start : start + micro_batch] for name, rows in own.items()}
            for start in range(0, count, micro_batch)
        ]
        result = step.run(pieces, lr=LR)
        losses.append(mean_loss(result, mesh))
        norms.append(result.grad_norm.item())
    return losses, norms, {name: gradient.numpy() for name, gradient in first.items()}


@pytest.fixture(scope="module")
def alone() -> Any:
    batches = make_batches(steps=STEPS, rows=ROWS, seq_len=SEQ_LEN)
    return train_alone(TINY_LLAMA, batches, lr=LR, clip=CLIP, decay=DECAY)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_mesh_follows_one_process(sizes: tuple[int, int, int, int], alone: Any) -> None:
    results = run_ranks(
        train_on_mesh, math.prod(sizes), sizes, TINY_LLAMA, 2, 1, sizes in SHARED or "auto"
    )
    comparison = require(compare_trainings(Training(*results[0]), Training(*alone), PARITY))
    print(f"parity {sizes}: {comparison}")
    assert all(result[0] == results[0][0] for result in results), (
        "ranks disagree about the loss"
    )
