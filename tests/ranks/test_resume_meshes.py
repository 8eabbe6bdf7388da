"""Same state: a run goes on from any mesh on any other, at the same samples; on the same mesh bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ranks.keeping import Miniature, Sizes, write_corpus
from ranks.reference import compare_curves, require
from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks

# dp_replicate, dp_shard, cp, tp; and the rows of a micro-batch, which differ as well.
MESHES: dict[Sizes, int] = {
    (1, 1, 1, 1): 8,
    (4, 1, 1, 1): 1,
    (1, 4, 1, 1): 2,
    (2, 1, 1, 2): 2,
    (1, 1, 2, 2): 4,
    (2, 2, 1, 1): 1,
}


def _begin(sizes: Sizes, folder: str) -> Any:
    """Three steps, a save, and the three steps that an uninterrupted run makes then."""
    run = Miniature(sizes, folder, micro_batch=MESHES[sizes])
    before = run.advance(3)
    run.checkpointer.save(3, None, True)
    return before + run.advance(3), run.checkpointer.saver.wait()


def _go_on(sizes: Sizes, folders: list[str], num_workers: int) -> Any:
    curves = []
    for folder in folders:
        run = Miniature(
            sizes, folder, micro_batch=MESHES[sizes], data={"num_workers": num_workers}
        )
        assert run.done == 3
        curves.append(run.advance(3))
    return curves


def _samples(ranks: list[Any], sizes: Sizes) -> list[list[int]]:
    """The rows of each step over all dp ranks, in order of position."""
    dp, sharers = sizes[0] * sizes[1], sizes[2] * sizes[3]
    steps = []
    for step in range(len(ranks[0])):
        own = [ranks[dp_rank * sharers][step][2] for dp_rank in range(dp)]
        steps.append([row for turn in zip(*own, strict=True) for row in turn])
    return steps


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[Sizes, tuple[str, Any]]:
    """For each mesh the folder of its run, saved after step 3, and what each rank saw in steps 1 to 6."""
    parent = tmp_path_factory.mktemp("meshes")
    write_corpus(parent)
    found = {}
    for sizes in MESHES:
        folder = str(parent / "-".join(map(str, sizes)))
        found[sizes] = (
            folder,
            [rank[0] for rank in run_ranks(_begin, math.prod(sizes), sizes, folder)],
        )
    return found


@pytest.mark.parametrize("target", MESHES, ids=str)
def test_every_mesh_goes_on_on_this_one(
    target: Sizes, begun: dict[Sizes, tuple[str, Any]]
) -> None:
    alone = begun[1, 1, 1, 1][1][0]
    folders = [folder for folder, _ in begun.values()]
    ranks = run_ranks(_go_on, math.prod(target), target, folders, 0)
    for number, origin in enumerate(begun):
        curves = [rank[number] for rank in ranks]
        if origin == target:
            uninterrupted = [rank[3:] for rank in begun[target][1]]
            assert curves == uninterrupted, f"{origin} did not go on bit for bit"
        assert _samples(curves, target) == [step[2] for step in alone[3:]], (
            f"{origin} to {target}: other samples"
        )
        require(compare_curves(curves[0], alone[3:]), f"{origin} to {target}")


def test_loader_workers_may_change(begun: dict[Sizes, tuple[str, Any]]) -> None:
    target: Sizes = (2, 2, 1, 1)
    folder, ranks = begun[target]
    assert [rank[0] for rank in run_ranks(_go_on, 4, target, [folder], 1)] == [
        rank[3:] for rank in ranks
    ]


GPT2 = {
    **{"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32},
    **{"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0},
}


def _with_dropout(sizes: Sizes, folder: str) -> Any:
    run = Miniature(sizes, folder, model={"config": GPT2})
    curve = run.advance(2) if run.done == 0 else []
    if run.done == 2 and curve:
        run.checkpointer.save(2, None, True)
    curve += run.advance(2)
    run.checkpointer.saver.wait()
    return curve


def test_random_numbers_go_on(tmp_path: Path) -> None:
    """Dropout after the resume is the dropout of the run that nobody stopped."""
    write_corpus(tmp_path)
    folder = str(tmp_path / "run")
    whole = run_ranks(_with_dropout, 2, (2, 1, 1, 1), folder)
    resumed = run_ranks(_with_dropout, 2, (2, 1, 1, 1), folder)
    assert resumed == [rank[2:] for rank in whole]
    assert whole[0][2:] != whole[1][2:]
    elsewhere = run_ranks(_with_dropout, 1, (1, 1, 1, 1), folder)
    assert [step[0] for step in elsewhere[0]] != [step[0] for step in whole[0][2:]], (
        "without dropout nothing is shown"
    )
    assert [step[0] for step in elsewhere[0]] == pytest.approx(
        [step[0] for step in whole[0][2:]], abs=0.5
    )


MOE = {
    **{
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 1,
    },
    **{
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    **{"initializer_range": 0.2, "max_position_embeddings": 64},
}


def _experts(sizes: Sizes, folder: str, last: int) -> Any:
    run = Miniature(sizes, folder, model={"config": MOE})
    curve = run.advance(last - run.done)
    run.checkpointer.save(run.done, None, True)
    run.checkpointer.saver.wait()
    return curve


def test_packed_experts_split_over_tp(tmp_path: Path) -> None:
    """A tp rank of a mixture of experts holds two stretches of each packed projection."""
    write_corpus(tmp_path)
    alone = run_ranks(_experts, 1, (1, 1, 1, 1), str(tmp_path / "alone"), 4)[0]
    folder = str(tmp_path / "moved")
    run_ranks(_experts, 4, (1, 2, 1, 2), folder, 2)
    third = run_ranks(_experts, 2, (1, 1, 1, 2), folder, 3)[0]
    fourth = run_ranks(_experts, 1, (1, 1, 1, 1), folder, 4)[0]
    require(compare_curves(third + fourth, alone[2:]))
