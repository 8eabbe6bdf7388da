"""Schedulers and clouds that reserve several hosts: how many, which is the first, and how ranks are started on them.

They start one process on each host, or on the first one alone, and publish who takes part in variables of their own.
Such a process must not train alone: each host would do the whole run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from threefold.mesh.launchers.info import is_number

Environ = Mapping[str, str]
_TORCHRUN = (
    "torchrun --nnodes={} --node-rank={} --master-addr={} --nproc-per-node=N -m threefold ..."
)


@dataclass(frozen=True)
class Cluster:
    """What one of them publishes.

    Attributes:
        variable: the one that tells of the hosts.
        hosts: their names, as far as they are known; "" for each that is not.
        fix: how to start ranks on all of them.
        several: what the variable's value shows, where it is no number of hosts.
    """

    variable: str
    hosts: Callable[[Environ], Sequence[str]]
    fix: str
    several: str = ""


def _listed(variable: str, separator: str | None = None) -> Callable[[Environ], Sequence[str]]:
    return lambda environ: [name for name in environ.get(variable, "").split(separator) if name]


def _counted(
    variable: str, first: str = "", beside: str = ""
) -> Callable[[Environ], Sequence[str]]:
    """So many as a variable says, the first as another one does, if `beside` is set too."""

    def hosts(environ: Environ) -> Sequence[str]:
        count = environ.get(variable, "") if not beside or beside in environ else ""
        return (
            [environ.get(first, ""), *[""] * (int(count) - 1)]
            if is_number(count) and int(count) > 1
            else []
        )

    return hosts


def _uncounted(*variables: str) -> Callable[[Environ], Sequence[str]]:
    """Two or more, where all of these are set: how many does not show."""
    return lambda environ: ["", ""] if all(name in environ for name in variables) else []


def _of_pbs(environ: Environ) -> Sequence[str]:
    """A file with a line for each place on a host."""
    try:
        return list(
            dict.fromkeys(
                Path(environ.get("PBS_NODEFILE", "")).read_text(encoding="utf-8").split()
            )
        )
    except (OSError, UnicodeDecodeError):
        return _counted("PBS_NUM_NODES")(environ)


def _of_lsf(environ: Environ) -> Sequence[str]:
    """`launch 1 a 40 b 40`: names, and places on each. Where jsrun places ranks, the first is a node that has none."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    names, places = words[::2], words[1::2]
    if len(names) > 1 and places[:1] == ["1"] and "1" not in places[1:]:
        names = names[1:]
    return names


def _of_vertex(environ: Environ) -> Sequence[str]:
    try:
        pools = json.loads(environ.get("CLUSTER_SPEC", "{}"))["cluster"]
        return [str(host).partition(":")[0] for name in sorted(pools) for host in pools[name]]
    except (ValueError, KeyError, TypeError):
        return []


def _of_indexed_job(environ: Environ) -> Sequence[str]:
    # It tells a pod its number, but not how many there are.
    index = environ.get("JOB_COMPLETION_INDEX", "")
    return (
        [""] * (int(index) + 1)
        if "KUBERNETES_SERVICE_HOST" in environ and is_number(index)
        else []
    )


def _of_sagemaker(environ: Environ) -> Sequence[str]:
    try:
        hosts = json.loads(environ.get("SM_HOSTS", "[]"))
    except ValueError:
        return []
    return [str(host) for host in hosts] if isinstance(hosts, list) else []


_SAGEMAKER_FIX = (
    'distribution={"torch_distributed": {"enabled": True}} in the estimator, Torchrun() in ModelTrainer, '
    "or: threefold submit sagemaker"
)
CLUSTERS: dict[str, Cluster] = {
    "SageMaker": Cluster("SM_HOSTS", _of_sagemaker, _SAGEMAKER_FIX),
    "SkyPilot": Cluster(
        "SKYPILOT_NODE_IPS",
        _listed("SKYPILOT_NODE_IPS"),
        _TORCHRUN.format(
            "$SKYPILOT_NUM_NODES",
            "$SKYPILOT_NODE_RANK",
            '$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
        ),
    ),
    "dstack": Cluster(
        "DSTACK_NODES_NUM",
        _counted("DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
        _TORCHRUN.format("$DSTACK_NODES_NUM", "$DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP"),
    ),
    "Vertex AI": Cluster(
        "CLUSTER_SPEC",
        _of_vertex,
        _TORCHRUN.format("HOSTS", "I", "HOST") + "   (HOST: the one of workerpool0)",
    ),
    "Azure Batch": Cluster(
        "AZ_BATCH_NODE_LIST",
        _listed("AZ_BATCH_NODE_LIST", ";"),
        "distribution: {type: pytorch, process_count_per_instance: N} in the job",
    ),
    "LSF": Cluster(
        "LSB_MCPU_HOSTS",
        _of_lsf,
        "jsrun -n RANKS -a 1 -g 1 python -m threefold ...   in the job script",
    ),
    "PBS": Cluster(
        "PBS_NODEFILE",
        _of_pbs,
        "mpiexec -n RANKS --ppn N python -m threefold ...   in the job script",
    ),
    "an Indexed Job": Cluster(
        "JOB_COMPLETION_INDEX",
        _of_indexed_job,
        _TORCHRUN.format("PODS", "$JOB_COMPLETION_INDEX", "NAME-OF-POD-0.SERVICE")
        + ", or: threefold submit kubernetes --kind jobset",
        several="there are several pods",
    ),
    "a LeaderWorkerSet": Cluster(
        "LWS_GROUP_SIZE",
        _counted("LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"),
        _TORCHRUN.format("$LWS_GROUP_SIZE", "$LWS_WORKER_INDEX", "$LWS_LEADER_ADDRESS"),
    ),
    "AWS Batch": Cluster(
        "AWS_BATCH_JOB_NUM_NODES",
        _counted("AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"),
        _TORCHRUN.format(
            "$AWS_BATCH_JOB_NUM_NODES",
            "$AWS_BATCH_JOB_NODE_INDEX",
            "${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-$(hostname -i)}",
        ),
    ),
    "DGX Cloud Lepton": Cluster(
        "LEPTON_JOB_TOTAL_WORKERS",
        _counted("LEPTON_JOB_TOTAL_WORKERS"),
        _TORCHRUN.format(
            "$LEPTON_JOB_TOTAL_WORKERS",
            "$LEPTON_JOB_WORKER_INDEX",
            "$LEPTON_JOB_WORKER_PREFIX-0.$LEPTON_SUBDOMAIN",
        ),
    ),
    "Modal": Cluster(
        "MODAL_CLUSTER_ID",
        _uncounted("MODAL_CLUSTER_ID"),
        _TORCHRUN.format("CONTAINERS", "I", "HOST")
        + "   (modal.experimental.get_cluster_info() has them)",
        several="there are several containers",
    ),
    "Grid Engine": Cluster(
        "NHOSTS",
        _counted("NHOSTS", beside="PE_HOSTFILE"),
        "mpirun -n RANKS python -m threefold ...   in the job script",
    ),
    "HTCondor": Cluster(
        "_CONDOR_NPROCS",
        _counted("_CONDOR_NPROCS", beside="_CONDOR_PROCNO"),
        _TORCHRUN.format("$_CONDOR_NPROCS", "$_CONDOR_PROCNO", "HOST")
        + "   (HOST: the one of process 0)",
    ),
    "PRRTE": Cluster(
        "PMIX_RANK",
        _uncounted("PMIX_RANK", "PRTE_LAUNCHED"),
        "mpirun -n RANKS python -m threefold ...   of Open MPI, which says how many there are",
        several="prterun has started this process, and maybe others",
    ),
    # Set by scripts, Lightning's multi-machine jobs, RunPod and others.
    **{
        f"a script with {count}": Cluster(
            count,
            _counted(count, "MASTER_ADDR", "NODE_RANK"),
            _TORCHRUN.format(f"${count}", "$NODE_RANK", "$MASTER_ADDR"),
        )
        for count in ("NNODES", "NUM_NODES")
    },
}


def reserved(environ: Environ) -> tuple[str, Cluster, Sequence[str]] | None:
    """(its name, the cluster, its hosts) of the first that says that it has several; None if none does."""
    for name, cluster in CLUSTERS.items():
        if len(hosts := cluster.hosts(environ)) > 1:
            return name, cluster, hosts
    return None
