"""Whole runs and what becomes of them: forks, changed keys, signals while the last state is being saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from ranks import warm
from ranks.faults import rank_processes
from ranks.runs import command, environment, metrics, prepare, stop_after
from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.checkpoint.lineage import Identity, Journal
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import read_whole

pytestmark = pytest.mark.ranks

ALONE = ("train", "config.yaml", "--mesh.dp", "1", "--log.every", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lineage")
    prepare(folder)
    return folder


def curve(run: Path) -> list[tuple[int, float]]:
    """Step and loss of each step's last line."""
    return [(step, line["loss"]) for step, line in sorted(metrics(run).items())]


def test_forked_run_that_was_stopped_ends_as_an_uninterrupted_one(folder: Path) -> None:
    """By the command that was printed, in which nothing names the checkpoint that it was forked from."""
    saves = ("--checkpoint.every", "2", "--checkpoint.keep", "9")
    assert (
        command(folder, *ALONE, "--log.dir", "a", "--train.steps", "4", *saves).returncode == 0
    )
    fork = (
        "--checkpoint.resume",
        "a/checkpoints/step-00000002",
        "--optimizer.schedule",
        "constant",
    )
    whole = command(folder, *ALONE, "--log.dir", "whole", *fork, "--train.steps", "8")
    assert whole.returncode == 0, whole.stderr
    cut = command(folder, *ALONE, "--log.dir", "b", *fork, "--train.steps", "5")
    assert "  changed: optimizer.schedule cosine -> constant" in cut.stdout.splitlines()
    pasted = ("train", "b/config.yaml", "--log.dir", "b", "--train.steps", "8")
    again = command(folder, *pasted)
    assert "  resumed from b/checkpoints/step-00000005" in again.stdout.splitlines(), (
        again.stdout + again.stderr
    )
    assert curve(folder / "b") == curve(folder / "whole")
    origin, of_a = Identity.read(folder / "b"), Identity.read(folder / "a")
    assert (
        origin is not None
        and origin.origin is not None
        and of_a is not None
        and origin.origin.run == of_a.id
    )
    assert [line["event"] for line in Journal(folder / "b").lines()] == [
        "start",
        "save",
        "done",
        "start",
        "save",
        "done",
    ]


def test_change_of_what_is_trained_must_be_confirmed(folder: Path) -> None:
    assert command(folder, *ALONE, "--log.dir", "c", "--train.steps", "2").returncode == 0
    more = (*ALONE, "--log.dir", "c", "--train.steps", "3", "--optimizer.betas", "[0.9, 0.99]")
    files = [
        path
        for path in (folder / "c").rglob("*")
        if path.is_file() and path.suffix not in (".lock", ".log")
    ]
    before = {path: path.read_bytes() for path in files}
    refused = command(folder, *more)
    assert refused.returncode == 2
    what, expected, fix = refused.stderr.splitlines()
    assert (
        what
        == "optimizer.betas = [0.9, 0.99], but c/checkpoints/step-00000002 was saved with [0.9, 0.95]"
    )
    assert (
        expected
        == "  expected: the run's own value: another one changes what is trained from here on"
    )
    assert (
        fix
        == "  fix: --optimizer.betas '[0.9, 0.95]'   (or --accept-changes, to continue with the new one)"
    )
    assert {path: path.read_bytes() for path in before} == before
    accepted = command(folder, *more, "--accept-changes")
    assert accepted.returncode == 0, accepted.stderr
    assert (
        "  changed: optimizer.betas [0.9, 0.95] -> [0.9, 0.99]" in accepted.stdout.splitlines()
    )
    last = [line for line in Journal(folder / "c").lines() if line["event"] == "start"][-1]
    assert last["changed"]["optimizer.betas"] == [[0.9, 0.95], [0.9, 0.99]]


def slowly_saved(run: str, signals: tuple[int, ...], pause_s: float) -> None:
    """What a process does before its run: its disk is slow, and the signals come after step 3, `pause_s` apart."""
    plain = os.fsync

    def slow(file: int) -> None:
        time.sleep(0.3)
        plain(file)

    def ask() -> None:
        metrics = Path(run) / "metrics.jsonl"
        while not metrics.exists() or '"step": 3' not in metrics.read_text():
            time.sleep(0.01)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(pause_s)

    os.fsync = slow
    threading.Thread(target=ask, daemon=True).start()


@pytest.mark.timing
@pytest.mark.parametrize(
    "second", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
)
def test_second_signal_does_not_lose_the_last_save(folder: Path, second: int) -> None:
    name = f"twice-{second}"
    plant = partial(slowly_saved, name, (signal.SIGUSR1, second), 0.8)
    every = ("--checkpoint.every", "100000", "--train.steps", "100000")
    done = command(folder, *ALONE, "--log.dir", name, *every, first=plant)
    assert done.returncode == 75, done.stdout + done.stderr
    saved = CheckpointFolder(folder / name).newest()
    assert saved is not None and saved.damage() is None
    assert (
        f"stopped by a signal after step {saved.step}; the checkpoint is saved in {name}"
        in done.stdout
    )


@pytest.mark.timing
def test_three_signals_at_once_end_the_run_and_say_so(folder: Path) -> None:
    plant = partial(slowly_saved, "thrice", (signal.SIGTERM,) * 3, 0.2)
    done = command(
        folder, *ALONE, "--log.dir", "thrice", "--train.steps", "100000", first=plant
    )
    assert done.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert "ended at once by 3 x SIGTERM: what was being saved is lost" in done.stderr


def test_everything_that_happens_to_a_run_changes_no_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked, requeued three times in an allocation of one task, moved, edited, killed and restarted: one curve."""
    steps = ("--train.steps", "40", "--checkpoint.every", "3", "--checkpoint.keep", "50")
    assert (
        command(
            folder, *ALONE, "--log.dir", "parent", "--train.steps", "4", *steps[2:]
        ).returncode
        == 0
    )
    fork = (*steps, "--checkpoint.resume", "parent/checkpoints/step-00000003")
    whole = command(folder, *ALONE, "--log.dir", "undisturbed", *fork)
    assert whole.returncode == 0, whole.stderr
    allocation = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    for name, value in {**allocation, "SLURM_JOB_NUM_NODES": "1"}.items():
        monkeypatch.setenv(name, value)
    for requeued in range(4):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(requeued))
        cut = stop_after(folder, 5 * (requeued + 1), *ALONE, "--log.dir", "disturbed", *fork)
        assert cut.returncode == 75, cut.stdout
    for name in (*allocation, "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name)
    moved = folder / "elsewhere" / "renamed"
    moved.parent.mkdir()
    (folder / "disturbed").rename(moved)
    text = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(text.replace("\n  keep: 50\n", "\n  keep: 49\n"))
    last = metrics(moved)
    arguments = ("train", "elsewhere/renamed/config.yaml", "--max-restarts", "1")
    with warm.Running(
        warm.threefold, folder, arguments, environment(folder), one_output=True
    ) as running:
        running.wait_for(lambda: max(metrics(moved)) > max(last) + 3, "three more steps", 60)
        os.kill(rank_processes(moved)[0], signal.SIGKILL)
        assert running.wait(60) == 0, running.out()
        assert "restart 1 of 1: a rank had failed" in running.out()
        assert "changed: checkpoint.keep 50 -> 49" in running.out()
    assert curve(moved) == curve(folder / "undisturbed")
    assert weights(moved) == weights(folder / "undisturbed")
    assert not list(moved.glob("checkpoints/aside-*"))
    proof = command(folder, "data", "audit", "elsewhere/renamed")
    assert proof.returncode == 0 and "proved: " in proof.stdout, proof.stdout + proof.stderr
    starts = [line for line in Journal(moved).lines() if line["event"] == "start"]
    assert len(starts) == 6 and len({line["run"] for line in starts}) == 1


def weights(run: Path) -> dict[str, bytes]:
    """The last checkpoint's tensors."""
    newest = CheckpointFolder(run).newest()
    assert newest is not None and newest.step == 40
    entries = Index.read(newest.state).entries
    return {
        name: read_whole(newest.state, entry).numpy().tobytes()
        for name, entry in entries.items()
    }
