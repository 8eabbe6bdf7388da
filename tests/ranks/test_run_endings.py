"""Nothing is left of a run, however it ends: ranks, loaders' workers, stopped ones too, and the servers of both.

And what has ended it is in its record.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from ranks.faults import alive, last_step, rank_processes, wait_for
from ranks.runs import environment, prepare
from threefold.explain.answer import answer
from threefold.explain.evidence import gather
from threefold.explain.explain import Status

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

WITHIN_S = 10.0
RUN = (
    "--mesh.tp",
    "1",
    "--data.num_workers",
    "2",
    "--log.dir",
    "run",
    "--train.steps",
    "100000",
)
# On a machine with much to do, a start has pauses too.
STALLS = ("--log.stall_s", "4", "--train.timeout_s", "10")

GRACE = ("--checkpoint.grace_s", "5")


class Started:
    """A command, and all processes that have its mark in their environment, whoever has adopted them since."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark, self.run = uuid.uuid4().hex, folder / "run"
        self._output = (folder / "output.txt").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "threefold", "train", "config.yaml", *RUN, *arguments],
            cwd=folder,
            env={**environment(folder), "ENDINGS_MARK": self.mark},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def processes(self) -> dict[int, str]:
        """Number and command of each that is alive."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes() and alive(
                    int(path.name)
                ):
                    found[int(path.name)] = (
                        (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:120]
                    )
            except OSError:
                continue
        return found

    def server_of(self, process: int) -> int:
        return int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0])

    def workers_of(self, rank: int) -> list[int]:
        """The processes that were forked from the server that the rank has started."""
        processes = self.processes()
        return [
            each
            for each in processes
            if each != rank
            and (server := self.server_of(each)) in processes
            and self.server_of(server) == rank
        ]

    def output(self) -> str:
        return Path(self._output.name).read_text()

    def close(self) -> None:
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        self.process.wait(20)
        self._output.close()


def _all(number: int) -> Callable[[Started], None]:
    return lambda going: os.killpg(going.process.pid, number)


def _launcher_killed(going: Started) -> None:
    os.kill(going.process.pid, signal.SIGKILL)


def _rank(number: int) -> Callable[[Started], None]:
    return lambda going: os.kill(rank_processes(going.run)[1], number)


def _worker(number: int) -> Callable[[Started], None]:
    return lambda going: os.kill(going.workers_of(rank_processes(going.run)[0])[0], number)


def _worker_stopped_then_asked(going: Started) -> None:
    os.kill(going.workers_of(rank_processes(going.run)[0])[0], signal.SIGSTOP)
    os.kill(going.process.pid, signal.SIGTERM)


def _server_killed(going: Started) -> None:
    os.kill(going.server_of(rank_processes(going.run)[0]), signal.SIGKILL)


# name: (what happens at step 3, None: it ends by itself; how the command ends; ranks; its own arguments)
ENDINGS: dict[
    str, tuple[Callable[[Started], None] | None, tuple[int, ...], int, tuple[str, ...]]
] = {
    "normal": (None, (0,), 2, ("--train.steps", "4")),
    "SIGTERM": (_all(signal.SIGTERM), (75,), 2, ()),
    "SIGINT": (_all(signal.SIGINT), (75,), 2, ()),
    "SIGHUP": (_all(signal.SIGHUP), (75,), 2, ()),
    "SIGUSR1": (_all(signal.SIGUSR1), (75,), 2, ()),
    "launcher killed": (_launcher_killed, (-9,), 2, ()),
    "rank killed": (_rank(signal.SIGKILL), (1,), 2, ()),
    "error in a rank": (None, (1,), 2, ("--optimizer.lr", "1e30", "--train.grad_clip", "0")),
    "worker killed": (_worker(signal.SIGKILL), (1,), 2, ()),
    "worker stopped": (_worker(signal.SIGSTOP), (1,), 2, STALLS),
    "worker stopped, of one rank, SIGTERM": (
        _worker_stopped_then_asked,
        (75, 1),
        1,
        (*STALLS, *GRACE),
    ),
    "server of the ranks killed": (_server_killed, (1,), 2, ()),
    "refused after the ranks had started": (
        None,
        (2,),
        2,
        ("--train.global_batch", "100000", "--data.tail", "drop"),
    ),
    "rank stopped": (_rank(signal.SIGSTOP), (1,), 2, STALLS),
}
# What `threefold explain RUN` says of them: how it ended, the rank, the page; of a stop, by what.
EXPLAINED: dict[str, tuple[str, int | None, str]] = {
    "launcher killed": ("vanished", None, "killed"),
    "rank killed": ("signal", 1, "killed"),
    "error in a rank": ("numbers", None, "nan-loss"),
    "worker killed": ("worker", 0, "loader-worker"),
    "worker stopped": ("worker", 0, "loader-worker"),
    "server of the ranks killed": ("signal", None, "killed"),
    "rank stopped": ("stall", 1, "threefold"),
}
STOPPED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
LOST_WORKER = r"""worker process \d+ of the loader has ended: SIGKILL
  expected: 2 workers that read rows ahead for this rank \(data\.num_workers\); the kernel kills one \(SIG.*
  fix: --data\.num_workers 1, or more memory; `dmesg -T \| grep -i oom` on this host shows whether the kernel did it; .*
"""
SHORT = (
    "worker killed",
    "normal",
    "SIGHUP",
    "launcher killed",
    "rank killed",
    "worker stopped",
    "worker stopped, of one rank, SIGTERM",
)


def check_explained(ending: str, going: Started) -> None:
    if ending in STOPPED or ending == "normal":
        found = answer(gather([going.run]))
        assert found.status is Status.FINISHED
        by = [note for note in found.notes if note.startswith("it stopped as asked by ")]
        assert [note.split()[5] for note in by] == ([ending] if ending in STOPPED else []), by
    if ending in EXPLAINED:
        explanation = answer(gather([going.run])).explanation
        assert explanation is not None and explanation.ending is not None
        told = explanation.ending
        assert (told.how, explanation.line.rank, explanation.known.name) == EXPLAINED[ending], (
            explanation
        )
        assert told.step >= 3 or ending == "error in a rank"
        assert told.how != "worker" or told.phase == "data"
    if ending == "worker killed":
        assert re.search(LOST_WORKER, going.output()), going.output()
        assert "Traceback" not in going.output()


@pytest.mark.parametrize(
    "ending",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in ENDINGS],
)
def test_nothing_is_left_of_a_run(tmp_path: Path, ending: str) -> None:
    happens, codes, ranks, arguments = ENDINGS[ending]
    prepare(tmp_path)
    going = Started(tmp_path, "--mesh.dp", str(ranks), *arguments)
    try:
        if happens is not None:
            wait_for(lambda: last_step(going.run) >= 3, lambda: f"step 3: {going.output()}")
            happens(going)
        code = going.process.wait(120)
        assert code in codes, going.output()
        until = time.monotonic() + WITHIN_S
        while (left := going.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, left
        check_explained(ending, going)
        print(
            f"{ending}: exit {code}, nothing left {WITHIN_S - (until - time.monotonic()):.1f} s after"
        )
    finally:
        going.close()


def _waits_for_good(going: Started) -> bool:
    """Its next step waits, as was said of that step: a busy machine has had pauses in earlier ones."""
    step = last_step(going.run)
    time.sleep(3.0)
    return step == last_step(going.run) and f"is in data of step {step + 1}" in going.output()


def test_one_rank_says_what_it_waits_for(tmp_path: Path) -> None:
    """It is not ended, because a source may be slow; once it is asked to stop, it is."""
    prepare(tmp_path)
    going = Started(tmp_path, "--mesh.dp", "1", *STALLS, *GRACE)
    try:
        wait_for(lambda: last_step(going.run) >= 3, lambda: f"step 3: {going.output()}")
        for worker in going.workers_of(rank_processes(going.run)[0]):
            os.kill(worker, signal.SIGSTOP)
        wait_for(lambda: _waits_for_good(going), going.output, within_s=90)
        assert "_get_data" in going.output() and going.process.poll() is None
        os.kill(going.process.pid, signal.SIGTERM)
        assert going.process.wait(60) == 1
        assert (
            "within checkpoint.grace_s of the signal that asked the run to stop"
            in going.output()
        )
    finally:
        going.close()
