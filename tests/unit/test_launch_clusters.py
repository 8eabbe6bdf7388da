"""Schedulers and clouds that reserve several hosts: their ranks are read, and no process trains alone on each host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from threefold.errors import ConfigError
from threefold.mesh.environment import LaunchInfo, read
from threefold.mesh.launchers.clusters import CLUSTERS, reserved

VERTEX = json.dumps(
    {
        "cluster": {"workerpool0": ["cmle-0:2222"], "workerpool1": ["cmle-1:2222"]},
        "task": {"type": "workerpool1"},
    }
)
SEVERAL_HOSTS = {
    "SkyPilot": {
        "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_NODES": "2",
    },
    "dstack": {
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": "0",
        "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    },
    "Vertex AI": {"CLUSTER_SPEC": VERTEX},
    "Azure Batch": {"AZ_BATCH_NODE_LIST": "10.0.0.4;10.0.0.5"},
    "LSF": {"LSB_JOBID": "81", "LSB_MCPU_HOSTS": "a 16 b 16"},
    "an Indexed Job": {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
    "SageMaker": {"SM_HOSTS": '["algo-1", "algo-2"]'},
    "a LeaderWorkerSet": {
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
        "LWS_LEADER_ADDRESS": "lws-0.lws",
    },
    "AWS Batch": {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"},
    "DGX Cloud Lepton": {"LEPTON_JOB_TOTAL_WORKERS": "2", "LEPTON_JOB_WORKER_INDEX": "1"},
    "Modal": {"MODAL_CLUSTER_ID": "cl-1", "MODAL_TASK_ID": "ta-1"},
    "PBS": {"PBS_NODEFILE": "/nowhere", "PBS_JOBID": "9.head", "PBS_NUM_NODES": "2"},
    "Grid Engine": {"NHOSTS": "2", "NSLOTS": "16", "PE_HOSTFILE": "/var/spool/pe_hostfile"},
    "HTCondor": {"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "2"},
    "PRRTE": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1", "PRTE_LAUNCHED": "1"},
    "Volcano": {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "w-0.j,w-1.j", "VC_WORKER_NUM": "2"},
    # These have no row of their own: they count hosts, and number this one.
    "NNODES": {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"},
    "NUM_NODES": {"NUM_NODES": "2", "NODE_RANK": "0"},
    "BT_GROUP_SIZE": {"BT_GROUP_SIZE": "2", "BT_NODE_RANK": "1", "BT_LEADER_ADDR": "10.0.0.1"},
    "MLP_WORKER_NUM": {
        "MLP_WORKER_NUM": "2",
        "MLP_ROLE_INDEX": "1",
        "MLP_WORKER_0_HOST": "w-0",
        "MLP_WORKER_0_PORT": "2222",
    },
    "MF_PARALLEL_NUM_NODES": {
        "MF_PARALLEL_NUM_NODES": "2",
        "MF_PARALLEL_NODE_INDEX": "0",
        "MF_PARALLEL_MAIN_IP": "10.0.0.1",
    },
    "BEAKER_REPLICA_COUNT": {
        "BEAKER_REPLICA_COUNT": "2",
        "BEAKER_REPLICA_RANK": "1",
        "BEAKER_LEADER_REPLICA_HOSTNAME": "b-0",
    },
}
SEVERAL_HOSTS["DSTACK_NODES_NUM"] = SEVERAL_HOSTS.pop("dstack")
SEVERAL_HOSTS["LWS_GROUP_SIZE"] = SEVERAL_HOSTS.pop("a LeaderWorkerSet")
ONE_HOST = {
    "SkyPilot": {
        "SKYPILOT_NODE_IPS": "10.0.0.4",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
    },
    "dstack": {
        "DSTACK_NODES_NUM": "1",
        "DSTACK_NODE_RANK": "0",
        "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    },
    "Vertex AI": {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["cmle-0:2222"]}}'},
    "Azure Batch": {"AZ_BATCH_NODE_LIST": "10.0.0.4"},
    "LSF": {"LSB_JOBID": "81", "LSB_MCPU_HOSTS": "a 16"},
    "LSF, a launch node": {"LSB_JOBID": "81", "LSB_MCPU_HOSTS": "batch3 1 a 42"},
    "an Indexed Job": {"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
    "an array of another kind": {"JOB_COMPLETION_INDEX": "3"},
    "PBS": {"PBS_NODEFILE": "/nowhere", "PBS_JOBID": "9.head"},
    "SageMaker": {"SM_HOSTS": '["algo-1"]'},
    "AWS Batch": {"AWS_BATCH_JOB_NUM_NODES": "1", "AWS_BATCH_JOB_NODE_INDEX": "0"},
    "Grid Engine": {"NHOSTS": "1", "NSLOTS": "16", "PE_HOSTFILE": "/var/spool/pe_hostfile"},
    "no Grid Engine": {"NHOSTS": "4"},
    "a script": {"NNODES": "1", "NODE_RANK": "0"},
    "a number without a rank": {"NNODES": "8", "NUM_NODES": "8", "MASTER_ADDR": "10.0.0.1"},
    "a rank of another thing": {"A_NUM_NODES": "8", "B_NODE_RANK": "1", "NUM_WORKERS": "8"},
    "pieces of tests": {"CI_NODE_TOTAL": "4", "CI_NODE_INDEX": "2"},
    "an array of jobs": {"SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_ID": "3"},
    "Volcano": {"VC_TASK_INDEX": "0", "VC_WORKER_HOSTS": "w-0.j", "VC_WORKER_NUM": "1"},
    "BEAKER_REPLICA_COUNT": {"BEAKER_REPLICA_COUNT": "1", "BEAKER_REPLICA_RANK": "0"},
    "a task of srun with PMIx": {
        "PMIX_RANK": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
    },
    "damaged": {
        "CLUSTER_SPEC": "[]",
        "SM_HOSTS": "{",
        "DSTACK_NODES_NUM": "two",
        "LSB_MCPU_HOSTS": "a",
    },
}


@pytest.mark.parametrize("name", SEVERAL_HOSTS)
def test_process_of_several_hosts_does_not_train_alone(name: str) -> None:
    found = reserved(SEVERAL_HOSTS[name])
    assert found is not None and found[0] == name
    cluster = found[1]
    with pytest.raises(ConfigError) as refused:
        read(SEVERAL_HOSTS[name])
    (problem,) = refused.value.problems
    assert problem.what.startswith(cluster.variable)
    assert "no launcher has started this process" in problem.what
    assert cluster.fix in problem.fix and f"unset {cluster.variable}" in problem.fix
    alone = {
        key: value for key, value in SEVERAL_HOSTS[name].items() if key != cluster.variable
    }
    assert read(alone) == LaunchInfo(), "what is printed does not help"


def test_names_of_variables_give_the_torchrun_to_paste() -> None:
    """Found by what such variables are called, wherever they come from."""
    assert {
        name: cluster.fix.split("torchrun ")[1].split(" --nproc")[0]
        for name, environ in SEVERAL_HOSTS.items()
        for _, cluster, _ in [reserved(environ)]  # type: ignore[misc]
        if name not in CLUSTERS
    } == {
        "NNODES": "--nnodes=$NNODES --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR",
        "NUM_NODES": "--nnodes=$NUM_NODES --node-rank=$NODE_RANK --master-addr=HOST",
        "BT_GROUP_SIZE": "--nnodes=$BT_GROUP_SIZE --node-rank=$BT_NODE_RANK --master-addr=$BT_LEADER_ADDR",
        "MLP_WORKER_NUM": "--nnodes=$MLP_WORKER_NUM --node-rank=$MLP_ROLE_INDEX --master-addr=$MLP_WORKER_0_HOST",
        "MF_PARALLEL_NUM_NODES": "--nnodes=$MF_PARALLEL_NUM_NODES --node-rank=$MF_PARALLEL_NODE_INDEX "
        "--master-addr=$MF_PARALLEL_MAIN_IP",
        "BEAKER_REPLICA_COUNT": "--nnodes=$BEAKER_REPLICA_COUNT --node-rank=$BEAKER_REPLICA_RANK "
        "--master-addr=$BEAKER_LEADER_REPLICA_HOSTNAME",
        "DSTACK_NODES_NUM": "--nnodes=$DSTACK_NODES_NUM --node-rank=$DSTACK_NODE_RANK "
        "--master-addr=$DSTACK_MASTER_NODE_IP",
        "LWS_GROUP_SIZE": "--nnodes=$LWS_GROUP_SIZE --node-rank=$LWS_WORKER_INDEX --master-addr=$LWS_LEADER_ADDRESS",
    }


@pytest.mark.parametrize("name", [*SEVERAL_HOSTS])
def test_neither_does_a_torchrun_that_knows_of_no_other(name: str) -> None:
    torchrun = {
        "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "h",
        "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "1",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="but this torchrun has 4 ranks on one host"):
        read({**SEVERAL_HOSTS[name], **torchrun})
    assert (
        read(
            {**SEVERAL_HOSTS[name], **torchrun, "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}
        ).world_size
        == 8
    )


@pytest.mark.parametrize("name", ONE_HOST)
def test_one_host_is_no_matter(name: str) -> None:
    assert read(ONE_HOST[name]) == LaunchInfo()


@pytest.mark.parametrize(
    "variable", ["OAR_NODEFILE", "COBALT_NODEFILE", "PJM_O_NODEINF", "BATCH_HOSTS_FILE"]
)
def test_hosts_of_a_file(variable: str, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\n")
    assert read({variable: str(nodes)}) == LaunchInfo()
    nodes.write_text("a\nb\n")
    with pytest.raises(ConfigError, match=f"{variable} has 2 hosts"):
        read({variable: str(nodes)})


def test_hosts_of_pbs(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    environ = {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "17.head"}
    nodes.write_text("a\na\na\n")
    assert read(environ) == LaunchInfo()
    nodes.write_text("a\na\nb\nb\n")
    with pytest.raises(ConfigError, match="PBS_NODEFILE has 2 hosts"):
        read(environ)
    pals = {
        "PALS_RANKID": "3",
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
        "PALS_LOCAL_RANKID": "1",
        "PMI_LOCAL_SIZE": "2",
    }
    found = read({**environ, **pals})
    assert found == LaunchInfo(
        3, 4, 1, 2, master_addr="a", master_port=found.master_port, launcher="pals"
    )
    assert (
        read({**environ, **pals, "PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0"}).master_port
        == found.master_port
    )


def test_jsrun() -> None:
    environ = {
        "LSB_JOBID": "81", "LSB_MCPU_HOSTS": "batch3 1 a 42 b 42",
        "JSM_NAMESPACE_RANK": "7", "JSM_NAMESPACE_SIZE": "12",
        "JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "6",
        # It sets Open MPI's too.
        "OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "12",
    }  # fmt: skip
    found = read(environ)
    assert found == LaunchInfo(
        7, 12, 1, 6, master_addr="a", master_port=found.master_port, launcher="jsrun"
    )
    assert 15000 <= (found.master_port or 0) < 29000


def test_mvapich() -> None:
    names = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    environ = {f"MV2_COMM_WORLD_{part}": value for part, value in names.items()}
    with pytest.raises(
        ConfigError, match="8 ranks on several hosts, but MASTER_ADDR is not set"
    ):
        read(environ)
    found = read({**environ, "MASTER_ADDR": "a"})
    assert found == LaunchInfo(
        5, 8, 1, 4, master_addr="a", master_port=29500, launcher="mvapich"
    )


def test_horovodrun() -> None:
    names = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    environ = {f"HOROVOD_{part}": value for part, value in names.items()}
    with pytest.raises(
        ConfigError, match="2 ranks on several hosts, but MASTER_ADDR is not set"
    ):
        read(environ)
    found = read({**environ, "MASTER_ADDR": "a"})
    assert found == LaunchInfo(
        1, 2, 0, 1, master_addr="a", master_port=29500, launcher="horovod"
    )


def test_numbers_of_hosts_are_said() -> None:
    with pytest.raises(
        ConfigError, match=r"^NNODES = 2 hosts, but no launcher has started this process"
    ):
        read(SEVERAL_HOSTS["NNODES"])
    with pytest.raises(
        ConfigError,
        match=r"^MODAL_CLUSTER_ID = cl-1: there are several containers, but no launcher",
    ):
        read(SEVERAL_HOSTS["Modal"])


def test_flux() -> None:
    environ = {
        "FLUX_TASK_RANK": "3",
        "FLUX_JOB_SIZE": "4",
        "FLUX_TASK_LOCAL_ID": "1",
        "FLUX_JOB_NNODES": "2",
    }
    # Its PMI is there too.
    environ |= {"PMI_RANK": "3", "PMI_SIZE": "4", "MASTER_ADDR": "a"}
    assert read(environ) == LaunchInfo(
        3, 4, 1, 2, master_addr="a", master_port=29500, launcher="flux"
    )
    with pytest.raises(ConfigError, match="flux run --env=MASTER_ADDR=HOST"):
        read({name: value for name, value in environ.items() if name != "MASTER_ADDR"})
    with pytest.raises(
        ConfigError, match="FLUX_JOB_SIZE = 5 tasks on FLUX_JOB_NNODES = 2 hosts"
    ):
        read({**environ, "FLUX_JOB_SIZE": "5"})
    alone = {
        "PMI_RANK": "0",
        "PMI_SIZE": "1",
        "FLUX_TASK_RANK": "0",
        "FLUX_JOB_SIZE": "1",
        "FLUX_TASK_LOCAL_ID": "0",
        "FLUX_JOB_NNODES": "1",
    }
    assert read(alone) == LaunchInfo()
    with pytest.raises(ConfigError, match="FLUX_JOB_NNODES not set"):
        read({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "0"})


def test_mpirun_of_a_cloud_names_the_first_host() -> None:
    names = {"RANK": "9", "SIZE": "16", "LOCAL_RANK": "1", "LOCAL_SIZE": "8"}
    mpi = {f"OMPI_COMM_WORLD_{part}": value for part, value in names.items()}
    found = read({**mpi, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6105"})
    assert (found.master_addr, found.master_port, found.launcher) == (
        "10.0.0.4",
        6105,
        "open-mpi",
    )
    assert read({**mpi, "SM_HOSTS": '["algo-1", "algo-2"]'}).master_addr == "algo-1"
    assert (
        read({**mpi, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6105", "MASTER_ADDR": "own"}).master_addr
        == "own"
    )


def test_ranks_of_a_host_follow_from_the_hosts() -> None:
    plain = {"RANK": "9", "WORLD_SIZE": "16", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for environ in (
        {**plain, "LOCAL_RANK": "1", "LOCAL_SIZE": "8"},  # deepspeed
        {**plain, "LOCAL_RANK": "1", **SEVERAL_HOSTS["Azure Batch"]},
        {**plain, **SEVERAL_HOSTS["Vertex AI"]},
    ):
        found = read(environ)
        assert (found.local_rank, found.local_world_size) == (1, 8)
    # Vertex AI's own RANK is the host's.
    found = read({**plain, "RANK": "1", "WORLD_SIZE": "2", **SEVERAL_HOSTS["Vertex AI"]})
    assert (found.rank, found.local_rank, found.local_world_size) == (1, 0, 1)
