"""Ranks that are started here: exit codes, restarts, signals, and that nobody beyond this machine can reach them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ranks import warm
from ranks.faults import alive, last_step, rank_processes, started, wait_for
from ranks.runs import environment, prepare, run

pytestmark = pytest.mark.ranks

LONG = (
    "train",
    "config.yaml",
    "--mesh.dp",
    "2",
    "--mesh.device",
    "cpu",
    "--train.steps",
    "100000",
)


# --- how ranks end -----------------------------------------------------------------------------------------------


def _start() -> None:
    """`start_ranks` with an entry of this file: NAME FOLDER MAX_RESTARTS GRACE_S."""
    from threefold.mesh import local_ranks

    name, folder, max_restarts, grace_s = sys.argv[1:]
    options: dict[str, Any] = {"max_restarts": int(max_restarts), "grace_s": int(grace_s)}
    sys.exit(local_ranks.start_ranks(_entry, (name, folder), num_ranks=2, **options))


def _entry(name: str, folder: str) -> None:
    rank, restart = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if name in _WHEN_ASKED:
        signal.signal(signal.SIGTERM, _WHEN_ASKED[name])
    (Path(folder) / f"{restart}-{rank}").write_text(str(os.getpid()))
    sys.exit(globals()[f"_{name}"](rank, int(restart)))


def _done(rank: int, restart: int) -> int:
    return 0


def _wrong_request(rank: int, restart: int) -> int:
    return _together(restart, 2) if rank else _for_ever(rank, restart)


def _fails_twice(rank: int, restart: int) -> int:
    if rank == 1 and restart < 2:
        return _together(restart, 3)
    return 0 if restart == 2 else _for_ever(rank, restart)


def _raises(rank: int, restart: int) -> int:
    raise ValueError("not expected")


def _killed(rank: int, restart: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), _together(restart, signal.SIGKILL))
    return _for_ever(rank, restart)


def _tells(rank: int, restart: int) -> int:
    if rank == 0:
        time.sleep(0.3)
        print("what is wrong", file=sys.stderr)
    return 2


def _saves_for_long(rank: int, restart: int) -> int:
    if rank == 0:
        time.sleep(1.5)
    return 75


def _saves(rank: int, restart: int) -> int:
    return _for_ever(rank, restart)


def _deaf(rank: int, restart: int) -> int:
    return _for_ever(rank, restart)


_WHEN_ASKED: dict[str, Any] = {
    "saves_for_long": lambda *_: Path("seen", "asked again").touch(),
    "saves": lambda *_: os._exit(75),
    "deaf": signal.SIG_IGN,
}


def _together(restart: int, number: int) -> int:
    """The number, as soon as the other rank runs too."""
    while not Path("seen", f"{restart}-0").exists():
        time.sleep(0.01)
    return number


def _for_ever(rank: int, restart: int) -> int:
    time.sleep(1000)
    return 0


def ended(
    folder: Path,
    name: str,
    *,
    restarts: int = 0,
    grace_s: int = 100,
    first: Callable[[], None] | None = None,
) -> tuple[int, str, list[str]]:
    """(exit code, standard error, the ranks that ran: restart-rank)."""
    (folder / "seen").mkdir()
    given = (name, "seen", str(restarts), str(grace_s))
    done = run(_start, folder, given, environment(folder), timeout_s=120, first=first)
    return (
        done.returncode,
        done.stderr,
        sorted(path.name for path in (folder / "seen").iterdir()),
    )


def test_ranks_that_are_done(tmp_path: Path) -> None:
    assert ended(tmp_path, "done", restarts=2) == (0, "", ["0-0", "0-1"])


def _ends_while_looked_at() -> None:
    from threefold.mesh.local_ranks import _Ranks

    look = _Ranks._alive

    def slow_look(ranks: _Ranks) -> list[Any]:
        found = look(ranks)
        for process in found:
            process.join()
        return found

    _Ranks._alive = slow_look  # type: ignore[method-assign]


def test_ranks_that_end_while_they_are_looked_at(tmp_path: Path) -> None:
    """They are found gone after they were found alive: nothing would wake a wait that begins without them."""
    assert ended(tmp_path, "done", first=_ends_while_looked_at) == (0, "", ["0-0", "0-1"])


def test_wrong_request_is_not_started_again(tmp_path: Path) -> None:
    """The other rank, which would never end, is stopped."""
    assert ended(tmp_path, "wrong_request", restarts=3) == (2, "", ["0-0", "0-1"])


@pytest.mark.timing
def test_rank_that_reports_is_waited_for(tmp_path: Path) -> None:
    """All ranks find a wrong request, one says so: it must not be ended by those that leave before it."""
    assert ended(tmp_path, "tells", restarts=1)[:2] == (2, "what is wrong\n")


@pytest.mark.timing
def test_ranks_that_were_asked_to_stop_may_take_the_grace(tmp_path: Path) -> None:
    """A scheduler signals the ranks themselves; one is done with its save before the other."""
    assert ended(tmp_path, "saves_for_long", restarts=1)[::2] == (75, ["0-0", "0-1"])


def test_restarts_are_counted(tmp_path: Path) -> None:
    assert ended(tmp_path, "fails_twice", restarts=2) == (
        0,
        "",
        ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"],
    )


def test_last_restart_ends_with_the_ranks_code(tmp_path: Path) -> None:
    assert ended(tmp_path, "fails_twice", restarts=1)[::2] == (3, ["0-0", "0-1", "1-0", "1-1"])


def test_unexpected_error_is_shown(tmp_path: Path) -> None:
    code, errors, _ = ended(tmp_path, "raises")
    assert code == 1 and "ValueError: not expected" in errors


def test_killed_rank_is_named(tmp_path: Path) -> None:
    code, errors, _ = ended(tmp_path, "killed")
    process = (tmp_path / "seen" / "0-1").read_text()
    assert code == 1
    assert errors == (
        f"rank 1 (process {process}) was ended by SIGKILL\n"
        "  expected: all ranks to run until the end\n"
        "  fix: after SIGKILL look for `Out of memory` in the kernel's log (dmesg)\n"
    )


def signalled(
    folder: Path, name: str, number: int, *, grace_s: int = 100, first: Any = None
) -> warm.Running:
    """Two ranks that were asked to stop as soon as both were there."""
    (folder / "seen").mkdir()
    going = warm.Running(
        _start, folder, (name, "seen", "2", str(grace_s)), environment(folder), first=first
    )
    wait_for(
        lambda: len(list((folder / "seen").iterdir())) == 2,
        f"two ranks: {going.err()}",
        within_s=30,
    )
    os.kill(going.process, number)
    return going


@pytest.mark.timing
def test_signal_reaches_the_ranks_and_is_no_failure(tmp_path: Path) -> None:
    with signalled(tmp_path, "saves", signal.SIGTERM) as going:
        assert going.wait(20) == 75
        assert len(list((tmp_path / "seen").iterdir())) == 2


@pytest.mark.timing
def test_ranks_that_do_not_heed_it_are_killed_after_the_grace(tmp_path: Path) -> None:
    with signalled(tmp_path, "deaf", signal.SIGTERM, grace_s=1) as going:
        assert going.wait(20) == 128 + signal.SIGTERM
        processes = [int(path.read_text()) for path in (tmp_path / "seen").iterdir()]
        assert not any(map(alive, processes))


def _ignore_hangup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.mark.timing
def test_nohup_protects_the_ranks(tmp_path: Path) -> None:
    """A terminal that is closed sends SIGHUP to the launcher, which took it back and killed its ranks."""
    with signalled(
        tmp_path, "for_ever", signal.SIGHUP, grace_s=1, first=_ignore_hangup
    ) as going:
        time.sleep(2)
        assert going.running()
        os.kill(going.process, signal.SIGTERM)
        assert going.wait(20) == 128 + signal.SIGTERM


def _run_cold(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, which nothing has been imported in."""
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=50,
    )


INTERRUPTED = """
import os, signal, sys, time
from multiprocessing.process import BaseProcess

from threefold.mesh import local_ranks

start = BaseProcess.start


def interrupted(process):
    start(process)
    for each in (process.pid, os.getpid()):
        os.kill(each, signal.SIGINT)


if __name__ == "__main__":
    local_ranks.preload(())
    BaseProcess.start = interrupted
    sys.exit(local_ranks.start_ranks(time.sleep, (60,), num_ranks=2))
"""
LOST = INTERRUPTED.replace("    start(process)", "    raise EOFError")


@pytest.mark.parametrize(
    ("program", "code", "error"),
    [(INTERRUPTED, 130, ""), (LOST, 1, "the process that the ranks are forked from was ended")],
    ids=["interrupted", "without their server"],
)
def test_ranks_that_are_starting(program: str, code: int, error: str, tmp_path: Path) -> None:
    """A rank that was just forked lost a Ctrl-C, or printed where it found it; the others waited for it."""
    done = _run_cold(program, tmp_path)
    assert (done.returncode, done.stderr.partition("\n")[0]) == (code, error)


KILLED_AFTER_ANOTHER = """
import os, signal, sys, time

from threefold.mesh import local_ranks


def entry():
    if os.environ["RANK"] == "0":
        while not os.path.exists("ready"):
            time.sleep(0.01)
        sys.exit(1)
    open("ready", "w").close()
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(local_ranks.start_ranks(entry, (), num_ranks=2, ended=lambda rank, code, error: print(rank, code)))
"""


def test_killed_rank_is_named_though_another_is_known_to_have_ended_before(
    tmp_path: Path,
) -> None:
    """The others of a killed rank lose their connections, and may be reaped first: it was named nowhere."""
    done = _run_cold(KILLED_AFTER_ANOTHER, tmp_path)
    assert (done.returncode, done.stdout) == (1, "1 -9\n")
    assert re.match(r"rank 1 \(process \d+\) was ended by SIGKILL\n  expected: ", done.stderr)


SCRIPT = """
import threefold
print("the script")
result = threefold.train({"train": {"steps": 1, "global_batch": 8}, "mesh": {"dp": 2, "device": "cpu"},
                          "data": {"source": "corpus", "seq_len": 32, "num_workers": 1}, "log": {"dir": "scripted"},
                          "model": {"config": {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4,
                                               "intermediate_size": 64, "num_hidden_layers": 1}}})
print(result.exit_code)
"""


def test_script_without_a_guard_trains_on_ranks(folder: Path) -> None:
    """As the README shows it; each rank imported the script again, and died of starting ranks itself."""
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("the script") == 1 and lines[-1] == "0"
    assert last_step(folder / "scripted") == 1


# --- who can reach them --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    prepare(folder)
    return folder


def tree(process: int) -> Iterator[int]:
    """A process and all that it has started, directly or not."""
    yield process
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from tree(int(child))


def listeners(processes: list[int]) -> set[tuple[str, int]]:
    """(address, port) of every socket on which one of the processes listens."""
    inodes = set()
    for process in processes:
        for file in Path(f"/proc/{process}/fd").glob("*"):
            try:
                inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                address, port = local.split(":")
                words = [
                    bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)
                ]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def other_addresses() -> list[str]:
    """Addresses of this machine besides 127.0.0.1; 127.0.0.2 is one on Linux."""
    found = ["127.0.0.2"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: the kernel chooses the address to send from.
            probe.connect(("192.0.2.1", 9))
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    return found


def refuse_strangers(processes: list[int]) -> None:
    """All that the processes open can be reached through the loopback interface's own address only."""
    found = listeners(processes)
    assert len(found) > 2  # the store, and gloo of both ranks
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
    for _, port in sorted(found):
        for address in other_addresses():
            with pytest.raises(OSError), socket.create_connection((address, port), timeout=1):
                pass


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timing
def test_local_run_listens_on_loopback_only_also_after_a_restart(folder: Path) -> None:
    """torch's agent listened on all interfaces, and unpickled what anybody wrote into its store."""
    run = folder / "open"
    arguments = (*LONG, "--log.dir", "open", "--checkpoint.every", "2", "--max-restarts", "1")
    with started(folder, *arguments) as going:
        wait_for(lambda: last_step(run) >= 3, lambda: f"step 3: {going.output()}")
        refuse_strangers(list(tree(going.launcher)))
        before = rank_processes(run)
        os.kill(before[1], signal.SIGKILL)
        wait_for(
            lambda: rank_processes(run)[0] != before[0], lambda: f"a restart: {going.output()}"
        )
        reached = last_step(run)
        wait_for(lambda: last_step(run) > reached, lambda: f"a step: {going.output()}")
        refuse_strangers(list(tree(going.launcher)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timing
def test_killed_launcher_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = folder / "gone"
    with started(folder, *LONG, "--log.dir", "gone", "--data.num_workers", "1") as going:
        wait_for(lambda: last_step(run) >= 3, lambda: f"step 3: {going.output()}")
        processes = list(tree(going.launcher))
        # The launcher, its server, the tracker of shared memory, two ranks.
        assert len(processes) >= 5
        os.kill(going.launcher, signal.SIGKILL)
        wait_for(
            lambda: not any(map(alive, processes)), "the end of all processes", within_s=15
        )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("threefold")] == []
