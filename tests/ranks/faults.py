"""Ranks that stall, go wrong or are killed: whole runs of the command for the tests of faults.

`planted` starts ranks as the command does, and changes what one of them does. `Command` is the command itself, which
can be killed like any.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ranks.runs import environment, run

MESH = ("--mesh.dp", "2", "--mesh.tp", "2")


def planted(
    folder: Path, plant: str, *arguments: str, sizes: tuple[int, int] = (2, 2)
) -> subprocess.CompletedProcess:
    """A whole run of dp x tp ranks, in each of which a function of `ranks.plants` was called with the rank first."""
    words = (plant, str(sizes[0]), str(sizes[1]), *arguments)
    return run(_train_planted, folder, words, environment(folder), timeout_s=180)


def _train_planted() -> None:
    """`threefold train config.yaml ...` as it starts its ranks, with something planted in them."""
    from threefold.commands.arguments import split
    from threefold.config import loading
    from threefold.run import start

    plant, dp, tp, *arguments = sys.argv[1:]
    _, overrides = split(arguments)
    overrides += [("mesh.dp", dp), ("mesh.tp", tp), ("mesh.device", "cpu")]
    # Plants count the run's own steps, which probes would take too.
    overrides += [("model.admission", "off")]
    loaded = loading.load("config.yaml", overrides, environ={})
    start._rank_entry = partial(_planted_rank, plant)
    sys.exit(start.train_command(loaded))


def _planted_rank(plant: str, loaded: Any, topology: Any, why: str) -> int:
    from ranks import plants
    from threefold.run.start import _rank_entry

    getattr(plants, plant)(int(os.environ["RANK"]))
    return _rank_entry(loaded, topology, why)


class Command:
    """`threefold ...` while it runs, in a process group of its own.

    Cold: what dies with a killed launcher, its server of ranks too, is what is tested.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._file = (folder / "output.txt").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "threefold", *arguments],
            cwd=folder,
            env=environment(folder),
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def launcher(self) -> int:
        return self._process.pid

    def output(self) -> str:
        return Path(self._file.name).read_text()

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        return self._process.wait(timeout_s)

    def running(self) -> bool:
        return self._process.poll() is None

    def signal_all(self, number: int) -> None:
        """As a terminal does with Ctrl-C."""
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)
        self._file.close()


@contextlib.contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Command]:
    """The command, killed with all it started when the test is over."""
    run = Command(folder, *arguments)
    try:
        yield run
    finally:
        run.close()


def wait_for(
    what: Callable[[], Any], why: str | Callable[[], str], *, within_s: float = 120.0
) -> Any:
    """What `what` returns as soon as that is true; an AssertionError with `why`, asked for then, after `within_s`."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {within_s:g} s: {why if isinstance(why, str) else why()}")


def rank_processes(run: Path) -> dict[int, int]:
    """Rank to process of those that a run has logged last; they may be gone."""
    found = {}
    for path in (run / "logs").glob("rank-*.log"):
        numbers = re.findall(r'{"process": (\d+)}$', path.read_text(), re.MULTILINE)
        if numbers:
            found[int(path.stem.removeprefix("rank-"))] = int(numbers[-1])
    return found


def alive(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def last_step(run: Path) -> int:
    """The newest step in a run's metrics, 0 before the first."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line), default=0)
