"""Whole experts on each tp rank follow the single process, as parts of all experts do; what cannot be is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ranks.keeping import Miniature, Sizes, write_corpus
from ranks.reference import (
    PARITY,
    TINY_LLAMA,
    compare_curves,
    compare_trainings,
    make_batches,
    require,
    train_alone,
)
from ranks.spawn import run_ranks
from ranks.test_parity import CLIP, DECAY, LR, ROWS, SEQ_LEN, STEPS, train_on_mesh
from threefold.check.compare import Training
from threefold.config.loading import validate
from threefold.errors import ConfigError
from threefold.model import load
from threefold.model.tensor_parallel.plan import expert_problems

pytestmark = pytest.mark.ranks

MIXTRAL = {
    **TINY_LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3 = {
    **TINY_LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3 |= {"moe_intermediate_size": 16, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        (MIXTRAL, [(1, 2, 1, 2), (2, 1, 2, 2)]),
        pytest.param(QWEN3, [(1, 1, 1, 4)], marks=pytest.mark.long),
    ],
    ids=["mixtral", "qwen3_moe"],
)
def test_whole_experts_follow_one_process(model: dict[str, Any], meshes: list[Sizes]) -> None:
    batches = make_batches(steps=STEPS, rows=ROWS, seq_len=SEQ_LEN)
    expected = train_alone(model, batches, lr=LR, clip=CLIP, decay=DECAY)
    for sizes in meshes:
        found = run_ranks(train_on_mesh, math.prod(sizes), sizes, model, 2, sizes[3])[0]
        comparison = require(
            compare_trainings(Training(*found), Training(*expected), PARITY), sizes
        )
        print(f"{model['model_type']} {sizes}: {comparison}")


def _steps(sizes: Sizes, folder: str, ep: int, steps: int) -> Any:
    model = {key: value for key, value in MIXTRAL.items() if key != "vocab_size"}
    run = Miniature(sizes, folder, model={"config": model}, mesh={"ep": ep})
    curve = [(loss, norm) for loss, norm, _ in run.advance(steps)]
    run.checkpointer.save(run.done, None, True)
    run.checkpointer.saver.wait()
    return curve, [name for name, _ in run.model.module.named_parameters() if "expert" in name]


def test_whole_experts_are_resumed_as_parts_of_all(tmp_path: Any) -> None:
    write_corpus(tmp_path)
    whole, _ = run_ranks(_steps, 2, (1, 1, 1, 2), str(tmp_path / "whole"), 2, 4)[0]
    begun, _ = run_ranks(_steps, 2, (1, 1, 1, 2), str(tmp_path / "run"), 2, 2)[0]
    resumed, _ = run_ranks(_steps, 2, (1, 1, 1, 2), str(tmp_path / "run"), 1, 2)[0]
    assert begun == whole[:2]
    require(compare_curves(resumed, whole[2:]))


def _said(model: dict[str, Any], ep: int, tp: int) -> str:
    architecture = load.read_config(validate({"model": {"config": model}}).model)
    found = list(expert_problems(architecture, ep, tp))
    return str(ConfigError.of(found)) if found else ""


def test_experts_that_cannot_be_dealt_out() -> None:
    assert _said(MIXTRAL, 1, 2) == _said(MIXTRAL, 2, 2) == _said(TINY_LLAMA, 1, 2) == ""
    assert _said(TINY_LLAMA, 2, 2) == (
        "mesh.ep = 2, but transformers has no expert-parallel plan for 'llama'\n"
        "  expected: a model with experts that can be distributed\n"
        "  fix: --mesh.ep 1"
    )
    assert _said(MIXTRAL, 4, 2) == (
        "mesh.ep = 4 is not mesh.tp (2)\n"
        "  expected: 1, or the number of tp ranks, which hold the same tokens: experts shared by more ranks would be "
        "sharded over another mesh than the rest of the model, which is not supported\n"
        "  fix: --mesh.ep 2"
    )
    assert _said({**MIXTRAL, "num_local_experts": 6}, 4, 4) == (
        "mesh.ep = 4 cannot divide the 6 experts of 'mixtral'\n"
        "  expected: whole experts on every rank\n"
        "  fix: --mesh.ep 3 --mesh.tp 3"
    )
