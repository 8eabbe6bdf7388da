"""Launchers that are set up wrongly: each ends within `mesh.timeout_s`, and one message names the cause.

The texts themselves are in tests/errors/test_launch_errors.py; here real processes end with them.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from launchers.processes import free_port, rank, together
from ranks.runs import prepare

pytestmark = pytest.mark.timing

TIMEOUT_S = 3.0
# Interpreter, config and model's config are read before the ranks meet, on a machine that may be busy.
SLACK_S = 3.0
RUN = (
    "train",
    "config.yaml",
    "--train.steps",
    "1",
    "--mesh.timeout_s",
    str(TIMEOUT_S),
    "--log.dir",
    "run",
)

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
TORCH = rank(0, 2, 29500)

ALONE = {
    "RANK alone": (
        {"RANK": "0"},
        "RANK set, but WORLD_SIZE and MASTER_ADDR and MASTER_PORT not set",
    ),
    "no master": ({"RANK": "0", "WORLD_SIZE": "2"}, "but MASTER_ADDR and MASTER_PORT not"),
    "no number": ({**TORCH, "WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' is not a number"),
    "rank beyond the world": ({**TORCH, "RANK": "2"}, "RANK = 2 with WORLD_SIZE = 2"),
    "local rank beyond the machine": (
        {**TORCH, "LOCAL_RANK": "5"},
        "local rank 5 of 2 ranks on this machine",
    ),
    "one rank exported for all tasks": (
        {**SLURM, **TORCH},
        "RANK = 0 and WORLD_SIZE = 2, but slurm started rank 1 of 2",
    ),
    "a torchrun for each task": (
        {**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "x", "GROUP_WORLD_SIZE": "1"},
        "SLURM_STEP_NUM_TASKS = 2, but this torchrun has 2 ranks on one host",
    ),
    "Slurm without srun": (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
        "srun has not started this process",
    ),
    "SageMaker without a launcher": (
        {"SM_HOSTS": '["a", "b"]', "SM_HPS": "{}"},
        "SM_HOSTS has 2 hosts, but no launcher",
    ),
    "mpirun on hosts without a master": (
        {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        },
        "2 ranks on several hosts, but MASTER_ADDR is not set",
    ),
    "a pod without torchrun": (
        {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "8"},
        "PET_NPROC_PER_NODE = 8, but this process is the only one of its pod",
    ),
    "a world that is not the mesh": (
        {**TORCH, "DP_SIZE": "3"},
        "mesh.dp x mesh.cp x mesh.tp = 3 x 1 x 1 = 3, but 2 ranks were started",
    ),
    "two answers about the mesh": (
        {**TORCH, "DP_SIZE": "1", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
        "DP_SIZE = 1, but accelerate's PARALLELISM_CONFIG_ sizes give dp = 2",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ALONE)
def test_variables_that_are_wrong(folder: Path, name: str) -> None:
    environ, said = ALONE[name]
    # A managed job's failure is written down in its tree; here that is the test's folder.
    (ended,) = together(folder, [{**environ, "SAGEMAKER_BASE_DIR": str(folder)}], *RUN)
    assert ended.code == 2, ended.err
    assert said in ended.err
    assert ended.err.count("  fix: ") == 1 and "Traceback" not in ended.err
    assert ended.seconds < TIMEOUT_S + SLACK_S
    assert not (folder / "run").exists()
    assert (folder / "output" / "failure").exists() == ("SM_HPS" in environ)


def test_local_rank_that_contradicts(folder: Path) -> None:
    (ended,) = together(folder, [TORCH], *RUN, "--local_rank=1")
    assert (ended.code, ended.err.count("  fix: ")) == (2, 1)
    assert "--local_rank 1, but LOCAL_RANK = 0" in ended.err


def test_rank_that_never_comes(folder: Path) -> None:
    port = free_port()
    ended = together(folder, [rank(0, 3, port), rank(2, 3, port)], *RUN)
    _one_message(ended, "rank 1 of 3 did not join within mesh.timeout_s = 3 s (2 are there)")


def test_rank_0_that_never_comes(folder: Path) -> None:
    ended = together(folder, [rank(1, 2, free_port())], *RUN)
    _one_message(
        ended, "rank 1 of host", "has not reached rank 0 at 127.0.0.1:", "Connection refused"
    )


def test_port_that_is_taken(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        first, second = together(folder, [rank(0, 2, port), rank(1, 2, port)], *RUN)
    _one_message([first], f"port {port} of host", "is taken by another program")
    _one_message(
        [second], f"the program that listens at 127.0.0.1:{port} is not this run's rank 0"
    )


def test_master_whose_name_is_not_known(folder: Path) -> None:
    port = free_port()
    environs = [rank(number, 2, port, MASTER_ADDR="nowhere.invalid") for number in range(2)]
    first, second = together(folder, environs, *RUN)
    _one_message(
        [first],
        "rank 1 of 2 did not join",
        "rank 0, on host",
        "the name nowhere.invalid cannot be resolved here",
    )
    _one_message(
        [second], "has not reached rank 0", "the name nowhere.invalid cannot be resolved here"
    )


def test_two_processes_with_one_number(folder: Path) -> None:
    port = free_port()
    ended = together(folder, [rank(0, 3, port), rank(1, 3, port), rank(1, 3, port)], *RUN)
    _one_message(ended, "two processes claim to be rank 1 of 3")


def test_hosts_with_different_versions(folder: Path) -> None:
    port = free_port()
    environs = [rank(number, 2, port) for number in range(2)]
    ended = together(folder, environs, *RUN, plants={1: _older_torch})
    _one_message(
        ended,
        "rank 1 of host",
        f"torch is 2.0.1, on rank 0 of host {socket.gethostname()} it is",
    )


def test_hosts_with_different_configs(folder: Path) -> None:
    port = free_port()
    environs = [rank(number, 2, port) for number in range(2)]
    ended = together(folder, environs, *RUN, extra={1: ("--optimizer.lr", "0.5")})
    _one_message(ended, "rank 1 of host", "the config's section 'optimizer' is")


def test_hosts_with_different_meshes(folder: Path) -> None:
    port = free_port()
    environs = [rank(0, 2, port, DP_SIZE="2"), rank(1, 2, port, TP_SIZE="2")]
    ended = together(folder, environs, *RUN)
    (speaker,) = [each for each in ended if each.err]
    assert "the mesh is dp=1 x cp=1 x tp=2" in speaker.err
    assert [each.code for each in ended] == [1, 1]


def test_hosts_with_different_world_sizes(folder: Path) -> None:
    port = free_port()
    ended = together(folder, [rank(0, 3, port), rank(1, 2, port)], *RUN)
    speakers = [each for each in ended if each.err]
    assert len(speakers) == 1 and all(each.code == 1 for each in ended)
    assert "the number of ranks is 2, on rank 0" in speakers[0].err
    assert all(each.seconds < TIMEOUT_S + SLACK_S for each in ended)


def _older_torch() -> None:
    torch.__version__ = "2.0.1"  # type: ignore[assignment]


def _one_message(ended: list, *parts: str) -> None:
    """All ended as failed, in time, and one of them said all of `parts` in three parts."""
    assert [each.code for each in ended] == [1] * len(ended), ended
    speakers = [each.err for each in ended if each.err]
    assert len(speakers) == 1, ended
    (said,) = speakers
    for part in parts:
        assert part in said, said
    assert said.count("  fix: ") == 1 and "Traceback" not in said, said
    for each in ended:
        assert each.seconds < TIMEOUT_S + SLACK_S, each
