"""What one step sends, counted: no hidden gather of logits, no all-reduce for each parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ranks.reference import TINY_LLAMA, make_batches
from ranks.spawn import run_ranks

LAYERS = 2
KINDS = ("allgather", "reduce_scatter", "alltoall", "allreduce")


def _count(sizes: tuple[int, int, int, int], settings: dict[str, Any]) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep

    replicate, shard, cp, tp = sizes
    mesh = init_mesh(replicate * shard, dp_shard=shard, cp=cp, tp=tp, device="cpu")
    config = Config.model_validate({"model": {"config": TINY_LLAMA}, "mesh": settings})
    model = build(config, load.read_config(config.model), mesh)
    step = TrainStep(model, build_optimizer(model.module, config.optimizer), grad_clip=1.0)
    batches = make_batches(steps=3, rows=4, seq_len=16)
    own = [
        {name: rows[mesh.dp_rank :: mesh.dp_size] for name, rows in batch.items()}
        for batch in batches
    ]
    for batch in own[:2]:  # the first steps also set FSDP up and let DDP arrange its buckets
        step.run([batch], lr=1e-3)
    counts: dict[str, int] = {}

    # Not torch's CommDebugMode: it hands each module a tensor of its own, so that projections no longer share one.
    class Counter(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(
                function
            ):
                name = str(function).split(".")[1].replace("all_", "all")
                kind = next(kind for kind in (*KINDS, name) if kind in name)
                counts[kind] = counts.get(kind, 0) + 1
            return function(*args, **(kwargs or {}))

    with Counter():
        step.run([own[2]], lr=1e-3)
    return counts


# Per step and rank, for two layers. tp: a sum for attention and one for the MLP, forward and backward, one for the
# embedding and one for the gradient of the head's input; two all-reduces of the loss, one of the gradient norm. Where
# tp ranks share the sequence, each of those sums is scattered, and gathered at the entry of the next split part; one
# all-reduce more sums what the norms of the layers know in part. FSDP: layers this small make one unit with the rest,
# gathered and reduced once. cp: keys and values of each layer gathered forward and reduced backward, or four exchanges
# each way. And one gather of what the ranks bring to the step, which counts the target tokens too.
SUMS = 4 * LAYERS + 2
GATHER: dict[str, Any] = {"cp_method": "gather"}
SHARED = {"sequence_parallel": True}
EXPECTED: list[tuple[tuple[int, int, int, int], dict[str, Any], dict[str, int]]] = [
    ((1, 1, 1, 1), GATHER, {}),
    ((1, 1, 1, 2), GATHER, {"allgather": 1, "allreduce": SUMS + 2 + 1}),
    (
        (1, 1, 1, 2),
        SHARED,
        {"allgather": SUMS + 1, "reduce_scatter": SUMS, "allreduce": 2 + 1 + 1},
    ),
    # DDP's one bucket
    ((2, 1, 1, 1), GATHER, {"allgather": 1, "allreduce": 1}),
    # the norm
    ((1, 2, 1, 1), GATHER, {"allgather": 1 + 1, "reduce_scatter": 1, "allreduce": 1}),
    (
        (1, 1, 2, 1),
        GATHER,
        {"allgather": LAYERS + 1 + 1, "reduce_scatter": LAYERS + 1, "allreduce": 1},
    ),
    (
        (1, 1, 2, 1),
        {"cp_method": "ulysses"},
        {"alltoall": 8 * LAYERS, "allgather": 1 + 1, "reduce_scatter": 1, "allreduce": 1},
    ),
    # HSDP adds an all-reduce over the replicas
    ((2, 2, 1, 1), GATHER, {"allgather": 1 + 1, "reduce_scatter": 1, "allreduce": 1 + 1}),
    (
        (1, 2, 2, 2),
        SHARED,
        {
            "allgather": SUMS + LAYERS + 1 + 1,
            "reduce_scatter": SUMS + LAYERS + 1,
            "allreduce": 2 + 1 + 1 + 1,
        },
    ),
]


@pytest.mark.parametrize(("sizes", "settings", "expected"), EXPECTED, ids=str)
def test_step_sends_no_more_than_it_must(
    sizes: Any, settings: dict[str, Any], expected: dict[str, int]
) -> None:
    found = run_ranks(_count, math.prod(sizes), sizes, settings)
    assert all(counts == found[0] for counts in found), "ranks send different numbers"
    assert found[0] == expected
