"""The run's folder through the command: a full disk, a second run, and requests that are refused."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from ranks.runs import command, curve, prepare
from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.checkpoint.lock import RunLock

pytestmark = pytest.mark.ranks

# Bytes; the state of this model has more, all other files of a run have less.
LARGEST_FILE = 250_000
TO_STEP_4 = (
    "--mesh.dp",
    "1",
    "--checkpoint.every",
    "2",
    "--train.steps",
    "4",
    "--optimizer.schedule",
    "constant",
)
TO_STEP_8 = (*TO_STEP_4, "--train.steps", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    prepare(folder)
    for name, arguments in (("run", TO_STEP_4), ("whole", TO_STEP_8)):
        done = command(folder, "train", "config.yaml", *arguments, "--log.dir", name)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def run(folder: Path) -> Any:
    """A fresh copy of a run of four steps."""
    yield Path(shutil.copytree(folder / "run", folder / "copy"))
    shutil.rmtree(folder / "copy", ignore_errors=True)


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


def _steps(run: Path) -> list[int]:
    return [
        checkpoint.step
        for checkpoint in CheckpointFolder(run).all()
        if checkpoint.damage() is None
    ]


def test_disk_that_takes_no_more(folder: Path, run: Path) -> None:
    """The run ends with one error; the checkpoints before are whole, and it goes on from them when there is room."""
    arguments = ("train", "config.yaml", *TO_STEP_8, "--log.dir", "copy")
    done = command(folder, *arguments, first=_small_files)
    printed = done.stderr
    assert done.returncode == 1
    assert printed.startswith("the checkpoint of step 6 could not be saved: File too large (")
    assert len(printed.splitlines()) == 3
    assert _steps(run) == [2, 4]
    assert not list((run / "checkpoints").glob(".*"))
    again = command(folder, *arguments)
    assert again.returncode == 0, again.stderr
    assert curve(run) == curve(folder / "whole")
    assert _steps(run) == [6, 8]


def _moved_after_a_save() -> None:
    from threefold.run.folder import RunFolder

    commit = RunFolder._commit

    def commit_and_move(folder: RunFolder, *arguments: Any, **named: Any) -> Any:
        saved = commit(folder, *arguments, **named)
        folder.path.rename(f"{folder.path}-moved")
        return saved

    RunFolder._commit = commit_and_move  # type: ignore[method-assign]


def test_folder_that_is_moved_while_its_run_goes(folder: Path, run: Path) -> None:
    """The run ended as done, in a new folder at the old place that had its last checkpoints and nothing else."""
    moved = folder / "copy-moved"
    arguments = ("--log.dir", "copy", "--checkpoint.on_error", "continue")
    done = command(
        folder, "train", "config.yaml", *TO_STEP_8, *arguments, first=_moved_after_a_save
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"the run's folder copy is not at {folder / 'copy'} any more, while this start trained\n"
        "  expected: only its own metrics, audit and checkpoints in the folder that it began in\n"
        "  fix: threefold resume FOLDER   (its new path), and move a folder only after its run has ended\n",
    )
    assert not run.exists() and _steps(moved)[-1] == 6
    again = command(folder, "resume", "copy-moved")
    assert again.returncode == 0, again.stderr
    assert curve(moved) == curve(folder / "whole")


def test_disk_that_takes_no_more_need_not_end_the_run(folder: Path, run: Path) -> None:
    arguments = (
        "train",
        "config.yaml",
        *TO_STEP_8,
        "--log.dir",
        "copy",
        "--checkpoint.on_error",
        "continue",
    )
    done = command(folder, *arguments, first=_small_files)
    assert done.returncode == 1  # what was trained since is not on the disk
    assert (
        "not saved: the state after step 8; the newest checkpoint is of step 4, in copy"
        in done.stdout
    )
    assert "done:" not in done.stdout and "a sample" not in done.stdout
    failed = [
        line.split(":")[0]
        for line in done.stderr.splitlines()
        if line.startswith("the checkpoint")
    ]
    assert failed == [f"the checkpoint of step {step} could not be saved" for step in (6, 8)]
    assert curve(run) == curve(folder / "whole")
    assert _steps(run) == [2, 4]


def test_second_run_in_the_same_folder_is_refused(folder: Path, run: Path) -> None:
    before = {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != "run.lock"
    }
    arguments = ("train", "config.yaml", *TO_STEP_8, "--log.dir", "copy")
    with RunLock() as lock:
        lock.take(run, fresh=False)
        done = command(folder, *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("log.dir = copy is in use by another run: process ")
        assert len(done.stderr.splitlines()) == 3
    assert {path: path.read_bytes() for path in before} == before
    assert command(folder, *arguments).returncode == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--train.seed", "1"), "was made with train.seed = 0, not 1"),
        (("--data.seed", "1"), "the saved state has seed = 0, but here seed = 1"),
        (
            ("--model.config", "{model_type: llama, hidden_size: 16, num_attention_heads: 2}"),
            "has a model with num_hidden",
        ),
    ],
    ids=["seed", "data", "model"],
)
def test_refused_resume_changes_nothing(
    folder: Path, run: Path, change: tuple[str, str], named: str
) -> None:
    kept = {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }
    kept.pop(run / "run.lock", None)
    done = command(folder, "train", "config.yaml", *TO_STEP_8, "--log.dir", "copy", *change)
    assert done.returncode == 2 and named in done.stderr, done.stderr
    assert {path: path.read_bytes() for path in kept} == kept
    elsewhere = ("--log.dir", "new", "--checkpoint.resume", "copy")
    done = command(folder, "train", "config.yaml", *TO_STEP_8, *elsewhere, *change)
    assert done.returncode == 2 and named in done.stderr, done.stderr
    assert not (folder / "new").exists()


def test_refused_request_leaves_no_folder(folder: Path) -> None:
    done = command(
        folder, "train", "config.yaml", "--mesh.dp", "1", "--data.source", "nothing.txt"
    )
    assert done.returncode == 2
    assert not (folder / "runs").exists()


def test_what_may_change_on_a_resume(folder: Path, run: Path) -> None:
    """Rate, steps, logging, checkpoints, batch and workers are the user's to change; the samples go on."""
    changed = (
        *(
            "--optimizer.lr",
            "1e-4",
            "--optimizer.weight_decay",
            "0",
            "--log.every",
            "2",
            "--train.grad_clip",
            "0",
        ),
        *(
            "--train.global_batch",
            "4",
            "--train.micro_batch",
            "2",
            "--checkpoint.keep",
            "1",
            "--eval.source",
            "corpus",
        ),
    )
    done = command(folder, "train", "config.yaml", *TO_STEP_8, "--log.dir", "copy", *changed)
    assert done.returncode == 0, done.stderr
    assert _steps(run)[-1] == 8
    manifest = CheckpointFolder(run).all()[-1].manifest()
    assert manifest["data"]["position"] == 4 * 8 + 4 * 4
    assert "lr: 0.0001" in (run / "config.yaml").read_text()


def test_going_back_sets_what_came_after_aside(folder: Path, run: Path) -> None:
    first = run / "checkpoints" / "step-00000002"
    arguments = ("--checkpoint.resume", str(first.relative_to(folder)), "--train.steps", "3")
    done = command(folder, "train", "config.yaml", *TO_STEP_4, "--log.dir", "copy", *arguments)
    assert done.returncode == 0, done.stderr
    assert "set aside: copy/checkpoints/aside-1-step-00000004" in done.stdout
    assert _steps(run) == [2, 3]
    assert (run / "checkpoints" / "aside-1-step-00000004" / "COMPLETE").exists()
