"""torchrun that starts ranks again by itself: after a killed rank, and with one host fewer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.processes import free_port
from ranks.faults import alive, last_step, rank_processes, wait_for
from ranks.runs import command, curve, environment, metrics, prepare
from ranks.two_hosts import Host, hosts, why_not

pytestmark = [pytest.mark.launchers, pytest.mark.timing, pytest.mark.timeout(280)]

TORCHRUN = Path(sys.executable).parent / "torchrun"
RUN = ("--log.every", "1", "--checkpoint.every", "10", "--log.dir")
STEPS = 100


def test_rank_that_is_killed_is_started_again_and_the_losses_stay(tmp_path: Path) -> None:
    prepare(tmp_path)
    mesh = ("--mesh.dp", "2", "--train.steps", str(STEPS))
    whole = command(tmp_path, "train", "config.yaml", *mesh, *RUN, "whole")
    assert whole.returncode == 0, whole.stderr
    place = ["--nproc-per-node", "2", "--max-restarts", "2", "--master-port", str(free_port())]
    output = tmp_path / "torchrun.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [
                str(TORCHRUN),
                *place,
                "-m",
                "threefold",
                "train",
                "config.yaml",
                *mesh,
                *RUN,
                "run",
            ],
            cwd=tmp_path,
            env={**environment(tmp_path), "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: last_step(tmp_path / "run") >= 22, "step 22", within_s=180)
        os.kill(rank_processes(tmp_path / "run")[1], signal.SIGKILL)
        assert process.wait(150) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    printed = output.read_text()
    assert "restart 1 of 2: a rank had failed" in printed
    assert "resumed from run/checkpoints/step-000000" in printed
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    proof = command(tmp_path, "data", "audit", "run")
    assert proof.returncode == 0 and "2 starts" in proof.stdout, proof.stderr


@pytest.mark.long  # tests/ranks/test_two_hosts.py: a host that is cut off, and the run that goes on
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_host_that_is_lost_and_the_run_goes_on_with_the_rest(tmp_path: Path) -> None:
    """dp shrinks from 2 to 1; the global batch and the order of the samples stay."""
    prepare(tmp_path)
    run = ("--mesh.dp", "auto", "--mesh.tp", "2", "--train.steps", str(STEPS), *RUN)
    with hosts("tflost", 2) as both:
        agents = [_agent(tmp_path, both, number, run) for number in range(2)]
        output = tmp_path / "host-0.txt"
        wait_for(lambda: last_step(tmp_path / "run") >= 22, "step 22", within_s=180)
        both[1].kill_all()
        reached = last_step(tmp_path / "run")
        assert agents[0].wait(200) == 0, output.read_text()
        agents[1].wait(10)
    printed = output.read_text()
    assert (
        "dp=2 x cp=1 x tp=2 on 4 ranks" in printed
        and "dp=1 x cp=1 x tp=2 on 2 ranks" in printed
    )
    assert reached < STEPS and last_step(tmp_path / "run") == STEPS
    whole = command(tmp_path, "train", "config.yaml", "--mesh.dp", "2", *run[2:], "whole")
    assert whole.returncode == 0, whole.stderr
    found, expected = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    assert found.keys() == expected.keys()
    for step in expected:
        # The promise for a resume on another mesh (docs/resume.md).
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], abs=1e-4), step
        assert found[step]["grad_norm"] == pytest.approx(
            expected[step]["grad_norm"], rel=1e-3
        ), step
        assert found[step]["samples"] == expected[step]["samples"]
    proof = command(tmp_path, "data", "audit", "run")
    assert proof.returncode == 0 and "2 starts" in proof.stdout, proof.stdout + proof.stderr
    assert not any(alive(process) for process in rank_processes(tmp_path / "run").values())


def _agent(
    folder: Path, both: list[Host], number: int, run: tuple[str, ...]
) -> subprocess.Popen[bytes]:
    """torchrun on one of the hosts; the first one keeps the rendezvous, so it must stay."""
    conf = f"is_host={'true' if number == 0 else 'false'},join_timeout=60,last_call_timeout=2,read_timeout=20"
    place = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
        "--rdzv-backend",
        "c10d",
    ]
    place += [
        "--rdzv-id",
        "lost",
        "--rdzv-endpoint",
        f"{both[0].hostname}:29400",
        "--rdzv-conf",
        conf,
    ]
    place += ["--local-addr", both[number].address]
    env = {
        **environment(folder),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    arguments = [str(TORCHRUN), *place, "-m", "threefold", "train", "config.yaml", *run, "run"]
    return both[number].start(
        arguments, cwd=folder, env=env, output=folder / f"host-{number}.txt"
    )
