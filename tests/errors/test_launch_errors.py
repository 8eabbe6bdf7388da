"""The whole texts about launchers that are set up wrongly, and about ranks that do not come together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import threefold
from threefold.config.loading import load
from threefold.errors import EXIT_WRONG_REQUEST, ConfigError, ThreefoldError
from threefold.mesh import environment, rendezvous_errors
from threefold.mesh.launchers.info import LaunchInfo
from threefold.mesh.launchers.managed import data_path, defaults, managed
from threefold.mesh.launchers.readers import read
from threefold.mesh.topology import Topology

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
TORCHRUN_FIX = "start with torchrun --nproc_per_node=N -m threefold ..."
INFO = LaunchInfo(
    rank=3,
    world_size=4,
    local_rank=1,
    local_world_size=2,
    master_addr="a",
    master_port=29500,
    host="b",
)


def text(act: Callable[[], Any], kind: type[ThreefoldError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        act()
    assert caught.value.exit_code == EXIT_WRONG_REQUEST
    return str(caught.value)


def problem(what: str, expected: str, fix: str) -> str:
    return f"{what}\n  expected: {expected}\n  fix: {fix}"


HALF_SET = (
    "all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (set by torchrun), or none of them"
)
ONE_ANSWER = "the same numbers: two ranks with the same number wait for one another, or each trains alone"
UNSET = "unset RANK WORLD_SIZE LOCAL_RANK   (a job script or an outer shell has exported them)"
ALONE = "one torchrun for all of them: otherwise each trains the complete run alone"
ONE_TORCHRUN = (
    "torchrun --nnodes=N --node-rank=I --master-addr=HOST ... on each host, or no torchrun: "
    "srun (mpirun) python -m threefold ..."
)
MPI_NAMES = "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE"

CASES: dict[str, tuple[dict[str, str], str]] = {
    "half set": (
        {"RANK": "0"},
        problem(
            "RANK set, but WORLD_SIZE and MASTER_ADDR and MASTER_PORT not set",
            HALF_SET,
            f"{TORCHRUN_FIX}, or: unset RANK",
        ),
    ),
    "no number": (
        {**ELASTIC, "RANK": "one"},
        problem(
            "RANK = 'one' is not a number",
            "a whole number, as a launcher sets it",
            "unset RANK, or start with torchrun",
        ),
    ),
    "rank beyond the world": (
        {**ELASTIC, "RANK": "4"},
        problem("RANK = 4 with WORLD_SIZE = 4", "0 <= RANK < WORLD_SIZE", TORCHRUN_FIX),
    ),
    "more local ranks than ranks": (
        {**ELASTIC, "LOCAL_WORLD_SIZE": "8"},
        problem(
            "8 ranks on this machine, but WORLD_SIZE = 4",
            "no more ranks on a machine than in the world",
            TORCHRUN_FIX,
        ),
    ),
    "local rank beyond the machine": (
        {**ELASTIC, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "2"},
        problem(
            "local rank 2 of 2 ranks on this machine",
            "0 <= local rank < ranks on the machine: it is the number of the device that the rank uses",
            TORCHRUN_FIX,
        ),
    ),
    "no port": (
        {**TORCHRUN, "MASTER_PORT": "70000"},
        problem(
            "MASTER_PORT = 70000 is not a port",
            "a number from 1 to 65535",
            "export MASTER_PORT=29500",
        ),
    ),
    "exported for all tasks": (
        {**SLURM, **TORCHRUN, "RANK": "0"},
        problem(
            "RANK = 0 and WORLD_SIZE = 4, but slurm started rank 3 of 4", ONE_ANSWER, UNSET
        ),
    ),
    "world size of another launcher": (
        {**SLURM, "WORLD_SIZE": "8"},
        problem(
            "RANK = 3 and WORLD_SIZE = 8, but slurm started rank 3 of 4", ONE_ANSWER, UNSET
        ),
    ),
    "a torchrun for each task": (
        {**SLURM, **ELASTIC},
        problem(
            "SLURM_STEP_NUM_TASKS = 4, but this torchrun has 4 ranks on one host",
            ALONE,
            ONE_TORCHRUN,
        ),
    ),
    "a torchrun for each SageMaker host": (
        {**ELASTIC, "SM_HOSTS": '["algo-1", "algo-2"]'},
        problem(
            "SM_HOSTS has 2 hosts, but this torchrun has 4 ranks on one host",
            ALONE,
            ONE_TORCHRUN,
        ),
    ),
    "Slurm without srun": (
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
        problem(
            "this is a Slurm job of 2 nodes, but srun has not started this process",
            "one process for each rank on all of the nodes",
            "srun python -m threefold ...   in the job script, or: unset SLURM_JOB_ID   (to use only this node)",
        ),
    ),
    "SageMaker without a launcher": (
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
        problem(
            "SM_HOSTS has 2 hosts, but no launcher has started this process",
            "torchrun on each host: otherwise each trains the complete run alone",
            'distribution={"torch_distributed": {"enabled": True}} in the estimator, Torchrun() in ModelTrainer, '
            "or: threefold submit sagemaker   (to use only this one: unset SM_HOSTS)",
        ),
    ),
    "half of srun": (
        {key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"},
        problem(
            "SLURM_PROCID and SLURM_STEP_NUM_TASKS set, but SLURM_LOCALID not set",
            "all of SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID (set by srun), or none of them",
            "start with srun python -m threefold ... in the job, or: unset SLURM_STEP_ID",
        ),
    ),
    "half of mpirun": (
        {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        },
        problem(
            "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK set, "
            "but OMPI_COMM_WORLD_LOCAL_SIZE not set",
            f"all of {MPI_NAMES} (set by Open MPI's mpirun), or none of them",
            f"start with mpirun -n N python -m threefold ..., or: unset {MPI_NAMES.replace(',', '')}",
        ),
    ),
    "mpirun on hosts without a master": (
        OPEN_MPI,
        problem(
            "2 ranks on several hosts, but MASTER_ADDR is not set",
            "the name or address of rank 0's host, which open-mpi does not provide",
            "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...   (Open MPI), -genv MASTER_ADDR HOST (MPICH), "
            "flux run --env=MASTER_ADDR=HOST, mpiexec --env MASTER_ADDR=HOST (PALS), with the first host's name",
        ),
    ),
    "a pod of several ranks without torchrun": (
        {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "4"},
        problem(
            "PET_NPROC_PER_NODE = 4, but this process is the only one of its pod",
            "torchrun as the pod's command, if a pod has several ranks",
            "command: [torchrun, -m, threefold, train, ...]   (torchrun reads the PET_ variables)",
        ),
    ),
    "a pod without its number": (
        {"PET_NNODES": "2"},
        problem(
            "PET_NNODES set, but PET_NODE_RANK not set",
            "all of PET_NODE_RANK, PET_NNODES (set by Kubeflow), or none of them",
            "let a PyTorchJob or a TrainJob start the pod: threefold submit kubernetes",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_variables_that_are_wrong(name: str) -> None:
    environ, expected = CASES[name]
    assert text(lambda: read(environ)) == expected


# --- what comes with a launcher -----------------------------------------------------------------------------------

ACCELERATE = {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_TP_SIZE": "2"}


def test_hyperparameters_that_are_none() -> None:
    assert text(lambda: managed({"SM_HPS": "[1]"})) == problem(
        "SM_HPS = '[1]' is not a JSON mapping",
        'the hyperparameters as SageMaker sets them: {"train.steps": 100}',
        "unset SM_HPS, or give it as JSON",
    )


def test_hyperparameter_that_is_no_key() -> None:
    job = managed({"SM_HPS": json.dumps({"train.step": 3})})
    assert job is not None
    said = text(lambda: load(None, environ={}, settings=job.settings))
    assert said.startswith("unknown key train.step\n") and said.endswith(
        "did you mean train.steps?"
    )


def test_accelerates_sizes_that_contradict_or_have_no_axis() -> None:
    assert text(lambda: defaults({**ACCELERATE, "DP_SIZE": "4"})) == problem(
        "DP_SIZE = 4, but accelerate's PARALLELISM_CONFIG_ sizes give dp = 2",
        "the same size in both",
        "unset DP_SIZE, or --mesh.dp 4   (overrides both; set the other axes too)",
    )
    assert text(lambda: defaults({"PARALLELISM_CONFIG_SP_SIZE": "2"})) == problem(
        "PARALLELISM_CONFIG_SP_SIZE = 2",
        "no such axis: Threefold splits sequences over mesh.cp, by Ulysses too",
        "--parallelism_config_cp_size 2 instead of sp, and --mesh.cp_method ulysses",
    )
    assert text(lambda: defaults({"PARALLELISM_CONFIG_TP_SIZE": "0"})) == problem(
        "PARALLELISM_CONFIG_TP_SIZE = '0' is not accepted",
        "a whole number greater than 0, as accelerate launch sets it",
        "unset PARALLELISM_CONFIG_TP_SIZE, and set the mesh with --mesh.dp, --mesh.cp and --mesh.tp",
    )


def test_channel_that_is_not_there() -> None:
    from threefold.errors import DataError

    fix = "threefold submit sagemaker ... --channel words=s3://BUCKET/PREFIX, or a folder as --data.source"
    what = "data.source = 'channel:words', but this process has no such channel"
    assert text(lambda: data_path("channel:words", {}), DataError) == problem(
        what, "a SageMaker job, which sets SM_HPS and SM_CHANNEL_NAME for each channel", fix
    )
    job = {"SM_HPS": "{}", "SM_CHANNEL_TRAIN": "/data/train", "SM_CHANNEL_TEST": "/data/test"}
    assert text(lambda: data_path("channel:words", job), DataError) == problem(
        what, "one of channel:test, channel:train", fix
    )


def test_local_rank_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert text(lambda: environment.accept_local_rank(1)) == problem(
        "--local_rank 1, but no launcher has started this process: RANK is not set",
        "an option that only launchers add",
        "leave --local_rank out, or start with torchrun --nproc_per_node=N -m threefold ...",
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert text(lambda: environment.accept_local_rank(1)) == problem(
        "--local_rank 1, but LOCAL_RANK = 0",
        "the same number: it is the device that this rank uses",
        "leave --local_rank out: LOCAL_RANK is what counts",
    )


# --- ranks that do not come together ------------------------------------------------------------------------------

MORE_TIME = "more time: --mesh.timeout_s N"


def test_port_that_is_taken() -> None:
    assert str(
        rendezvous_errors.port_taken(INFO, "..., code: -98, name: EADDRINUSE, ...")
    ) == problem(
        "port 29500 of host b is taken by another program, or another rank 0",
        "a free port on rank 0's host, where the ranks meet",
        "export MASTER_PORT=ANOTHER (torchrun --master-port, accelerate --main_process_port), or end the program "
        "that holds it: ss -ltnp 'sport = :29500'",
    )
    assert str(rendezvous_errors.port_taken(INFO, "code: -13, name: EACCES\nmore")) == problem(
        "rank 0 cannot listen on port 29500 of b: code: -13, name: EACCES",
        "a free port above 1023",
        "export MASTER_PORT=29500",
    )


def test_rank_0_that_is_not_reached() -> None:
    assert str(rendezvous_errors.unreached(INFO, "Connection refused", 600.0)) == problem(
        "rank 3 of host b has not reached rank 0 at a:29500 within mesh.timeout_s = 600 s: Connection refused",
        "rank 0 at that address, started, and reachable from every host",
        "check that rank 0 started and still runs; MASTER_ADDR must be the name or address of its host that the others "
        f"can resolve, with no firewall between them; {MORE_TIME}",
    )
    assert str(rendezvous_errors.no_store(INFO)) == problem(
        "rank 3 of host b: the program that listens at a:29500 is not this run's rank 0, or has ended",
        "the store of this run's rank 0 at that address",
        "export MASTER_PORT=ANOTHER: another program has that port; MASTER_ADDR must be rank 0's host",
    )
    assert str(rendezvous_errors.store_lost(INFO, "reset by peer\nmore")) == problem(
        "rank 3 of host b lost rank 0 at a:29500 while ranks were still joining: reset by peer",
        "rank 0 (or the launcher's agent) to keep running",
        "look at rank 0's output: it has ended or was killed",
    )


def test_ranks_that_are_missing() -> None:
    fix = (
        "look at the missing ranks' output: they have ended or were never started; MASTER_ADDR must be a name of rank "
        f"0's host that all hosts can resolve; {MORE_TIME}"
    )
    expected = "all ranks started within that time, on hosts that can reach one another"
    found = rendezvous_errors.missing(INFO, [1, 2], timeout_s=5, unreachable=None)
    what = "ranks 1 and 2 of 4 did not join within mesh.timeout_s = 5 s (2 are there)"
    assert str(found) == problem(what, expected, fix)
    found = rendezvous_errors.missing(INFO, [1, 2, 3], timeout_s=5, unreachable="no answer")
    what = (
        "ranks 1, 2 and 3 of 4 did not join within mesh.timeout_s = 5 s (1 is there); "
        "and rank 0, on host b, cannot reach itself at a:29500: no answer"
    )
    assert str(found) == problem(what, expected, fix)
    many = LaunchInfo(0, 64, 0, 8, "a", 29500)
    found = rendezvous_errors.missing(many, range(8, 64), timeout_s=5, unreachable=None)
    assert found.what.startswith(
        "56 ranks (8, 9, 10, 11, 12, 13, 14, 15, ...) of 64 did not join"
    )


def test_ranks_that_differ() -> None:
    rank_0 = {"rank": 0, "host": "a", "facts": {"torch": "2.13.0"}}
    other = {"rank": 2, "host": "b", "facts": {"torch": "2.12.0"}}
    assert str(rendezvous_errors.differs("torch", [other], rank_0)) == problem(
        "rank 2 of host b: torch is 2.12.0, on rank 0 of host a it is 2.13.0",
        "the same torch on every rank: otherwise they would compute different things, or wait forever",
        "start every rank with the same command, files and environment; versions: pip install the same ones on every "
        "host, or run one container image",
    )


def test_ranks_that_count_otherwise_or_have_one_number() -> None:
    assert str(rendezvous_errors.other_count(INFO, 2)) == problem(
        "rank 3 of host b was started as one of 4 ranks, rank 0 as one of 2",
        "the same number of ranks on every host",
        "give every host the same number of hosts and of ranks on each: --nnodes, --nproc-per-node, WORLD_SIZE",
    )
    before, now = {"host": "a", "process": 10}, {"host": "b", "process": 11}
    assert str(rendezvous_errors.twice(INFO, before, now)) == problem(
        "two processes claim to be rank 3 of 4: 10 of host a and 11 of host b",
        "every rank once",
        "let the launcher set RANK: give each host its own --node-rank, and do not export RANK yourself; or another "
        "MASTER_PORT, if two runs meet at one",
    )


def test_hosts_that_the_backend_does_not_connect() -> None:
    assert str(
        rendezvous_errors.unconnected(INFO, "timed out\nmore", ["a", "a", "b", "b"])
    ) == problem(
        "the ranks have met, but rank 3 of host b cannot connect to the others: timed out",
        "a network between the hosts (a and b) on the interface that the backend uses",
        "export GLOO_SOCKET_IFNAME=NAME NCCL_SOCKET_IFNAME=NAME   (`ip -br addr` lists them; that of MASTER_ADDR)",
    )


def test_rank_without_a_device() -> None:
    found = rendezvous_errors.no_device(2, visible=2, named="0,1")
    assert str(found) == problem(
        "local rank 2 has no device: 2 CUDA devices are visible to this process",
        "one device for each local rank, so that no two ranks share one "
        "(CUDA_VISIBLE_DEVICES = '0,1' hides the others)",
        "start 2 ranks on this machine, or --mesh.device cpu",
    )
    assert found.first and not rendezvous_errors.no_device(3, visible=2, named=None).first
    assert str(rendezvous_errors.no_device(0, visible=0, named=None)).endswith(
        "fix: --mesh.device cpu"
    )


def test_first_reason_of_a_managed_job_stands(tmp_path: Path) -> None:
    job = managed({"SM_HPS": "{}", "SAGEMAKER_BASE_DIR": str(tmp_path)})
    assert job is not None and job.failure == tmp_path / "output" / "failure"
    job.tell_failure("x" * 2000)
    job.tell_failure("later")
    assert job.failure.read_text() == "x" * 1024


def test_folder_that_hosts_do_not_share() -> None:
    from threefold.checkpoint.lock import Words
    from threefold.run.folder import _judge

    assert _judge(Path("runs/a"), ["", ""], Words()) == ""
    assert text(lambda: _judge(Path("runs/a"), ["", "b", "c", "b"], Words())) == problem(
        "log.dir = runs/a on b and c is not the folder that rank 0 writes to",
        "one folder that all hosts share: each rank writes its part of a checkpoint there",
        "--log.dir FOLDER_ON_A_SHARED_FILE_SYSTEM   (NFS, Lustre, EFS)",
    )


def test_device_of_a_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from threefold.mesh.mesh import pick_device

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [pick_device("cuda", rank) for rank in range(2)] == [
        torch.device("cuda", rank) for rank in range(2)
    ]
    with pytest.raises(
        rendezvous_errors.NoDeviceError,
        match="local rank 2 has no device: 2 CUDA devices are visible",
    ):
        pick_device("cuda", 2)
    # A script around each rank, as mpirun's users write it: CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert pick_device("cuda", 3) == torch.device("cuda", 0)
    with pytest.raises(
        rendezvous_errors.NoDeviceError, match="CUDA_VISIBLE_DEVICES = '3' hides the others"
    ):
        pick_device("cuda", 1)


@pytest.mark.parametrize(
    ("world_size", "variables", "sizes", "fix"),
    [
        (4, {"TP_SIZE": "2"}, {}, "threefold.init_mesh(dp=2, cp=1, tp=2)   (or start 2 ranks)"),
        (8, {"TP_SIZE": "2", "CP_SIZE": "2"}, {"dp": 1}, "threefold.init_mesh(dp=2, cp=2, tp=2)   (or start 4 ranks)"),
        (8, {}, {"tp": 3}, "threefold.init_mesh(dp=2, cp=2, tp=2)   (or start 3 ranks)"),
        (1, {}, {"dp": 4}, "threefold.init_mesh(dp=1, cp=1, tp=1)   (or start 4 ranks)"),
    ],
)  # fmt: skip
def test_a_program_is_shown_the_call_whose_sizes_fit(
    world_size: int,
    variables: dict[str, str],
    sizes: dict[str, int],
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the options of a command, which it has not; and what it is shown is accepted."""
    launched = {
        "RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**(launched | address if world_size > 1 else {}), **variables}.items():
        monkeypatch.setenv(name, value)
    joined: list[Topology] = []
    monkeypatch.setattr(
        "threefold.mesh.mesh.join_mesh", lambda topology, info, **_: joined.append(topology)
    )
    with pytest.raises(ConfigError, match="ranks were started") as caught:
        threefold.init_mesh(**sizes)
    (problem,) = caught.value.problems
    assert problem.fix == fix
    exec(problem.fix.split("   (")[0], {"threefold": threefold})
    assert [topology.world_size for topology in joined] == [world_size]
