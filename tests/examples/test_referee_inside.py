"""The referee inside of programs, on Threefold's own runs, and on FullyShardedDataParallel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.test_referee_programs import REFEREE, TORCHRUN, WATCHED, refuted, run

pytestmark = pytest.mark.examples

BLOCK, OWN_RUN, TRAINER = (
    str(WATCHED / name) for name in ("block_loop.py", "own_run.py", "bert_trainer.py")
)
# In front of the rows of a mesh whose gradients are those of one process.
PROVED = "parameters has the gradient of the mean over all targets (512 in step 1)"


@pytest.mark.parametrize(
    ("kind", "code", "what"),
    [
        ("ddp", 0, "verdict: proved"),
        ("fsdp2", 0, "fully_shard shows the data ranks"),
        ("twice", 1, "model.layers.1.mlp.up_proj.weight x2\n"),
    ],
)
def test_steps_of_a_block_are_judged(tmp_path: Path, kind: str, code: int, what: str) -> None:
    ended = run(tmp_path, *TORCHRUN, BLOCK, kind, "record")
    assert f"code {code} rank 0" in ended.stdout.splitlines(), ended.stdout + ended.stderr
    assert what in ended.stdout and ended.stdout.count("referee: 2 ranks, 8 steps") == 1
    judged = run(tmp_path, *REFEREE, "judge", "record")
    assert judged.returncode == code and judged.stdout in ended.stdout
    again = run(tmp_path, *TORCHRUN, BLOCK, kind, "record")
    assert 'fix: Referee(model, optimizer, record="record-2")' in again.stderr


def test_block_that_is_left_by_an_error_keeps_it(tmp_path: Path) -> None:
    ended = run(tmp_path, *TORCHRUN, BLOCK, "raises", "record")
    assert (
        ended.returncode == 1
        and "RuntimeError: the loop fails" in ended.stderr
        and "referee:" not in ended.stdout
    )
    judged = run(tmp_path, *REFEREE, "judge", "record")
    assert judged.returncode == 3 and "the command has not ended" in judged.stdout


def test_trainer_with_a_callback(tmp_path: Path) -> None:
    ended = run(tmp_path, sys.executable, TRAINER, "record")
    assert "verdict: proved (exit code 0)" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("fault", "model", "axis", "what"),
    [
        ("none", "llama", "dp_shard", None),
        ("none", "qwen3", "tp", None),
        ("none", "llama", "cp", None),
        ("none", "qwen3", "all", None),
        (
            "forget_documents",
            "llama",
            "dp",
            "of a model that ignores position_ids, which it is called with",
        ),
        (
            "forget_documents",
            "llama",
            "cp",
            "of a model that ignores position_ids, which it is called with",
        ),
        (
            "see_a_part_of_the_row",
            "llama",
            "cp",
            "the gradient is not the sum of its rows' gradients\n",
        ),
        (
            "drop_the_mask",
            "llama",
            "cp",
            "the gradient is not the sum of its rows' gradients\n",
        ),
        ("leak_rows", "llama", "cp", "the gradient is not the sum of its rows' gradients\n"),
        (
            "sum_twice",
            "qwen3",
            "tp",
            "self_attn.q_norm.weight x2, model.layers.*.self_attn.k_norm.weight x2\n",
        ),
        (
            "untie_the_head",
            "tied",
            "dp",
            "lm_head.weight is a separate weight in the program",
        ),
    ],
)
def test_own_runs_are_judged_as_others_are(
    tmp_path: Path, fault: str, model: str, axis: str, what: str | None
) -> None:
    documents = ["documents"] if fault == "forget_documents" else []
    torchrun = (*TORCHRUN[:-1], "8") if axis == "all" else TORCHRUN
    watched = run(tmp_path, *REFEREE, "--", *torchrun, OWN_RUN, fault, model, axis, *documents)
    if what is None:
        assert watched.returncode == 0 and PROVED in watched.stdout, (
            watched.stdout + watched.stderr
        )
        assert "2 epochs read the same 24 rows, each once" in watched.stdout
        assert "gradients are clipped by the norm of all of them in 3 steps" in watched.stdout
    else:
        assert refuted(watched.stdout) == ["gradients"] and what in watched.stdout, (
            watched.stdout + watched.stderr
        )


def test_positions_of_another_rank_are_refuted(tmp_path: Path) -> None:
    watched = run(
        tmp_path, *REFEREE, "--", *TORCHRUN, OWN_RUN, "shift_positions", "llama", "cp"
    )
    assert refuted(watched.stdout) == ["rows of one model copy", "gradients"], (
        watched.stdout + watched.stderr
    )
    assert (
        "the positions of the parts of each row that ranks 0 and 1 hold do not fit together\n"
        in watched.stdout
    )


@pytest.mark.parametrize(
    ("kind", "code", "what"),
    [
        ("clean", 0, "parameters has the gradient of the mean over all targets (92 in step 1)"),
        ("twice", 1, "model.layers.*.self_attn.q_norm.weight x2\n"),
        (
            "own_count",
            1,
            "targets of a sequence do not count equally: each rank divides by those that it holds\n",
        ),
        (
            "unnumbered",
            3,
            "its attention is the program's own (gathered): what its mask means is not known",
        ),
    ],
)
def test_sequence_over_ranks_by_hand(tmp_path: Path, kind: str, code: int, what: str) -> None:
    watched = run(tmp_path, *REFEREE, "--", *TORCHRUN, str(WATCHED / "cp_loop.py"), kind)
    assert watched.returncode == code, watched.stdout + watched.stderr
    assert what in watched.stdout


@pytest.mark.parametrize(("kind", "code"), [("fsdp1", 0), ("fsdp1_twice", 1)])
def test_fully_sharded_data_parallel(tmp_path: Path, kind: str, code: int) -> None:
    watched = run(tmp_path, *REFEREE, "--", *TORCHRUN, str(WATCHED / "qwen_meshes.py"), kind)
    assert watched.returncode == code, watched.stdout + watched.stderr
    what = {
        "fsdp1": "gradients are clipped by the norm of all of them in 3 steps",
        "fsdp1_twice": "model.layers.1.self_attn.q_norm.weight x2\n",
    }[kind]
    assert what in watched.stdout
