"""One run at a time in a folder; a dead one holds nothing, a refused one leaves nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from threefold.checkpoint import lock as run_lock
from threefold.checkpoint.lock import RunLock
from threefold.errors import ConfigError, RunError

HOLD = (
    "import sys\nfrom pathlib import Path\nfrom threefold.checkpoint.lock import RunLock\n"
    "lock = RunLock()\nlock.take(Path(sys.argv[1]), fresh=False)\n"
    "print('held', flush=True)\nsys.stdin.read()\n"
)


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process holds `folder`; it is killed at the end at the latest."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.0)


def test_second_run_is_refused_with_the_holder(tmp_path: Path, impatient: None) -> None:
    with held_elsewhere(tmp_path) as process, RunLock() as lock:
        with pytest.raises(ConfigError) as caught:
            lock.take(tmp_path, fresh=False)
        host = socket.gethostname()
        what, expected, fix = str(caught.value).splitlines()
        since = what.rpartition(", since ")
        assert (
            since[0]
            == f"log.dir = {tmp_path} is in use by another run: process {process.pid} on {host}"
        )
        assert expected == (
            "  expected: one run at a time in a folder: two would mix their metrics and remove one another's "
            "checkpoints"
        )
        assert fix == (
            f"  fix: wait for that run or stop it (on {host}: kill {process.pid}), or --log.dir ANOTHER_FOLDER"
        )


def test_death_releases(tmp_path: Path) -> None:
    """Within the patience that a run has for one that was just killed."""
    with held_elsewhere(tmp_path) as process:
        process.kill()
        with RunLock() as lock:
            lock.take(tmp_path, fresh=False)
            assert f'"pid": {os.getpid()}' in (tmp_path / "run.lock").read_text()


def test_end_releases(tmp_path: Path, impatient: None) -> None:
    with RunLock() as lock:
        lock.take(tmp_path, fresh=False)
    with held_elsewhere(tmp_path):
        pass


def test_child_that_lives_on_holds_nothing(tmp_path: Path, impatient: None) -> None:
    """A loader worker forked from a rank outlives it for some seconds."""
    code = HOLD.replace(
        "print('held'",
        "import os\nif os.fork() == 0:\n    sys.stdin.read()\n    os._exit(0)\nprint('held'",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "held\n"
    process.kill()
    process.wait()
    try:
        with RunLock() as lock:
            lock.take(tmp_path, fresh=False)
    finally:
        process.stdin.close()  # lets the child end
        process.stdout.close()


def _made(folder: Path) -> None:
    for name in ("logs", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "logs" / "rank-0000.log").touch()


def test_refused_request_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "now"
    _made(folder)
    with pytest.raises(ConfigError), RunLock() as lock:
        lock.take(folder, fresh=True)
        raise ConfigError("no", expected="yes", fix="try")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["accepted", "failed", "there before", "with another's file"])
def test_other_folders_stay(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "runs" / "now"
    _made(folder)
    error: Exception = ConfigError("no", expected="yes", fix="try")
    if how == "failed":
        error = RunError("no", expected="yes", fix="try")
    if how == "with another's file":
        (folder / "checkpoints" / "mine").touch()
    with pytest.raises(type(error)), RunLock() as lock:
        lock.take(folder, fresh=how != "there before")
        if how == "accepted":
            lock.keep()
        raise error
    assert (folder / "checkpoints").is_dir()
    assert (folder / "logs" / "rank-0000.log").exists() == (how != "with another's file")


def test_path_of_a_command_is_quoted_for_the_shell() -> None:
    assert run_lock.Words().resume("my runs/a") == "--checkpoint.resume 'my runs/a'"
