"""Commands that take a run: resume, eval, sample and export, from any folder and after the run was moved."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ranks.runs import command, environment, prepare
from threefold.checkpoint.checkpoint_folder import CheckpointFolder

HELD = " ".join(f"word{number % 89}" for number in range(700))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of 4 steps in `a run`, which evaluated its last state."""
    folder = tmp_path_factory.mktemp("commands")
    prepare(folder)
    (folder / "held.txt").write_text(HELD)
    evaluation = (
        "--eval.source",
        "held.txt",
        "--eval.every",
        "4",
        "--checkpoint.every",
        "2",
        "--log.every",
        "1",
    )
    sizes = ("--mesh.dp", "1", "--train.steps", "4", "--optimizer.schedule", "cosine")
    done = command(folder, "train", "config.yaml", "--log.dir", "a run", *sizes, *evaluation)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("export: threefold export 'a run' --to DIR")
    return folder


@pytest.fixture
def run(folder: Path) -> Path:
    copied = folder / "copied run"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder / "a run", copied)
    return copied


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_resume_from_another_folder(folder: Path, run: Path, tmp_path: Path) -> None:
    done = command(tmp_path, "resume", str(run), "--train.steps", "6")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"  resumed from {run}/checkpoints/step-00000004" in lines
    assert "  changed: train.steps 4 -> 6" in lines
    assert any(
        line.startswith("  schedule: cosine over 6 steps, not 4: the rate of step 5 is ")
        for line in lines
    )
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_run_without_standard_streams(folder: Path, run: Path) -> None:
    """Of a daemon: the number of a closed one was that of the next file."""
    asked = [sys.executable, "-m", "threefold", "resume", run.name, "--train.steps", "5"]
    closed = ["bash", "-c", '"$@" <&- >&- 2>&-', "_", *asked]
    assert (
        subprocess.run(closed, cwd=folder, env=environment(folder), timeout=120).returncode == 0
    )
    assert (run / "logs" / "rank-0000.log").read_text().count("done: 5 steps") == 1


def test_own_config_means_the_run_wherever_it_lies(folder: Path, run: Path) -> None:
    moved = run.rename(folder / "moved")
    try:
        done = command(folder, "train", "moved/config.yaml", "--train.steps", "5")
        assert done.returncode == 0, done.stderr
        assert "  resumed from moved/checkpoints/step-00000004" in done.stdout.splitlines()
        another = command(
            folder, "train", "moved/config.yaml", "--log.dir", "another", "--train.steps", "1"
        )
        assert "  steps  1 to 1, 8 rows each" in another.stdout.splitlines(), another.stderr
    finally:
        shutil.rmtree(moved)


def test_resume_goes_on_in_the_named_folder_or_not_at_all(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    """Into another folder, of a config alone and of a copy without run.json: refused, and nothing is trained."""
    (run / "run.json").unlink()
    (tmp_path / "project").mkdir()
    shutil.copy(folder / "config.yaml", tmp_path / "project")
    before = {
        path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "run.lock"
    }
    for arguments, what in (
        (
            (str(folder / "a run"), "--log.dir", "other"),
            "log.dir = other, but the run to resume is in ",
        ),
        (
            (str(folder / "a run"), "--log.dir", "null"),
            "log.dir = None, but the run to resume is in ",
        ),
        (
            (str(run), "--train.steps", "6"),
            f"{run} has a run's files, but no run.json that names",
        ),
        (("project",), "project is not a run"),
    ):
        done = command(tmp_path, "resume", *arguments)
        assert done.returncode == 2 and done.stderr.startswith(what), done.stdout + done.stderr
    assert {
        path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != "run.lock"
    } == before
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "project"}
    assert [path.name for path in (tmp_path / "project").iterdir()] == ["config.yaml"]


def test_going_back_to_a_checkpoint(folder: Path, run: Path) -> None:
    done = command(
        folder, "resume", "copied run/checkpoints/step-00000002", "--train.steps", "3"
    )
    assert done.returncode == 0, done.stderr
    assert [each.step for each in CheckpointFolder(run).complete()] == [2, 3]
    assert (run / "checkpoints/aside-1-step-00000004").is_dir()


def test_eval_is_the_loss_that_training_measured_on_any_mesh(
    folder: Path, tmp_path: Path
) -> None:
    run = folder / "a run"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    trained = next(line["eval_loss"] for line in metrics(run) if "eval_loss" in line)
    for mesh in (
        ("--mesh.dp", "3"),  # which does not divide the global batch
        ("--mesh.dp", "2", "--mesh.dp_shard", "2"),
        ("--mesh.dp", "1", "--mesh.tp", "2"),
    ):
        done = command(tmp_path, "eval", str(run), *mesh)
        assert done.returncode == 0, done.stderr
        loss = float(done.stdout.split("loss ")[1].split()[0])
        assert math.isclose(loss, trained, abs_tol=1e-4)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_eval_on_another_source_and_an_older_checkpoint(folder: Path) -> None:
    done = command(
        folder,
        "eval",
        "a run/checkpoints/step-00000002",
        "--eval.source",
        "corpus",
        "--mesh.dp",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a run/checkpoints/step-00000002: loss ")


def test_sample_continues_the_prompt(folder: Path, tmp_path: Path) -> None:
    done = command(
        tmp_path, "sample", str(folder / "a run"), "--prompt", "word1 word", "--tokens", "5"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("word1 word") and len(done.stdout) > len("word1 word\n")


@pytest.mark.parametrize("name", ["resume", "eval", "sample"])
def test_what_is_not_a_run_is_refused(folder: Path, name: str) -> None:
    done = command(folder, name, "corpus")
    assert done.returncode == 2
    assert done.stderr.splitlines()[:2] == [
        "corpus is not a run",
        "  expected: the folder of a run (log.dir)",
    ]


def test_places_that_cannot_be_made_are_refused(folder: Path) -> None:
    """A folder where none can be made, and a store in the place of a file."""
    store = ("--data.source", "held.txt", "--data.tokenizer", "bytes", "--to", "held.txt")
    for arguments, what in (
        (("export", "a run", "--to", "/proc/model"), "/proc/model cannot be made: "),
        (("data", "prepare", *store), "held.txt cannot be written: Not a directory"),
    ):
        done = command(folder, *arguments)
        assert done.returncode == 2 and done.stderr.splitlines()[-3].startswith(what), (
            done.stderr
        )
    assert (folder / "held.txt").read_text() == HELD


def test_damaged_checkpoint_is_not_evaluated_or_sampled(folder: Path, run: Path) -> None:
    (file,) = (run / "checkpoints/step-00000004/state").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for name in ("eval", "sample"):
        done = command(folder, name, "copied run")
        assert done.returncode == 2
        assert done.stderr.startswith(
            "the checkpoint copied run/checkpoints/step-00000004 is damaged: "
        )
