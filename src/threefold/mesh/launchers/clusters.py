"""Schedulers and clouds that reserve several hosts: their number, the first one, and how to start ranks on them.

They start one process on each host, or on the first one alone, and publish the participants in their own variables.
Such a process must not train alone: each host would do the whole run.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from threefold.mesh.launchers.info import Environ, is_number

_TORCHRUN = (
    "torchrun --nnodes={} --node-rank={} --master-addr={} --nproc-per-node=N -m threefold ..."
)
_MPIRUN = "mpirun -n RANKS python -m threefold ...   in the job script"

# A variable that counts hosts, another that numbers this one, and one with the first's address: of one prefix.
_COUNT = re.compile(
    r"(\w+_)(?:NODES_NUM|(?:NODE|HOST|WORKER|REPLICA)_(?:COUNT|NUM)"
    r"|(?:NUM|TOTAL)_(?:WORKERS|REPLICAS)|NUM_HOSTS|GROUP_SIZE)|(|\w+_)(?:NNODES|NUM_NODES)"
)
_INDEX = "(?:NODE|HOST|WORKER|REPLICA|ROLE)_(?:RANK|INDEX|ID)"
_ADDRESS = r"\w*(?:MASTER|LEADER|MAIN|WORKER_0)_\w*(?:ADDR(?:ESS)?|HOST(?:NAME)?|IP)"


@dataclass(frozen=True)
class Cluster:
    """A scheduler or cloud, as it describes itself to a process.

    Attributes:
        variable: the variable that describes the hosts.
        hosts: their names, as far as they are known; "" for each that is not.
        fix: how to start ranks on all of them.
        several: what the variable's value shows, if it is not a number of hosts.
    """

    variable: str
    hosts: Callable[[Environ], Sequence[str]]
    fix: str
    several: str = ""


def _listed(
    variable: str, separator: str | None = None, beside: str = ""
) -> Callable[[Environ], Sequence[str]]:
    """The names that a variable lists, if `beside` is set too."""

    def hosts(environ: Environ) -> Sequence[str]:
        names = environ.get(variable, "") if not beside or beside in environ else ""
        return [name for name in names.split(separator) if name]

    return hosts


def _counted(
    variable: str, first: str = "", beside: str = ""
) -> Callable[[Environ], Sequence[str]]:
    """Number of hosts from one variable and the first host from another, if `beside` is set too."""

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


def _filed(variable: str, count: str = "") -> Callable[[Environ], Sequence[str]]:
    """A file with a line for each slot of a host; if it cannot be read, the number in `count`."""

    def hosts(environ: Environ) -> Sequence[str]:
        if variable not in environ:
            return []
        try:
            text = Path(environ[variable]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return _counted(count)(environ)
        return list(dict.fromkeys(text.split()))

    return hosts


def _of_volcano(environ: Environ) -> Sequence[str]:
    """The pods of each task: `VC_WORKER_HOSTS=a,b`."""
    if "VC_TASK_INDEX" not in environ:
        return []
    names = sorted(name for name in environ if re.fullmatch("VC_[A-Z0-9_]+_HOSTS", name))
    return [host for name in names for host in environ[name].split(",") if host]


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
    # A pod knows its number, but not how many there are.
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
        "SKYPILOT_NUM_NODES",
        _listed("SKYPILOT_NODE_IPS", beside="SKYPILOT_NUM_NODES"),
        _TORCHRUN.format(
            "$SKYPILOT_NUM_NODES",
            "$SKYPILOT_NODE_RANK",
            '$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
        ),
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
        _filed("PBS_NODEFILE", "PBS_NUM_NODES"),
        "mpiexec -n RANKS --ppn N python -m threefold ...   in the job script",
    ),
    **{
        name: Cluster(variable, _filed(variable), _MPIRUN)
        for name, variable in (
            ("OAR", "OAR_NODEFILE"),
            ("Cobalt", "COBALT_NODEFILE"),
            ("Fujitsu's job scheduler", "PJM_O_NODEINF"),
        )
    },
    "Google Cloud Batch": Cluster(
        "BATCH_HOSTS_FILE",
        _filed("BATCH_HOSTS_FILE"),
        _TORCHRUN.format(
            '$(wc -l < "$BATCH_HOSTS_FILE")',
            "$BATCH_TASK_INDEX",
            '$(head -n1 "$BATCH_HOSTS_FILE")',
        ),
    ),
    "Volcano": Cluster(
        "VC_TASK_INDEX",
        _of_volcano,
        _TORCHRUN.format("PODS", "$VC_TASK_INDEX", "HOST")
        + "   (HOST: the first of VC_WORKER_HOSTS)",
        several="there are several pods",
    ),
    "an Indexed Job": Cluster(
        "JOB_COMPLETION_INDEX",
        _of_indexed_job,
        _TORCHRUN.format("PODS", "$JOB_COMPLETION_INDEX", "NAME-OF-POD-0.SERVICE")
        + ", or: threefold submit kubernetes --kind jobset",
        several="there are several pods",
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
    "Grid Engine": Cluster("NHOSTS", _counted("NHOSTS", beside="PE_HOSTFILE"), _MPIRUN),
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
}


def _counting(environ: Environ) -> Iterator[tuple[str, Cluster]]:
    """Whatever numbers the hosts of a job, by the names that such variables have: NNODES beside NODE_RANK."""
    for count in sorted(environ):
        if (named := _COUNT.fullmatch(count)) is None:
            continue
        prefix = named[1] or named[2] or ""
        index, address = (
            next((name for name in sorted(environ) if re.fullmatch(prefix + part, name)), "")
            for part in (_INDEX, _ADDRESS)
        )
        if is_number(environ.get(index, "")):
            fix = _TORCHRUN.format(
                f"${count}", f"${index}", f"${address}" if address else "HOST"
            )
            yield count, Cluster(count, _counted(count, address), fix)


def reserved(environ: Environ) -> tuple[str, Cluster, Sequence[str]] | None:
    """(its name, the cluster, its hosts) of the first cluster with several hosts; None if there is none."""
    for name, cluster in (*CLUSTERS.items(), *_counting(environ)):
        if len(hosts := cluster.hosts(environ)) > 1:
            return name, cluster, hosts
    return None
