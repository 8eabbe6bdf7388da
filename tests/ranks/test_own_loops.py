"""A loop of one's own on every mesh is the loop in one process: numbers, gradients, logits, evaluation, resuming."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ranks import loops
from ranks.reference import STRICT, TINY_LLAMA, compare_curves, require
from ranks.spawn import run_ranks
from threefold.check.compare import Bound, compare_tensors

pytestmark = pytest.mark.ranks

MESHES = [
    {"dp": 2},
    {"dp": 2, "dp_shard": 2},
    {"tp": 2},
    {"cp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
]
KINDS = ("default", "weighted", "hidden", "preference")
# Experts whose routers have a loss of their own, which is normalised apart; a vocabulary that tp does not divide.
EXPERTS = {
    **TINY_LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
EXPERTS |= {
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}


def _curves(sizes: dict[str, int]) -> dict[str, Any]:
    import threefold

    mesh = threefold.init_mesh(**sizes)
    found = {kind: loops.curve(mesh, kind) for kind in KINDS}
    found["at once"] = loops.curve(mesh, "weighted", micro_batch=None)
    # Layers computed again in backward, and tp ranks that share the sequence between them.
    shared: dict[str, Any] = {"seq_len": loops.SEQ_LEN, "activation_checkpointing": "full"}
    found["shared"] = loops.curve(mesh, "preference", **shared)
    found["hidden, shared"] = loops.curve(mesh, "hidden", **shared)
    found["experts"] = loops.curve(mesh, "weighted", EXPERTS)
    mesh.close()
    return found


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_ranks(_curves, 1, {})[0]


# Shards, and all axes together, are always run; each other axis alone with the long cases.
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, marks=pytest.mark.long if len(sizes) == 1 else ())
        for sizes in MESHES
    ],
    ids=str,
)
def test_every_mesh_follows_one_process(sizes: dict[str, int], alone: Any) -> None:
    ranks = run_ranks(
        _curves, math.prod(size for axis, size in sizes.items() if axis != "dp_shard"), sizes
    )
    for kind, (numbers, gradients, _, _) in alone.items():
        found_numbers, found_gradients, _, _ = ranks[0][kind]
        assert found_numbers[0][0] == pytest.approx(numbers[0][0], abs=1e-6, rel=1e-6), kind
        require(compare_curves(found_numbers, numbers), kind)
        require(compare_tensors(STRICT, found_gradients, gradients), kind)
        assert all(rank[kind][0] == found_numbers for rank in ranks), kind
        assert all(rank[kind][3] == ranks[0][kind][3] for rank in ranks), kind
    assert (abs(ranks[-1]["default"][2] - ranks[0]["default"][2]) == 0).all(), (
        "logits are whole on every rank"
    )
    logits = Bound("logits", 1e-3, "three updates carry roundings on", relative=False)
    require(compare_tensors(logits, {"": ranks[0]["default"][2]}, {"": alone["default"][2]}))


def test_micro_batches_do_not_change_a_loss_of_ones_own(alone: Any) -> None:
    for a, b in zip(alone["weighted"][0], alone["at once"][0], strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def _random_numbers(sizes: dict[str, int]) -> Any:
    """The next random numbers of this rank after load_model, and two losses of a model that drops activations."""
    import torch

    import threefold

    torch.manual_seed(torch.distributed.get_rank())
    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(
        config={**TINY_LLAMA, "attention_dropout": 0.3}, mesh=mesh, admission="off"
    )
    drawn = torch.rand(3).tolist()
    own = loops.share(loops.batches()[0], mesh)
    del own["weights"]
    step = threefold.TrainStep(model, lr=1e-3)
    losses = [step(own).loss for _ in range(2)]
    copies = [loops.whole(parameter).sum().item() for parameter in model.parameters()]
    mesh.close()
    return drawn, losses, copies


def test_tp_ranks_draw_the_same_and_data_ranks_their_own() -> None:
    (first, *_), (second, *_), (third, *_), _ = ranks = run_ranks(
        _random_numbers, 4, {"dp": 2, "tp": 2}
    )
    assert first == second != third
    assert all(rank[1:] == ranks[0][1:] for rank in ranks)


def _uneven(sizes: dict[str, int]) -> list[tuple[float, ...]]:
    """The numbers of steps of a model with experts over 7 rows, each read once on any number of ranks."""
    from torch.utils.data import DataLoader

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=EXPERTS, mesh=mesh, admission="off")
    batch = loops.batches(1)[0]
    rows = [{name: batch[name][row] for name in ("input_ids", "labels")} for row in range(7)]
    plain = DataLoader(rows, batch_size=8 // mesh.dp_size)  # type: ignore[arg-type]
    loader = threefold.distribute(plain, tail="exact")
    step = threefold.TrainStep(model, lr=loops.LR)
    numbers = [tuple(step(batch)) for _ in range(3) for batch in loader]
    mesh.close()
    return numbers


def test_routers_loss_counts_no_row_that_fills_up_a_last_batch() -> None:
    (alone,) = run_ranks(_uneven, 1, {})
    for ranks in run_ranks(_uneven, 2, {"dp": 2, "dp_shard": 2}):
        require(compare_curves(ranks, alone))
