"""Runs with `train.reduce: exact` that stop and go on with other data ranks: the weights of one that nobody stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ranks.runs import command, curve, prepare, stop_after
from threefold.checkpoint.lineage import Journal

EXACT = (
    "train",
    "config.yaml",
    "--train.reduce",
    "exact",
    "--train.micro_batch",
    "1",
    "--mesh.device",
    "cpu",
)
LOSS = ("--train.label_smoothing", "0.1", "--train.z_loss", "0.001")
ROWS = (
    "--data.packing",
    "best_fit",
    "--data.document_mask",
    "true",
    "--eval.source",
    "held-out.txt",
    "--eval.every",
    "10",
)
STEPS = ("--train.steps", "30", "--checkpoint.every", "3", "--log.dir")


@pytest.mark.examples
def test_run_on_2_then_4_then_1_then_8_data_ranks_has_the_hash_of_the_one_that_nobody_stopped(
    tmp_path: Path,
) -> None:
    """It is stopped, killed and stopped; the model drops."""
    prepare(tmp_path)
    words = " ".join(f"word{index * index % 97}" for index in range(60))
    (tmp_path / "held-out.txt").write_text(words)
    config = tmp_path / "config.yaml"
    config.write_text(
        config.read_text().replace("initializer_range: 0.2", "attention_dropout: 0.1")
    )
    asked = (*EXACT, *LOSS, *ROWS, *STEPS)
    whole = command(tmp_path, *asked, "whole", "--mesh.dp", "1")
    assert whole.returncode == 0, whole.stderr
    told = "reduce: exact: the same bits on any number of data ranks of train.micro_batch 1, float32, cp 1, tp 1"
    assert f"  {told}" in whole.stdout
    on_2, on_4, on_1 = (
        ("--mesh.dp", "2"),
        ("--mesh.dp", "4", "--mesh.dp_shard", "2"),
        ("--mesh.dp", "1"),
    )
    stopped = stop_after(tmp_path, 4, *asked, "moved", *on_2)
    assert stopped.returncode == 75, stopped.stdout
    killed = stop_after(tmp_path, 11, *asked, "moved", *on_4, number=signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    stopped = stop_after(tmp_path, 17, *asked, "moved", *on_1)
    assert stopped.returncode == 75, stopped.stdout
    # Other micro-batches would have other bits.
    refused = command(tmp_path, *asked, "moved", "--train.micro_batch", "2", *on_1)
    assert refused.returncode == 2 and "train.micro_batch = 2, but" in refused.stderr, (
        refused.stderr
    )
    refused = command(tmp_path, *asked, "moved", "--mesh.tp", "2", *on_1)
    assert refused.returncode == 2 and "mesh.tp = 2, but" in refused.stderr, refused.stderr
    ended = command(tmp_path, *asked, "moved", "--mesh.dp", "8", "--mesh.dp_shard", "4")
    assert ended.returncode == 0, ended.stderr
    assert "bit for bit\n" in ended.stdout
    hashed = command(tmp_path, "hash", "whole", "moved")
    assert hashed.returncode == 0 and hashed.stdout.splitlines()[-1] == "equal", hashed.stdout
    assert curve(tmp_path / "moved") == curve(tmp_path / "whole")
    evaluations = [_evaluations(tmp_path / run) for run in ("whole", "moved")]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 3
    said = [
        command(tmp_path, "eval", "moved", "--mesh.dp_shard", "1", "--mesh.dp", dp)
        for dp in ("1", "2")
    ]
    assert said[0].stdout == said[1].stdout and "loss" in said[0].stdout, said
    starts = [line for line in Journal(tmp_path / "moved").lines() if line["event"] == "start"]
    assert [line.get("lost_bits") for line in starts] == [None, [], [], []]
    assert (
        all(line["reduce"] == "exact" for line in starts)
        and len({tuple(line["mesh"]) for line in starts}) == 4
    )
    audited = command(tmp_path, "data", "audit", "moved").stdout.splitlines()
    assert [line.endswith("bit for bit") for line in audited[1:5]] == [
        False,
        True,
        True,
        True,
    ], audited


def _evaluations(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


@pytest.mark.examples
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            ("--optimizer.moments", "bfloat16", "--optimizer.ema", "0.9"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            ("--optimizer.name", "sgd", "--optimizer.options", "{momentum: 0.9}"),
            marks=pytest.mark.long,
        ),
        ("--mesh.cp", "2", "--model.lora.r", "2", "--model.lora.dropout", "0.1"),
    ],
)
def test_and_so_with_the_state_of_other_optimizers_on_cp_and_with_adapters(
    tmp_path: Path, settings: tuple[str, ...]
) -> None:
    prepare(tmp_path)
    asked = (*EXACT, "--train.steps", "24", *settings, "--log.dir")
    assert command(tmp_path, *asked, "whole", "--mesh.dp", "1").returncode == 0
    assert (
        stop_after(
            tmp_path, 4, *asked, "moved", "--mesh.dp", "2", "--mesh.dp_shard", "2"
        ).returncode
        == 75
    )
    ended = command(tmp_path, *asked, "moved", "--mesh.dp", "1")
    assert ended.returncode == 0 and "bit for bit\n" in ended.stdout, ended.stderr
    for ema in (("--ema",), ()) if "--optimizer.ema" in settings else ((),):
        hashed = command(tmp_path, "hash", "whole", "moved", *ema)
        assert hashed.returncode == 0 and hashed.stdout.splitlines()[-1] == "equal", (
            hashed.stdout + hashed.stderr
        )
