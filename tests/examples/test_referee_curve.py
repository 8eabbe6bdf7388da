"""The referee on gradients: programs on two real ranks, each fault with its class, its factor and its parameters."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from examples.test_referee_programs import (
    REFEREE,
    TORCHRUN,
    WATCHED,
    not_judged,
    refuted,
    run,
)

pytestmark = pytest.mark.examples

CLEAN = [
    (
        "qwen_loop.py",
        "clean",
        "each of 25 parameters has the gradient of the mean over all targets (283 in step 1)",
    ),
    ("qwen_loop.py", "trial", "each of 64 rows was read once in each epoch, of 2"),
    (
        "qwen_loop.py",
        "bf16",
        "each of 25 parameters has the gradient of the mean over all targets",
    ),
    (
        "qwen_meshes.py",
        "fsdp2_bf16",
        "each of 25 parameters has the gradient of the mean over all targets",
    ),
    ("qwen_loop.py", "by_hand", "the sampler of each rank shows the data ranks"),
    *(
        ("qwen_meshes.py", kind, "gradients are clipped by the norm of all of them in 3 steps")
        for kind in ("fsdp2_clip", "fsdp2_largest")
    ),
    (
        "qwen_meshes.py",
        "tp",
        "each of 25 parameters has the gradient of the mean over all targets",
    ),
    (
        "qwen_meshes.py",
        "tp_clip",
        "gradients are clipped by the norm of all of them in 3 steps",
    ),
    (
        "qwen_loop.py",
        "packed",
        "each of 25 parameters has the gradient of the mean over all targets (1008 in step 1)",
    ),
    (
        "qwen_loop.py",
        "uncached",
        "each of 25 parameters has the gradient of the mean over all targets (1008 in step 1)",
    ),
    (
        "qwen_loop.py",
        "tied",
        "each of 24 parameters has the gradient of the mean over all targets",
    ),
    (
        "qwen_loop.py",
        "export",
        "exports: 1 of 1 folders read back have all weights and the config of the model",
    ),
    (
        "sft_trainer.py",
        "completion",
        "each of 21 parameters has the gradient of the mean over all targets (33 in step 1)",
    ),
    (
        "experts_loop.py",
        "clean",
        "each of 25 parameters has the gradient of the mean over all targets",
    ),
    (
        "experts_over_ranks.py",
        "clean",
        "gradients are clipped by the norm of all of them in 3 steps",
    ),
    ("sinks_loop.py", "clean", "gradients are clipped by the norm of all of them in 3 steps"),
]
FAULTS = [
    (
        "qwen_loop.py",
        "means",
        ["gradients"],
        "count 1.22 x those of row 1 of micro-batch 1 of rank 1 (5 targets)",
    ),
    ("qwen_loop.py", "q_norm", ["gradients"], "model.layers.*.self_attn.q_norm.weight x2\n"),
    (
        "qwen_loop.py",
        "lost",
        ["copies of weights", "gradients"],
        "8 of 16 rows are missing from the gradient",
    ),
    (
        "qwen_loop.py",
        "between",
        ["gradients"],
        "in step 1 8 of 16 rows are missing from the gradient: row 1 of micro-batch 1",
    ),
    (
        "qwen_loop.py",
        "no_zero_grad",
        ["gradients"],
        "in step 2 the gradient still contains that of the step before",
    ),
    ("qwen_loop.py", "mask", ["gradients"], "that of a model that ignores attention_mask"),
    (
        "qwen_loop.py",
        "shifted",
        ["gradients", "targets"],
        "100% of the outputs are trained to predict the token after",
    ),
    (
        "qwen_loop.py",
        "padding",
        ["targets"],
        "outputs are trained to predict padding, which attention_mask leaves out",
    ),
    (
        "qwen_loop.py",
        "left_out",
        ["gradients", "updates"],
        "in no group of the optimizer: lm_head.weight",
    ),
    (
        "qwen_loop.py",
        "unwrapped",
        ["copies of weights"],
        "ranks 0 and 1 hold different gradients of model.embed_tokens.weight in step 1\n",
    ),
    ("qwen_loop.py", "early_clip", ["norm of gradients"], "before step 1 has no effect\n"),
    ("qwen_loop.py", "late_clip", ["norm of gradients"], "before step 2 has no effect\n"),
    ("qwen_loop.py", "after_clip", ["updates"], "model.norm.weight x-0.98"),
    ("qwen_loop.py", "decay_twice", ["updates"], "model.embed_tokens.weight differently"),
    (
        "qwen_loop.py",
        "scaled",
        ["gradients"],
        "each gradient is x2.0000: the number of ranks or the number of micro-",
    ),
    (
        "qwen_loop.py",
        "untied",
        ["gradients"],
        "lm_head.weight is a separate weight in the program, but the model",
    ),
    (
        "qwen_loop.py",
        "positions",
        ["gradients"],
        "that of a model that ignores position_ids, which it is called",
    ),
    (
        "qwen_loop.py",
        "lost_shard",
        ["exports"],
        "has no readable model (No such file or directory",
    ),
    (
        "experts_loop.py",
        "twice",
        ["gradients"],
        "model.layers.*.mlp.experts.gate_up_proj x2, model.layers.*.mlp.exper",
    ),
    (
        "experts_loop.py",
        "detached",
        ["gradients", "updates"],
        "model.layers.*.mlp.gate.weight x0\n",
    ),
    (
        "experts_loop.py",
        "apart",
        ["copies of weights", "gradients"],
        "gradients of model.layers.0.mlp.gate.weight",
    ),
    (
        "sft_trainer.py",
        "head",
        ["gradients"],
        "a different factor from the rest: lm_head.weight x2\n",
    ),
    (
        "qwen_meshes.py",
        "tp_scaled",
        ["gradients"],
        "each gradient is x2.0000: the number of ranks of a model copy\n",
    ),
    (
        "qwen_meshes.py",
        "tp_norm",
        ["norm of gradients"],
        "clipped by a norm of 1.77822, x1.2117 of theirs\n",
    ),
    ("qwen_meshes.py", "fsdp2_parts", ["norm of gradients"], "of theirs\n"),
    ("qwen_meshes.py", "tp_norm_first", ["norm of gradients"], "of theirs\n"),
    (
        "experts_over_ranks.py",
        "first",
        ["norm of gradients"],
        "clipped by a norm of 1.44871, x0.9991 of theirs\n",
    ),
    ("sinks_loop.py", "first", ["norm of gradients"], "x0.8395 of theirs\n"),
    (
        "qwen_meshes.py",
        "tp_twice",
        ["gradients"],
        "model.layers.*.self_attn.q_norm.weight x2\n",
    ),
    (
        "qwen_meshes.py",
        "tp_partial",
        ["copies of weights"],
        "different gradients of model.layers.0.self_attn.q_norm",
    ),
]


@pytest.mark.parametrize(("program", "kind", "what"), CLEAN)
def test_clean_programs_are_proved(tmp_path: Path, program: str, kind: str, what: str) -> None:
    watched = run(tmp_path, *REFEREE, "--", *TORCHRUN, str(WATCHED / program), kind)
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert what in watched.stdout
    assert re.search(
        "proved      updates: in steps 1 to 2 each of 2[145]? parameters moves as torch",
        watched.stdout,
    )


@pytest.mark.parametrize(("program", "kind", "parts", "what"), FAULTS)
def test_faults_are_refuted(
    tmp_path: Path, program: str, kind: str, parts: list[str], what: str
) -> None:
    watched = run(
        tmp_path, *REFEREE, "--steps", "2", "--", *TORCHRUN, str(WATCHED / program), kind
    )
    assert watched.returncode == 1, watched.stdout + watched.stderr
    assert refuted(watched.stdout) == parts
    assert what in watched.stdout


NOT_JUDGED = [
    (
        "eval",
        ["record"],
        "rank 1: 4 steps of its optimizer follow no call of the model in training mode",
    ),
    (
        "step_twice",
        ["record"],
        "rank 0: 4 steps of its optimizer follow no call of the model in training mode",
    ),
    (
        "two_clips",
        ["norm of gradients", "updates"],
        "gradients are clipped more than once in a step",
    ),
    (
        "other_rows",
        ["targets"],
        "of the outputs are trained to predict the next token: what the others predict is not",
    ),
]


@pytest.mark.parametrize(("kind", "parts", "what"), NOT_JUDGED)
def test_what_cannot_be_seen_is_not_judged(
    tmp_path: Path, kind: str, parts: list[str], what: str
) -> None:
    watched = run(tmp_path, *REFEREE, "--", *TORCHRUN, str(WATCHED / "qwen_loop.py"), kind)
    assert watched.returncode == 3, watched.stdout + watched.stderr
    assert not_judged(watched.stdout) == parts
    assert what in watched.stdout


@pytest.mark.parametrize("kind", ["clean_fsdp2", "twice"])
def test_model_of_ones_own_is_taken_from_its_program(tmp_path: Path, kind: str) -> None:
    program = [str(WATCHED / "own_model.py"), kind]
    alone = " ".join([*TORCHRUN[:-1], "1", *program])
    watched = run(
        tmp_path, *REFEREE, "--alone", alone, "--record", "record", "--", *TORCHRUN, *program
    )
    # The second run ends at its first step.
    assert watched.stdout.splitlines().count("trained") == 1, watched.stdout
    judged = run(tmp_path, *REFEREE, "judge", "record", "--json")
    parts = {part["name"]: part for part in json.loads(judged.stdout)["parts"]}
    if kind == "twice":
        assert watched.returncode == 1 and parts["gradients"]["what"].endswith(
            "from the rest: 2.bias x2"
        )
    else:
        assert watched.returncode == 0, watched.stdout + watched.stderr
        assert parts["gradients"]["what"].startswith(
            "in steps 1 to 3 each of 4 parameters has the gradient of the mean"
        )
    # An answer that was given on another record is none.
    (tmp_path / "record" / "alone.json").write_text('{"judged": "", "parts": []}')
    again = run(tmp_path, *REFEREE, "judge", "record")
    assert again.returncode == 3
    assert (
        "Sequential is not a model of transformers: --alone COMMAND trains it in one process"
        in again.stdout
    )


@pytest.mark.parametrize(
    ("kind", "parts", "what"),
    [
        # The first matrices of adapters have a gradient of zero as long as the second ones are zero.
        (
            "clean",
            [],
            "each of 4 parameters has the gradient of the mean over all targets (184 in step 1)",
        ),
        (
            "apart",
            ["copies of weights", "gradients"],
            "different gradients of base_model.model.model.layers.1.self_attn",
        ),
        (
            "unfrozen",
            ["gradients", "updates"],
            "in no group of the optimizer: base_model.model.model.norm.weight\n",
        ),
    ],
)
def test_adapters_of_peft(tmp_path: Path, kind: str, parts: list[str], what: str) -> None:
    program = [str(WATCHED / "lora_loop.py"), kind]
    alone = " ".join([*TORCHRUN[:-1], "1", *program])
    watched = run(
        tmp_path, *REFEREE, "--steps", "2", "--alone", alone, "--", *TORCHRUN, *program
    )
    assert watched.returncode == bool(parts), watched.stdout + watched.stderr
    assert refuted(watched.stdout) == parts
    assert what in watched.stdout


def test_command_that_does_not_train_the_model_alone(tmp_path: Path) -> None:
    alone = f"{sys.executable} -c 'import torch'"
    watched = run(
        tmp_path,
        *REFEREE,
        "--alone",
        alone,
        "--",
        *TORCHRUN,
        str(WATCHED / "own_model.py"),
        "clean",
    )
    assert watched.returncode == 3
    assert "ended with exit code 0 and did not train the model of the record" in watched.stdout
