"""`threefold submit slurm` on a real Slurm: a job on two nodes is told to save, queues itself again and goes on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from launchers import slurm
from launchers.launches import LAUNCHES, Program, srun, two
from launchers.places import check_places, places
from ranks.faults import last_step, wait_for
from ranks.runs import command, curve, environment, prepare

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.timing,
    pytest.mark.timeout(400),
    pytest.mark.skipif(slurm.why_not() is not None, reason=str(slurm.why_not())),
]

KEYS = (
    "--mesh.dp",
    "2",
    "--mesh.device",
    "cpu",
    "--train.steps",
    "200",
    "--log.every",
    "1",
    "--log.dir",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


def test_tasks_know_their_places(cluster: slurm.Cluster, tmp_path: Path) -> None:
    def start(folder: Path, program: Program, num_ranks: int) -> tuple[int, str]:
        return srun(cluster, folder, program, num_ranks)

    check_places(places(tmp_path, start, 4), LAUNCHES["Slurm"])


def test_two_tasks_train_as_the_command_alone(
    cluster: slurm.Cluster, launch_folder: Path, losses_of_two: list[tuple[float, float]]
) -> None:
    """One on each of two hosts."""
    run = launch_folder / "two-Slurm"
    code, printed = srun(cluster, launch_folder, two(run), 2)
    assert code == 0, printed
    assert "dp=2 x cp=1 x tp=1 on 2 ranks" in printed
    assert curve(run) == losses_of_two


def test_job_that_is_told_to_save_starts_itself_again(
    cluster: slurm.Cluster, folder: Path
) -> None:
    whole = command(folder, "train", "config.yaml", *KEYS, "whole")
    assert whole.returncode == 0, whole.stderr
    env = {**environment(folder), "OMP_NUM_THREADS": "1"}

    def on_node(*arguments: str) -> str:
        done = cluster.run(*arguments, cwd=folder, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    submitted = on_node(
        *(sys.executable, "-m", "threefold", "submit", "slurm", "config.yaml", *KEYS, "run"),
        *("--nodes", "2", "--time", "10", "--name", "test"),
    )
    job = re.findall(r"Submitted batch job (\d+)", submitted)[0]

    def printed() -> str:
        path = folder / f"test-{job}.out"
        return path.read_text() if path.exists() else ""

    wait_for(lambda: last_step(folder / "run") >= 10, "step 10", within_s=180)
    # What Slurm does ahead of the limit: the signal goes to the ranks, not to the script.
    on_node("scancel", "--signal=USR1", job)
    wait_for(lambda: "stopped by a signal after step" in printed(), "the stop", within_s=180)
    stopped = last_step(folder / "run")
    assert 10 <= stopped < 200
    wait_for(
        lambda: "JobState=PENDING" in on_node("scontrol", "show", "job", job),
        "the queued job",
        within_s=180,
    )
    # A job that was put back waits for two minutes. An administrator may shorten that, but not to nothing: within a
    # second nodes still take the new start for the old one, whose right to run has ended.
    on_node("scontrol", "update", f"JobId={job}", "StartTime=now+5seconds")
    wait_for(lambda: "done: 200 steps" in printed(), "the run's end", within_s=180)
    text = printed()
    assert "restart 1: by slurm" in text and "resumed from run/checkpoints/step-" in text
    assert curve(folder / "run") == curve(folder / "whole")
    wait_for(
        lambda: "JobState=COMPLETED" in on_node("scontrol", "show", "job", job), "the job's end"
    )
    assert (folder / "run" / "submitted.yaml").exists()


def test_job_that_crashes_is_submitted_again_without_its_node(
    cluster: slurm.Cluster, folder: Path
) -> None:
    env = environment(folder)
    rank = folder / "rank.sh"
    rank.write_text(
        "#!/bin/sh\nhostname >> ran.txt\n[ $(wc -l < ran.txt) -gt 1 ] && exit $AT_LAST\nexit 1\n"
    )
    rank.chmod(0o755)

    def ran(at_last: int, *options: str) -> list[str]:
        (folder / "ran.txt").unlink(missing_ok=True)
        submit = (
            sys.executable,
            "-m",
            "threefold",
            "submit",
            "slurm",
            "config.yaml",
            "--mesh.dp",
            "1",
            *options,
        )
        told = (
            "--mesh.device",
            "cpu",
            "--name",
            "again",
            "--python",
            str(rank),
            "--retries",
            "1",
        )
        done = cluster.run(*submit, *told, cwd=folder, env={**env, "AT_LAST": str(at_last)})
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for(
            lambda: not cluster.run("squeue", "--noheader", cwd=folder, env=env).stdout.strip(),
            "the end",
        )
        return (folder / "ran.txt").read_text().split()

    first, second = ran(0)
    assert first != second
    assert (
        sum(
            f"retry 1 of 1, without {first}" in path.read_text()
            for path in folder.glob("again-*.out")
        )
        == 1
    )
    assert len(ran(1)) == 2  # crashes once more, and is not submitted a third time
    rank.write_text("#!/bin/sh\nhostname >> ran.txt\nexit 2\n")
    assert len(ran(0)) == 1  # a config that is refused is so again


def test_rank_0s_node_without_a_name_is_told(cluster: slurm.Cluster, folder: Path) -> None:
    env = {**environment(folder), "MASTER_ADDR": "nowhere.invalid"}
    arguments = ("train", "config.yaml", "--mesh.dp", "2", "--mesh.timeout_s", "8")
    done = cluster.run(
        *(
            "srun",
            "--nodes=2",
            "--ntasks-per-node=1",
            sys.executable,
            "-m",
            "threefold",
            *arguments,
        ),
        cwd=folder,
        env=env,
    )
    assert done.returncode == 1
    assert "the name nowhere.invalid cannot be resolved here" in done.stderr, done.stderr
