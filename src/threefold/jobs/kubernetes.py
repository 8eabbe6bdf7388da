"""A Kubeflow PyTorchJob or TrainJob, or a JobSet of Kubernetes, with the config as a ConfigMap; needs kubectl.

torchrun runs in every pod and starts its ranks. A pod that ends with an error, or after a stop that saved, is restarted
and resumes from a volume that all pods share. Secrets are named; their values stay in the cluster's own Secret objects.
A TrainJob brings its own runtime: what a TrainJob may change in another's differs in every release of Trainer.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from threefold.config.schema import Config
from threefold.config.yaml_text import as_document, dump
from threefold.errors import EXIT_STOPPED_WITH_CHECKPOINT, Problem
from threefold.jobs.clusters import Job
from threefold.jobs.job import Ranks, checked_name, handed_to, with_set
from threefold.jobs.settings import setting
from threefold.jsonl import Values

KINDS = ("pytorchjob", "trainjob", "jobset")
_CONFIG_FOLDER = "/etc/threefold"
_TRAIN = ("-m", "threefold", "train", f"{_CONFIG_FOLDER}/config.yaml")
_PORT = 29500
_LEAVE_S = 30
_GPU = "nvidia.com/gpu"
_TRAINER = "trainer.kubeflow.org"
# Resources whose drivers register memory, which a process may lock only with this capability.
_RDMA = re.compile(r"efa|rdma|hca|roce|infiniband|/ib", re.IGNORECASE)


EXAMPLE = "--image IMAGE --volume CLAIM=/runs --log.dir /runs/a"


@dataclass(frozen=True)
class KubernetesSettings:
    """Settings of a Kubernetes job that are not in a config."""

    image: str = setting("image with threefold and torch", ...)
    # A digest of the job's content if None, so that another job gets another one.
    name: str | None = setting("the job's name; default: threefold and a digest of the job")
    kind: str = setting("pytorchjob, trainjob or jobset", "pytorchjob")
    namespace: str | None = setting("namespace; default: kubectl's")
    gpus_per_node: int | None = setting("default: one per rank, none with mesh.device: cpu")
    cpu: str | None = setting("cores for each pod: 16")
    memory: str | None = setting("memory for each pod: 64Gi")
    shm: str = setting("size of /dev/shm", "8Gi")
    volumes: Mapping[str, str] = setting(
        "a volume claim, mounted at a folder",
        {},
        option="volume",
        form="CLAIM=/folder",
        example="my-claim=/runs",
    )
    variables: Mapping[str, str] = setting(
        "variable for the pods, or a name to pass yours on", {}, option="env", form="NAME=VALUE",
        secret_fix="--secret {name}=SECRET/KEY",
    )  # fmt: skip
    secrets: Mapping[str, str] = setting(
        "a key of a Secret",
        {},
        option="secret",
        form="NAME=SECRET/KEY",
        example="HF_TOKEN=my-secret/token",
    )
    restarts: int = setting("how often pods are restarted", 10)
    resources: Mapping[str, str] = setting(
        "a limit of each pod",
        {},
        option="resource",
        form="NAME=COUNT",
        example="vpc.amazonaws.com/efa=4",
    )
    queue: str | None = setting("Kueue local queue")
    volcano_queue: str | None = setting("Volcano queue, for a gang of all pods")
    more: Mapping[str, str] = setting(
        "another field of the pods",
        {},
        option="set",
        form="PATH=YAML",
        example="priorityClassName=high",
    )


Settings = KubernetesSettings


def problems(config: Config, ranks: Ranks, options: KubernetesSettings) -> Iterator[Problem]:
    """Yields what would make the job fail or lose its work."""
    if options.kind not in KINDS:
        yield Problem(
            f"--kind {options.kind!r}", f"one of {', '.join(KINDS)}", f"--kind {KINDS[0]}"
        )
    for name, secret in options.secrets.items():
        if len(secret.split("/")) != 2 or not all(secret.split("/")):
            what = f"--secret {name}={secret} does not name a key of a Secret"
            yield Problem(what, "NAME=SECRET/KEY", f"--secret {name}=my-secret/{name}")
    if options.volcano_queue is not None and options.kind != "pytorchjob":
        yield Problem(
            f"--volcano-queue with --kind {options.kind}, whose operator creates no pod group for Volcano",
            "a PyTorchJob, whose operator does, or a queue of Kueue's",
            "--kind pytorchjob   (or --queue)",
        )
    if options.queue is not None and options.volcano_queue is not None:
        yield Problem(
            "--queue and --volcano-queue",
            "one of them: each decides when the pods start",
            "leave one out",
        )
    run = PurePosixPath(config.log.dir) if config.log.dir is not None else None
    if run is None or not any(
        run.is_relative_to(folder) for folder in options.volumes.values()
    ):
        where = "is not set" if run is None else f"= {run} is not on a volume"
        shared = " that all pods share" if ranks.num_hosts > 1 else ""
        yield Problem(
            f"log.dir {where}: the files that a pod writes are lost with it",
            f"a folder on a volume{shared}, so that a restarted pod can resume",
            "--volume CLAIM=/runs --log.dir /runs/my-run",
        )


def manifests(config: Config, ranks: Ranks, options: KubernetesSettings) -> list[Values]:
    """The ConfigMap, for a TrainJob its runtime, and the job.

    Names hold a digest of what they name: a job that is submitted later never changes the config of one that runs.
    """
    job = Job(config, ranks, {})
    if options.name is None:
        drawn = replace(options, name="threefold")
        options = replace(options, name=f"threefold-{_digest(_documents(job, drawn))}")
    assert options.name is not None
    checked_name(options.name, longest=41, lower=True)
    return _documents(job, options)


def _documents(job: Job, options: KubernetesSettings) -> list[Values]:
    builders = {"pytorchjob": _pytorch_job, "trainjob": _train_job, "jobset": _job_set}
    config_map = {
        **_resource(options, "v1", "ConfigMap", name=_config_name(job.config, options)),
        "data": _config_data(job.config),
        "immutable": True,
    }
    return [config_map, *builders[options.kind](job, options)]


def _config_data(config: Config) -> dict[str, str]:
    return {"config.yaml": dump(config, nulls=False)}


def _config_name(config: Config, options: KubernetesSettings) -> str:
    return f"{options.name}-config-{_digest(_config_data(config))}"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def text(job: Job, options: KubernetesSettings) -> str:
    """The manifests."""
    return as_document(*manifests(job.config, job.ranks, options)).rstrip("\n")


def send(job: Job, options: KubernetesSettings) -> str:
    """Creates the objects with kubectl and returns its output; raises like `handed_to`."""
    documents = manifests(job.config, job.ranks, options)
    elsewhere = "threefold submit kubernetes ... --dry-run > job.yaml, and there: kubectl create -f job.yaml"
    fix = "kubectl auth can-i create pytorchjobs; --kind jobset or trainjob if the cluster has another operator"
    return "\n".join(
        handed_to(
            # An existing object under a digest is the same; an existing job is another one.
            "kubectl",
            "create" if number == len(documents) else "apply",
            "-f",
            "-",
            text=as_document(document),
            missing=(
                "kubectl, which knows the cluster and who you are",
                f"install kubectl, or: {elsewhere}",
            ),
            refused=(
                "a cluster with the operator of this --kind, the right to create jobs there, and an unused name",
                fix,
            ),
        )
        for number, document in enumerate(documents, start=1)
    )


def _resource(
    options: KubernetesSettings, version: str, kind: str, *, name: str | None = None
) -> Values:
    namespace = {"namespace": options.namespace} if options.namespace is not None else {}
    labels = {"app.kubernetes.io/name": "threefold"}
    if options.queue is not None and kind in ("PyTorchJob", "JobSet", "TrainJob"):
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    metadata = {"name": name or options.name, **namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _environment(job: Job, options: KubernetesSettings) -> list[Values]:
    # The cluster would put the value of another variable in place of $(NAME).
    values = {name: value.replace("$(", "$$(") for name, value in options.variables.items()}
    # torchrun reads this: how long its ranks may take to save after a stop signal.
    values["PET_SHUTDOWN_TIMEOUT"] = str(job.config.checkpoint.grace_s)
    entries: list[Values] = [{"name": name, "value": value} for name, value in values.items()]
    for name, secret in options.secrets.items():
        secret_name, _, key = secret.partition("/")
        entries.append(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}}
        )
    return entries


def _resources(job: Job, options: KubernetesSettings) -> Values:
    gpus = options.gpus_per_node
    if gpus is None:
        gpus = 0 if job.config.mesh.device == "cpu" else job.ranks.per_host
    limits: dict[str, Any] = {**({_GPU: str(gpus)} if gpus else {}), **options.resources}
    requests = {
        key: value
        for key, value in (("cpu", options.cpu), ("memory", options.memory))
        if value is not None
    }
    return {key: value for key, value in (("limits", limits), ("requests", requests)) if value}


def _pod(job: Job, options: KubernetesSettings, container: Values) -> Values:
    volumes: list[Values] = [
        {"name": "config", "configMap": {"name": _config_name(job.config, options)}},
        # The default of 64 MiB is too small for loader processes and NCCL.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
    ]
    mounts: list[Values] = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, (claim, folder) in enumerate(options.volumes.items()):
        volumes.append(
            {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        )
        mounts.append({"name": f"volume-{number}", "mountPath": folder})
    if any(map(_RDMA.search, options.resources)):
        locking = {"capabilities": {"add": ["IPC_LOCK"]}}
        container = {**container, "securityContext": locking}
    pod = {
        "terminationGracePeriodSeconds": job.config.checkpoint.grace_s + _LEAVE_S,
        "containers": [{**container, "volumeMounts": mounts}],
        "volumes": volumes,
    }
    return with_set(pod, options.more)


def _container(job: Job, options: KubernetesSettings, *, name: str) -> Values:
    environment = _environment(job, options)
    resources = _resources(job, options)
    return {"name": name, "image": options.image, "env": environment, "resources": resources}


def _torchrun_pod(
    job: Job, options: KubernetesSettings, *, container: str, place: list[str]
) -> Values:
    """A pod that starts its ranks itself; `place` is its index among several pods."""
    ranks = job.ranks
    sizes = [f"--nnodes={ranks.num_hosts}", f"--nproc-per-node={ranks.per_host}"]
    command = ["torchrun", *sizes, *(place if ranks.num_hosts > 1 else []), *_TRAIN]
    return _pod(job, options, {**_container(job, options, name=container), "command": command})


def _pytorch_job(job: Job, options: KubernetesSettings) -> list[Values]:
    ranks = job.ranks
    # The operator sets these in every pod; there, RANK is the pod's number.
    place = [
        "--node-rank=$(RANK)",
        "--master-addr=$(MASTER_ADDR)",
        "--master-port=$(MASTER_PORT)",
    ]
    pod = _torchrun_pod(job, options, container="pytorch", place=place)
    replicas = {"Master": 1, **({"Worker": ranks.num_hosts - 1} if ranks.num_hosts > 1 else {})}
    policy: dict[str, Any] = {"backoffLimit": options.restarts}
    if options.volcano_queue is not None:
        policy["schedulingPolicy"] = {
            "queue": options.volcano_queue,
            "minAvailable": ranks.num_hosts,
        }
    return [
        {
            **_resource(options, "kubeflow.org/v1", "PyTorchJob"),
            "spec": {
                "nprocPerNode": str(ranks.per_host),
                "runPolicy": policy,
                "pytorchReplicaSpecs": {
                    kind: {
                        "replicas": count,
                        "restartPolicy": "OnFailure",
                        "template": {"spec": pod},
                    }
                    for kind, count in replicas.items()
                },
            },
        }
    ]


def _train_job(job: Job, options: KubernetesSettings) -> list[Values]:
    """A runtime of the job's own, and the job; Trainer gives torchrun its rank and rendezvous by PET_ variables."""
    spec = _jobs(_pod(job, options, _container(job, options, name="node")), options)
    # By this label Trainer knows the job whose container gets the command.
    spec["replicatedJobs"][0]["template"]["metadata"] = {
        "labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}
    }
    runtime = _resource(options, f"{_TRAINER}/v1alpha1", "TrainingRuntime")
    runtime["metadata"]["labels"][f"{_TRAINER}/framework"] = "torch"
    runtime["metadata"]["name"] = name = f"{options.name}-runtime-{_digest(spec)}"
    return [
        {
            **runtime,
            "spec": {
                "mlPolicy": {"numNodes": job.ranks.num_hosts, "torch": {}},
                "template": {"spec": spec},
            },
        },
        {
            **_resource(options, f"{_TRAINER}/v1alpha1", "TrainJob"),
            "spec": {
                "runtimeRef": {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": name},
                "trainer": {
                    "command": ["torchrun", *_TRAIN],
                    "numNodes": job.ranks.num_hosts,
                    "numProcPerNode": job.ranks.per_host,
                },
            },
        },
    ]


def _jobs(pod: Values, options: KubernetesSettings, **sizes: Any) -> Values:
    """What a JobSet runs: pods that are made again together when one of them ends without having finished.

    An eviction, and a stop that saved, do not count as restarts.
    """
    apart = [
        {
            "action": "FailJob",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        {
            "action": "FailJob",
            "onExitCodes": {"operator": "In", "values": [EXIT_STOPPED_WITH_CHECKPOINT]},
        },
    ]
    job = {**sizes, "backoffLimit": 0, "podFailurePolicy": {"rules": apart}}
    free = {
        "name": "stopped",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    template = {"spec": {**job, "template": {"spec": {"restartPolicy": "Never", **pod}}}}
    return {
        "failurePolicy": {"maxRestarts": options.restarts, "rules": [free]},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": template}],
    }


def _job_set(job: Job, options: KubernetesSettings) -> list[Values]:
    master = f"{options.name}-node-0-0.{options.name}"
    place = [
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={master}",
        f"--master-port={_PORT}",
    ]
    pod = _torchrun_pod(job, options, container="node", place=place)
    count = job.ranks.num_hosts
    spec = _jobs(pod, options, parallelism=count, completions=count, completionMode="Indexed")
    return [{**_resource(options, "jobset.x-k8s.io/v1alpha2", "JobSet"), "spec": spec}]
