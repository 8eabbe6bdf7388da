"""Two hosts under torchrun: one is cut off, the other's report names it, and started again the run goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ranks.faults import last_step, wait_for
from ranks.runs import command, environment, metrics, prepare
from ranks.two_hosts import Host, hosts, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

RUN = (
    "--mesh.dp",
    "2",
    "--log.dir",
    "run",
    "--train.steps",
    "400",
    "--checkpoint.every",
    "10",
    "--log.every",
    "10",
)
LIMITS = ("--log.stall_s", "4", "--train.timeout_s", "8")


def _start(
    folder: Path, both: Sequence[Host], attempt: int, *arguments: str
) -> list[subprocess.Popen[bytes]]:
    env = {**environment(folder), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    started = []
    for rank, host in enumerate(both):
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
        ]
        torchrun += [
            "--node-rank",
            str(rank),
            "--master-addr",
            both[0].address,
            "--master-port",
            "29500",
        ]
        started.append(
            host.start(
                [*torchrun, "-m", "threefold", "train", "config.yaml", *RUN, *arguments],
                cwd=folder,
                env=env,
                output=folder / f"host-{rank}-{attempt}.txt",
            )
        )
    return started


def test_host_that_is_cut_off_is_named_and_the_run_goes_on_after_a_restart(
    tmp_path: Path,
) -> None:
    prepare(tmp_path)
    with hosts("tfhost", 2) as both:
        first = _start(tmp_path, both, 1, *LIMITS)

        def output(rank: int, attempt: int) -> str:
            return (tmp_path / f"host-{rank}-{attempt}.txt").read_text()

        wait_for(
            lambda: last_step(tmp_path / "run") >= 30, f"step 30: {output(0, 1)}", within_s=180
        )
        both[1].cut_off()
        assert first[0].wait(90) == 1
        gone = (
            r"no progress for \d+ s: rank 1 of host tfhost-2 \(process \d+\) has given no sign of life for \d+ s, "
            r"last in (\w+ of step \d+|[\w ]+, before its first step): its process or its host is gone, frozen or "
        )
        assert re.search(gone, output(0, 1)), output(0, 1)
        assert "expected: progress within train.timeout_s = 8 s" in output(0, 1)
        wait_for(
            lambda: "this host is cut off" in output(1, 1),
            "the other host's own report",
            within_s=180,
        )
        assert re.search(
            r"rank 1 of host tfhost-2, in \w+ of step \d+, has not reached the run's store",
            output(1, 1),
        )
        both[1].kill_all()
        both[1].connect()
        reached = last_step(tmp_path / "run")
        second = _start(tmp_path, both, 2)
        assert [process.wait(150) for process in second] == [0, 0], output(0, 2)
        assert "resumed from run/checkpoints/step-" in output(0, 2)
        assert 30 <= reached < last_step(tmp_path / "run") == 400
    done = command(tmp_path, "train", "config.yaml", *RUN[:2], "--log.dir", "whole", *RUN[4:])
    assert done.returncode == 0, done.stderr
    # A start logs its first step too, which the run that was not interrupted does not.
    whole, found = metrics(tmp_path / "whole"), metrics(tmp_path / "run")
    for step in whole:
        assert (found[step]["loss"], found[step]["grad_norm"]) == (
            whole[step]["loss"],
            whole[step]["grad_norm"],
        ), step
    proof = command(tmp_path, "data", "audit", "run")
    assert proof.returncode == 0 and "2 starts" in proof.stdout, proof.stderr


_STRANGER = """
import socket, sys
with socket.create_connection((sys.argv[1], 29500), timeout=5) as proxy:
    proxy.sendall(bytes(200))
    heard = b""
    while piece := proxy.recv(4096):
        heard += piece
print(heard[:18], len(heard))
"""


@pytest.mark.parametrize("token", [None, "a token that nobody guesses"], ids=["open", "token"])
def test_who_can_join_a_run_on_two_hosts(tmp_path: Path, token: str | None) -> None:
    prepare(tmp_path)
    (tmp_path / "stranger.py").write_text(_STRANGER)
    with hosts("tfdoor", 3) as (first, second, third):
        env = {
            **environment(tmp_path),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": "2",
        }
        env |= {
            "MASTER_ADDR": first.address,
            "MASTER_PORT": "29500",
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }
        env |= {"THREEFOLD_TOKEN": token} if token is not None else {}
        command = [sys.executable, "-m", "threefold", "train", "config.yaml", *RUN]
        for rank, host in enumerate((first, second)):
            host.start(
                command,
                cwd=tmp_path,
                env={**env, "RANK": str(rank)},
                output=tmp_path / f"{rank}.txt",
            )
        wait_for(
            lambda: last_step(tmp_path / "run") >= 10,
            f"step 10: {(tmp_path / '0.txt').read_text()}",
        )
        head = (tmp_path / "0.txt").read_text()
        if token is None:
            assert (
                "  hosts  2: no THREEFOLD_TOKEN, so every host that reaches them must be trusted"
                in head
            )
            return
        assert "  hosts  2: only ranks with the token can join" in head
        asked = third.command([sys.executable, str(tmp_path / "stranger.py"), first.address])
        heard = subprocess.run(asked, capture_output=True, text=True, timeout=180)
        # A greeting, a random number, and that it was refused.
        assert heard.stdout == f"{b'threefold proxy 1' + bytes([10])!r} {18 + 32 + 1}\n", (
            heard.stderr
        )
