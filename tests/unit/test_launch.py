"""Reading a launcher's variables: all of them, none of them, or an error that says which."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from threefold.errors import ConfigError
from threefold.mesh.environment import LaunchInfo, allow_open_files, read
from threefold.mesh.launchers.info import first_host, tasks_of_node
from threefold.mesh.mesh import init_mesh

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
PLAIN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1"}


def refused(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(environ)
    (problem,) = caught.value.problems
    return problem.what


def test_without_a_launcher_it_is_one_rank_of_one() -> None:
    for environ in (
        {},
        {"PATH": "/bin", "LOCAL_RANK": "3", "MASTER_ADDR": "host", "TORCHELASTIC_RUN_ID": "x"},
    ):
        info = read(environ)
        assert info == LaunchInfo()
        assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (
            0,
            1,
            0,
            1,
        )
        assert info.launcher is None


def test_torchrun() -> None:
    assert read(TORCHRUN) == LaunchInfo(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="host",
        master_port=29500,
        launcher="torchrun",
        restart=2,
    )


def test_the_four_variables_of_torch_are_enough() -> None:
    """Without local ones all ranks are taken to be on this machine."""
    assert read(PLAIN) == LaunchInfo(
        3,
        4,
        local_rank=3,
        local_world_size=4,
        master_addr="host",
        master_port=1,
        launcher="environment",
    )


@pytest.mark.parametrize("rank", range(8))
def test_local_rank_follows_from_the_ranks_of_a_machine(rank: int) -> None:
    environ = {**PLAIN, "RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert read(environ).local_rank == rank % 4


def test_local_rank_is_the_launchers_where_it_is_given() -> None:
    assert read({**TORCHRUN, "LOCAL_RANK": "0"}).local_rank == 0


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (["RANK"], "WORLD_SIZE and MASTER_ADDR and MASTER_PORT"),
        (["WORLD_SIZE"], "RANK and MASTER_ADDR and MASTER_PORT"),
        (["RANK", "WORLD_SIZE"], "MASTER_ADDR and MASTER_PORT"),
        (["RANK", "WORLD_SIZE", "MASTER_ADDR"], "MASTER_PORT"),
        (["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], "RANK"),
    ],
)
def test_half_set_variables_are_refused(given: list[str], missing: str) -> None:
    present = " and ".join(given)
    assert (
        refused({name: TORCHRUN[name] for name in given})
        == f"{present} set, but {missing} not set"
    )


@pytest.mark.parametrize(
    "name",
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"],
)
@pytest.mark.parametrize("value", ["", "two", "-1", "1.0", " 1", "²", "\u0663"])
def test_value_that_is_no_number_is_refused(name: str, value: str) -> None:
    assert refused({**TORCHRUN, name: value}) == f"{name} = {value!r} is not a number"


@pytest.mark.parametrize(("rank", "world_size"), [(4, 4), (5, 4), (0, 0)])
def test_rank_outside_of_the_world_is_refused(rank: int, world_size: int) -> None:
    environ = {**PLAIN, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    assert refused(environ) == f"RANK = {rank} with WORLD_SIZE = {world_size}"


def test_only_the_given_mapping_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read({}) == LaunchInfo()
    assert read(os.environ).rank == 5


def test_start_is_told_from_those_before_where_the_store_is_the_launchers() -> None:
    shared = {
        **TORCHRUN,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }
    assert read(shared).generation == "start-2"
    assert read(shared).max_restarts == 3
    assert read({**shared, "TORCHELASTIC_USE_AGENT_STORE": "False"}).generation is None


# --- srun ---------------------------------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURMD_NODENAME": "gpu08",
}


def test_srun() -> None:
    info = read(SLURM)
    assert info == LaunchInfo(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        master_addr="gpu07",
        master_port=info.master_port,
        launcher="slurm",
        host="gpu08",
    )


def test_ranks_of_a_step_agree_on_a_port_and_steps_and_jobs_do_not_share_it() -> None:
    ports = {
        (job, step): {
            read(
                {
                    **SLURM,
                    "SLURM_JOB_ID": str(job),
                    "SLURM_STEP_ID": str(step),
                    "SLURM_PROCID": str(rank),
                }
            ).master_port
            for rank in range(8)
        }
        for job in range(70, 90)
        for step in range(4)
    }
    assert all(len(found) == 1 for found in ports.values())
    single = [port for found in ports.values() for port in found if port is not None]
    assert len(set(single)) == len(single)
    assert all(1024 < port < 32768 for port in single)


def test_requeued_job_and_devices_of_one_task() -> None:
    info = read({**SLURM, "SLURM_RESTART_COUNT": "2", "SLURM_GPUS_PER_TASK": "1"})
    assert (info.restart, info.own_device) == (2, True)


def test_users_master_wins_under_srun() -> None:
    info = read({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29511"})
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 29511)


def test_step_of_one_task_and_a_batch_script_are_no_launcher() -> None:
    assert read({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == LaunchInfo()
    batch = {
        "SLURM_JOB_ID": "71",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "8",
    }
    assert read(batch) == LaunchInfo()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("n[007-009,012],login", "n007"),
        ("rack[2-3]n[10-11]", "rack2n10"),
        ("a-b[4,6].cluster.org", "a-b4.cluster.org"),
    ],
)
def test_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("tasks", "node", "count"),
    [
        ("4(x2)", 1, 4),
        ("2,1", 0, 2),
        ("2,1", 1, 1),
        ("2(x3),1", 3, 1),
        ("2(x3),1", 4, None),
        ("", 0, None),
    ],
)
def test_tasks_of_a_node(tasks: str, node: int, count: int | None) -> None:
    assert tasks_of_node(tasks, node) == count


# --- mpirun -------------------------------------------------------------------------------------------------------

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1136394241",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_open_mpi_on_one_host_needs_nothing_else() -> None:
    info = read(OPEN_MPI)
    assert info == LaunchInfo(1, 2, 1, 2, "127.0.0.1", info.master_port, launcher="open-mpi")
    assert info.master_port != read({**OPEN_MPI, "PMIX_NAMESPACE": "1136459777"}).master_port


def test_mpich_on_one_host() -> None:
    assert read(MPICH) == LaunchInfo(1, 2, 1, 2, "127.0.0.1", 29500, launcher="mpich")


@pytest.mark.parametrize(
    ("environ", "local_size"),
    [(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), (MPICH, "MPI_LOCALNRANKS")],
)
def test_mpirun_on_several_hosts_with_a_master(
    environ: dict[str, str], local_size: str
) -> None:
    local = {
        local_size: "1",
        local_size.replace("SIZE", "RANK").replace("NRANKS", "RANKID"): "0",
    }
    info = read({**environ, **local, "MASTER_ADDR": "first"})
    assert (info.local_rank, info.local_world_size) == (0, 1)
    assert info.master_addr == "first"


def test_mpirun_inside_slurm_counts_the_ranks() -> None:
    """It starts its own daemons through srun, one a node."""
    daemon = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert read({**daemon, **OPEN_MPI}).launcher == "open-mpi"
    assert read({**daemon, **MPICH}).rank == 1


def test_srun_that_speaks_pmi_is_srun() -> None:
    assert read({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "slurm"


# --- Kubernetes ---------------------------------------------------------------------------------------------------

TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
PYTORCH_JOB = {**PLAIN, "RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NODE_RANK": "1"}


def test_pod_of_a_train_job_that_runs_one_process() -> None:
    assert read(TRAIN_JOB) == LaunchInfo(
        1, 2, 0, 1, master_addr="job-node-0-0.job", master_port=29400, launcher="kubernetes"
    )


def test_pod_of_a_pytorch_job_that_runs_one_process() -> None:
    assert read(PYTORCH_JOB) == LaunchInfo(
        1, 2, 0, 1, master_addr="host", master_port=1, launcher="kubernetes"
    )


def test_ranks_of_an_older_operators_pods_are_one_a_pod() -> None:
    info = read({**PLAIN, "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (info.rank, info.local_rank, info.local_world_size) == (3, 0, 1)
    info = read({**PLAIN, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "LOCAL_RANK": "3"})
    assert (info.local_rank, info.local_world_size) == (3, 4)


def test_job_of_one_pod_is_no_launcher() -> None:
    assert read({**TRAIN_JOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}) == LaunchInfo()


# --- several at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outer",
    [SLURM, OPEN_MPI, MPICH, TRAIN_JOB],
    ids=["slurm", "open-mpi", "mpich", "kubernetes"],
)
def test_torchrun_inside_another_launcher_decides(outer: dict[str, str]) -> None:
    info = read({**outer, **TORCHRUN, "GROUP_WORLD_SIZE": "2"})
    assert (info.launcher, info.rank, info.world_size, info.local_rank) == ("torchrun", 5, 8, 1)


def test_variables_that_repeat_the_launchers_are_taken() -> None:
    """As job scripts do: export RANK=$SLURM_PROCID."""
    own = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
    info = read({**SLURM, **own})
    assert (info.launcher, info.local_rank, info.local_world_size) == ("slurm", 1, 4)
    assert (info.master_addr, info.master_port) == ("gpu07", 29500)
    assert read({**SLURM, "WORLD_SIZE": "8"}).launcher == "slurm"


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """A soft limit as many systems have it, below the hard one, which the fixture returns."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_may_have_more_connections_than_the_soft_limit(few_open_files: int) -> None:
    init_mesh(device="cpu").close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == few_open_files
    assert soft == (65_536 if hard < 0 else min(hard, 65_536)) == allow_open_files()
    # A higher one is left as it is.
    if hard > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        assert allow_open_files() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_soft_limit_that_cannot_be_raised_stays(
    few_open_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    with monkeypatch.context() as patch:
        patch.setattr(resource, "setrlimit", refused)
        assert allow_open_files() == 1000
