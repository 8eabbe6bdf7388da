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
_TORCHRUN = "torchrun --nnodes={} --node-rank={} --master-addr={} --nproc-per-node=N -m threefold ..."


@dataclass(frozen=True)
class Cluster:
    """What one of them publishes.

    Attributes:
        variable: the one that tells of the hosts.
        hosts: their names, as far as they are known; "" for each that is not.
        fix: how to start ranks on all of them.
    """

    variable: str
    hosts: Callable[[Environ], Sequence[str]]
    fix: str


def _listed(variable: str, separator: str | None = None) -> Callable[[Environ], Sequence[str]]:
    return lambda environ: [name for name in environ.get(variable, "").split(separator) if name]


def _counted(variable: str, first: str) -> Callable[[Environ], Sequence[str]]:
    def hosts(environ: Environ) -> Sequence[str]:
        count = environ.get(variable, "")
        return [environ.get(first, ""), *[""] * (int(count) - 1)] if is_number(count) and int(count) > 1 else []

    return hosts


def _of_pbs(environ: Environ) -> Sequence[str]:
    """A file with a line for each place on a host."""
    try:
        return list(dict.fromkeys(Path(environ.get("PBS_NODEFILE", "")).read_text(encoding="utf-8").split()))
    except (OSError, UnicodeDecodeError):
        return []


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
    return [""] * (int(index) + 1) if "KUBERNETES_SERVICE_HOST" in environ and is_number(index) else []


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
        _TORCHRUN.format("$SKYPILOT_NUM_NODES", "$SKYPILOT_NODE_RANK", '$(echo "$SKYPILOT_NODE_IPS" | head -n1)'),
    ),
    "dstack": Cluster(
        "DSTACK_NODES_NUM",
        _counted("DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
        _TORCHRUN.format("$DSTACK_NODES_NUM", "$DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP"),
    ),
    "Vertex AI": Cluster(
        "CLUSTER_SPEC", _of_vertex, _TORCHRUN.format("HOSTS", "I", "HOST") + "   (HOST: the one of workerpool0)"
    ),
    "Azure Batch": Cluster(
        "AZ_BATCH_NODE_LIST",
        _listed("AZ_BATCH_NODE_LIST", ";"),
        "distribution: {type: pytorch, process_count_per_instance: N} in the job",
    ),
    "LSF": Cluster("LSB_MCPU_HOSTS", _of_lsf, "jsrun -n RANKS -a 1 -g 1 python -m threefold ...   in the job script"),
    "PBS": Cluster("PBS_NODEFILE", _of_pbs, "mpiexec -n RANKS --ppn N python -m threefold ...   in the job script"),
    "an Indexed Job": Cluster(
        "JOB_COMPLETION_INDEX",
        _of_indexed_job,
        _TORCHRUN.format("PODS", "$JOB_COMPLETION_INDEX", "NAME-OF-POD-0.SERVICE")
        + ", or: threefold submit kubernetes --kind jobset",
    ),
}


def reserved(environ: Environ) -> tuple[str, Cluster, Sequence[str]] | None:
    """(its name, the cluster, its hosts) of the first that says that it has several; None if none does."""
    for name, cluster in CLUSTERS.items():
        if len(hosts := cluster.hosts(environ)) > 1:
            return name, cluster, hosts
    return None
