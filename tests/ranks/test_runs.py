"""Whole runs of the real command: stop and go on, other meshes, torchrun, failures, evaluation, export."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ranks.runs import (
    cold_command,
    command,
    curve,
    environment,
    metrics,
    prepare,
    stop_after,
    torchrun,
)

pytestmark = pytest.mark.ranks

MESH = ("--mesh.dp", "2", "--mesh.tp", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run of dp 2 x tp 2 that nothing interrupted."""
    done = command(folder, "train", "config.yaml", *MESH, "--log.dir", "whole")
    assert done.returncode == 0, done.stderr
    return folder / "whole"


def test_loss_falls_and_every_step_is_logged(whole: Path) -> None:
    steps = metrics(whole)
    assert sorted(steps) == list(range(1, 13))
    assert steps[12]["loss"] < steps[1]["loss"]
    assert steps[12]["samples"] == 12 * 8
    assert steps[12]["tokens"] == 12 * 8 * 32
    expected = {
        "step",
        "epoch",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "samples",
        "step_time_s",
        "data_wait_s",
    }
    assert expected | {"tokens_per_s", "peak_memory_bytes"} <= steps[1].keys()


@pytest.mark.parametrize(
    ("step", "number"),
    [(1, signal.SIGTERM), (6, signal.SIGINT), (8, signal.SIGHUP), (11, signal.SIGUSR1)],
)
def test_stopped_run_goes_on_bit_for_bit(
    folder: Path, whole: Path, step: int, number: int
) -> None:
    name = f"stopped-{step}"
    stopped = stop_after(
        folder, step, "train", "config.yaml", *MESH, "--log.dir", name, number=number
    )
    steps_done = max(metrics(folder / name))
    if steps_done < 12:  # a signal in the last steps lets the run end
        assert stopped.returncode == 75, stopped.stdout
        assert "the checkpoint is saved" in stopped.stdout
    resumed = command(folder, "train", "config.yaml", *MESH, "--log.dir", name)
    assert resumed.returncode == 0, resumed.stderr
    assert curve(folder / name) == curve(whole)


def test_resume_on_another_mesh_follows_the_run(folder: Path, whole: Path) -> None:
    first = command(
        folder,
        "train",
        "config.yaml",
        *MESH,
        "--log.dir",
        "moved",
        "--train.steps",
        "12",
        "--checkpoint.every",
        "5",
    )
    assert first.returncode == 0, first.stderr
    checkpoint = folder / "moved" / "checkpoints" / "step-00000010"
    sizes = ("--mesh.dp", "2", "--mesh.dp_shard", "2", "--mesh.cp", "2")
    second = command(
        folder,
        "train",
        "config.yaml",
        *sizes,
        "--log.dir",
        "elsewhere",
        "--checkpoint.resume",
        str(checkpoint),
    )
    assert second.returncode == 0, second.stderr
    found = metrics(folder / "elsewhere")
    assert sorted(found) == [11, 12]
    for step in found:
        assert found[step]["loss"] == pytest.approx(metrics(whole)[step]["loss"], abs=1e-4)
        assert found[step]["grad_norm"] == pytest.approx(
            metrics(whole)[step]["grad_norm"], rel=1e-3
        )


def test_torchrun_trains_the_same(folder: Path) -> None:
    sizes = ("--mesh.dp", "1", "--mesh.tp", "2", "--mesh.device", "cpu", "--train.steps", "4")
    ours = command(folder, "train", "config.yaml", *sizes, "--log.dir", "ours")
    assert ours.returncode == 0, ours.stderr
    # Cold, as users start it: every rank imports for itself, and dies with an agent that is its parent.
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    done = subprocess.run(
        [
            sys.executable,
            *launcher,
            "-m",
            "threefold",
            "train",
            "config.yaml",
            *sizes,
            "--log.dir",
            "torchrun",
        ],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert len(curve(folder / "ours")) == 4
    assert curve(folder / "torchrun") == curve(folder / "ours")


def test_finished_run_has_nothing_to_do(folder: Path, whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    again = command(folder, "train", "config.yaml", *MESH, "--log.dir", "whole")
    assert again.returncode == 0
    assert "nothing to do: step 12 of 12 is done" in again.stdout
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_other_data_model_or_seed_is_refused(folder: Path, whole: Path) -> None:
    for arguments, named in [
        (("--train.seed", "1"), "train.seed = 0, not 1"),
        (("--data.seed", "1"), "seed = 0"),
        (("--data.seq_len", "64"), "data = "),
    ]:
        refused = command(
            folder,
            "train",
            "config.yaml",
            "--mesh.dp",
            "1",
            "--log.dir",
            "whole",
            "--train.steps",
            "14",
            *arguments,
        )
        assert refused.returncode == 2, arguments
        assert named in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("admission", "named"), [("off", "ValueError: planted"), ("auto", "cannot be computed")]
)
def test_failing_rank_ends_the_run_with_one_traceback(
    folder: Path, admission: str, named: str
) -> None:
    """A rank that fails in its first step, or in a probe before it: one rank's report, exit code 1, no hang."""
    code = (
        "import os, sys\n"
        "from threefold.training import step\n"
        "plain = step.TrainStep.run\n"
        "def fail(self, batches, *, lr=None):\n"
        "    if os.environ['RANK'] == '3':\n"
        "        raise ValueError('planted')\n"
        "    return plain(self, batches, lr=lr)\n"
        "step.TrainStep.run = fail\n"
        "from threefold.__main__ import main\n"
        "main()\n"
    )
    (folder / "fail.py").write_text(code)
    sizes = ("--mesh.dp", "2", "--mesh.tp", "2", "--model.admission", admission)
    done = torchrun(
        folder, 4, "fail.py", "train", "config.yaml", *sizes, "--log.dir", f"failed-{admission}"
    )
    assert done.returncode == 1
    assert done.stderr.count("ValueError: planted") == 1 and done.stderr.count(named) == 1


def test_evaluation_counts_each_row_once_and_keeps_the_best(folder: Path) -> None:
    held_out = (
        "--eval.source",
        "corpus/part-3.txt",
        "--eval.every",
        "4",
        "--data.source",
        "corpus/part-0.txt",
    )
    losses = []
    for name, sizes in (("eval-1", ("--mesh.dp", "1")), ("eval-4", ("--mesh.dp", "4"))):
        done = command(folder, "train", "config.yaml", *sizes, "--log.dir", name, *held_out)
        assert done.returncode == 0, done.stderr
        lines = [
            json.loads(line)
            for line in (folder / name / "metrics.jsonl").read_text().splitlines()
        ]
        losses.append(
            [(line["eval_loss"], line["eval_tokens"]) for line in lines if "eval_loss" in line]
        )
    assert len(losses[0]) == 3
    for (alone, tokens), (spread, spread_tokens) in zip(*losses, strict=True):
        assert tokens == spread_tokens
        assert spread == pytest.approx(alone, rel=1e-4)
    best = json.loads((folder / "eval-1" / "checkpoints" / "best.json").read_text())
    assert best["eval_loss"] == min(loss for loss, _ in losses[0])
    assert (
        folder / "eval-1" / "checkpoints" / f"step-{best['step']:08d}" / "COMPLETE"
    ).exists()


def test_export_loads_in_transformers(folder: Path, whole: Path) -> None:
    done = command(folder, "export", "whole", "--to", "exported")
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(folder / "exported")
    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
    ids = tokenizer("word1 wörd", return_tensors="pt")["input_ids"]
    assert ids.tolist()[0] == list("word1 wörd".encode())
    assert tokenizer.decode(ids[0]) == "word1 wörd"
    with torch.no_grad():
        assert model(ids).logits.shape == (1, ids.shape[1], 257)
    again = command(folder, "export", "whole", "--to", "exported")
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_training_goes_on_from_an_exported_folder(folder: Path, whole: Path) -> None:
    if not (folder / "exported").exists():
        assert command(folder, "export", "whole", "--to", "exported").returncode == 0
    # Cold: the command has to start a server of its own, which imports what ranks need, and to end it again.
    done = cold_command(
        folder,
        *(
            "train",
            "--model.name_or_path",
            "exported",
            "--data.source",
            "corpus",
            "--data.seq_len",
            "32",
        ),
        *(
            "--mesh.dp",
            "2",
            "--mesh.dp_shard",
            "2",
            "--train.steps",
            "2",
            "--train.global_batch",
            "8",
        ),
        *("--log.dir", "tuned", "--log.every", "1", "--log.sample_tokens", "0"),
    )
    assert done.returncode == 0, done.stderr
    assert metrics(folder / "tuned")[1]["loss"] < metrics(whole)[1]["loss"] - 0.1


def test_print_config_names_origins_and_what_is_automatic(folder: Path) -> None:
    done = command(
        folder,
        "train",
        "config.yaml",
        "--print-config",
        "--optimizer.lr",
        "1e-4",
        "--mesh.tp",
        "2",
    )
    assert done.returncode == 0, done.stderr
    sections = dict(section.split(":\n", 1) for section in done.stdout.strip().split("\n\n"))
    lines = {
        name: [" ".join(line.split()) for line in text.splitlines()]
        for name, text in sections.items()
    }
    assert "lr: 0.0001 # command line" in lines["optimizer"]
    assert "steps: 12 # config.yaml" in lines["train"]
    assert "shuffle: true" in lines["data"]
    assert "attention: auto # sdpa: flex_attention has no backward on a CPU" in lines["model"]
    assert "dp: null # 1: as given" in lines["mesh"]


def test_what_print_config_prints_trains_the_same_run(folder: Path) -> None:
    keys = (
        "--train.steps",
        "3",
        "--mesh.dp",
        "2",
        "--optimizer.warmup_steps",
        "2",
        "--model.dtype",
        "bfloat16",
    )
    printed = command(
        folder, "train", "config.yaml", *keys, "--log.dir", "of keys", "--print-config"
    )
    (folder / "printed.yaml").write_text(printed.stdout)
    assert (
        command(folder, "train", "config.yaml", *keys, "--log.dir", "of keys").returncode == 0
    )
    done = command(folder, "train", "printed.yaml", "--log.dir", "of a file")
    assert done.returncode == 0, done.stderr
    runs = [metrics(folder / name) for name in ("of keys", "of a file")]
    losses, again = (
        [(step["loss"], step["grad_norm"], step["lr"]) for step in run.values()] for run in runs
    )
    assert losses == again and len(losses) == 3
