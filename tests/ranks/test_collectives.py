"""What one step sends, counted: no hidden gather of logits, no all-reduce for each parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ranks.reference import TINY_LLAMA, make_batches
from ranks.spawn import run_ranks

LAYERS = 2
KINDS = ("allgather", "reduce_scatter", "alltoall", "allreduce")


def _count(sizes: tuple[int, int, int, int], method: str) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.training.optimizer import adamw
    from threefold.training.step import TrainStep

    replicate, shard, cp, tp = sizes
    mesh = init_mesh(replicate * shard, dp_shard=shard, cp=cp, tp=tp, device="cpu")
    config = Config.model_validate({"model": {"config": TINY_LLAMA}, "mesh": {"cp_method": method}})
    model = build(config, load.read_config(config.model), mesh)
    step = TrainStep(model, adamw(model.module, config.optimizer), mesh, grad_clip=1.0)
    batches = make_batches(steps=3, rows=4, seq_len=16)
    own = [{name: rows[mesh.dp_rank :: mesh.dp_size] for name, rows in batch.items()} for batch in batches]
    for batch in own[:2]:  # the first steps also set FSDP up and let DDP arrange its buckets
        step([batch], lr=1e-3)
    counts: dict[str, int] = {}

    # Not torch's CommDebugMode: it hands each module a tensor of its own, so that projections no longer share one.
    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(function):
                name = str(function).split(".")[1].replace("all_", "all")
                kind = "exchange" if name == "send" else next(kind for kind in (*KINDS, name) if kind in name)
                if kind != "recv_":  # an exchange is a send and a receipt
                    counts[kind] = counts.get(kind, 0) + 1
            return function(*args, **(kwargs or {}))

    with Counter():
        step([own[2]], lr=1e-3)
    return counts


# Per step and rank, for two layers. tp: two ranks exchange twice for attention and twice for the MLP, forward and
# backward, and once each way for the embedding and for the input of the head; two all-reduces of the loss, one of what
# the norms of the layers know in part, one of the gradient norm. FSDP: layers this small make one unit with the rest,
# gathered and reduced once. cp: keys and values of each layer gathered forward and reduced backward, or four exchanges
# each way.
TP = {"exchange": 8 * LAYERS + 4, "allreduce": 2 + 1 + 1}
EXPECTED: dict[tuple[tuple[int, int, int, int], str], dict[str, int]] = {
    ((1, 1, 1, 1), "gather"): {},
    ((1, 1, 1, 2), "gather"): TP,
    # the count of target tokens, and DDP's one bucket
    ((2, 1, 1, 1), "gather"): {"allreduce": 2},
    # the count and the norm
    ((1, 2, 1, 1), "gather"): {"allgather": 1, "reduce_scatter": 1, "allreduce": 2},
    ((1, 1, 2, 1), "gather"): {"allgather": LAYERS + 1, "reduce_scatter": LAYERS + 1, "allreduce": 1},
    ((1, 1, 2, 1), "ulysses"): {"alltoall": 8 * LAYERS, "allgather": 1, "reduce_scatter": 1, "allreduce": 1},
    # HSDP adds an all-reduce over the replicas
    ((2, 2, 1, 1), "gather"): {"allgather": 1, "reduce_scatter": 1, "allreduce": 1 + 2},
    ((1, 2, 2, 2), "gather"): {
        "allgather": LAYERS + 1,
        "reduce_scatter": LAYERS + 1,
        "exchange": TP["exchange"],
        "allreduce": TP["allreduce"] + 2,
    },
}


@pytest.mark.parametrize(("case", "expected"), EXPECTED.items(), ids=str)
def test_step_sends_no_more_than_it_must(case: Any, expected: dict[str, int]) -> None:
    sizes, method = case
    found = run_ranks(_count, math.prod(sizes), sizes, method)
    assert all(counts == found[0] for counts in found), "ranks send different numbers"
    assert found[0] == expected
