"""A Kubernetes job from a config: a Kubeflow PyTorchJob or TrainJob, or a bare JobSet, with the config as a ConfigMap.

torchrun runs in every pod and starts its ranks. A pod that ends with an error, or after a stop that saved, is restarted
and resumes from a volume that all pods share. Secrets are named; their values stay in the cluster's own Secret objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from threefold.config.schema import Config
from threefold.config.text import as_document, dump
from threefold.errors import Problem
from threefold.jobs.job import Ranks, checked_name, handed_to

KINDS = ("pytorchjob", "trainjob", "jobset")
_CONFIG_FOLDER = "/etc/threefold"
_TRAIN = ("-m", "threefold", "train", f"{_CONFIG_FOLDER}/config.yaml")
_PORT = 29500
_LEAVE_S = 30
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class KubernetesOptions:
    """Settings of a Kubernetes job that are not in a config; `threefold submit kubernetes --help` describes them."""

    name: str
    image: str
    kind: str = "pytorchjob"
    namespace: str | None = None
    gpus_per_node: int | None = None
    cpu: str | None = None
    memory: str | None = None
    shm: str = "8Gi"
    volumes: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    restarts: int = 10
    runtime: str = "torch-distributed"


def problems(config: Config, ranks: Ranks, options: KubernetesOptions) -> Iterator[Problem]:
    """Yields what would make the job fail or lose its work."""
    if options.kind not in KINDS:
        yield Problem(f"--kind {options.kind!r}", f"one of {', '.join(KINDS)}", f"--kind {KINDS[0]}")
    for name, secret in options.secrets.items():
        if len(secret.split("/")) != 2 or not all(secret.split("/")):
            what = f"--secret {name}={secret} does not name a key of a Secret"
            yield Problem(what, "NAME=SECRET/KEY", f"--secret {name}=my-secret/{name}")
    run = PurePosixPath(config.log.dir) if config.log.dir is not None else None
    if run is None or not any(run.is_relative_to(folder) for folder in options.volumes.values()):
        where = "is not set" if run is None else f"= {run} is not on a volume"
        shared = " that all pods share" if ranks.num_hosts > 1 else ""
        what = f"log.dir {where}: the files that a pod writes are lost with it"
        fix = "--volume CLAIM=/runs --log.dir /runs/my-run"
        yield Problem(what, f"a folder on a volume{shared}, so that a restarted pod can resume", fix)


def manifests(config: Config, ranks: Ranks, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Returns the ConfigMap and the job."""
    checked_name(options.name, longest=50, lower=True)
    builders = {"pytorchjob": _pytorch_job, "trainjob": _train_job, "jobset": _job_set}
    config_map = _resource(options, "v1", "ConfigMap", name=f"{options.name}-config")
    config_map["data"] = {"config.yaml": dump(config, nulls=False)}
    return [config_map, builders[options.kind](config, ranks, options)]


def submit(documents: list[dict[str, Any]]) -> str:
    """Applies the manifests with kubectl and returns its output; raises as `handed_to`."""
    elsewhere = "threefold submit kubernetes ... --dry-run > job.yaml, and apply that elsewhere"
    fix = "kubectl auth can-i create pytorchjobs; --kind jobset or trainjob if the cluster has another operator"
    return handed_to(
        *("kubectl", "apply", "-f", "-"),
        text=as_document(*documents),
        missing=("kubectl, which knows the cluster and who you are", f"install kubectl, or: {elsewhere}"),
        refused=("a cluster with the operator of this --kind, and the right to create jobs in the namespace", fix),
    )


def _resource(options: KubernetesOptions, version: str, kind: str, *, name: str | None = None) -> dict[str, Any]:
    namespace = {"namespace": options.namespace} if options.namespace is not None else {}
    metadata = {"name": name or options.name, **namespace, "labels": {"app.kubernetes.io/name": "threefold"}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _environment(config: Config, options: KubernetesOptions) -> list[dict[str, Any]]:
    # The cluster would put the value of another variable in place of $(NAME).
    given = {name: value.replace("$(", "$$(") for name, value in options.variables.items()}
    found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in given.items()]
    # torchrun reads this: how long its ranks may take to save after a stop signal.
    found.append({"name": "PET_SHUTDOWN_TIMEOUT", "value": str(config.checkpoint.grace_s)})
    for name, secret in options.secrets.items():
        secret_name, _, key = secret.partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}})
    return found


def _resources(config: Config, ranks: Ranks, options: KubernetesOptions) -> dict[str, Any]:
    gpus = options.gpus_per_node
    if gpus is None:
        gpus = 0 if config.mesh.device == "cpu" else ranks.per_host
    limits: dict[str, Any] = {_GPU: str(gpus)} if gpus else {}
    requests = {key: value for key, value in (("cpu", options.cpu), ("memory", options.memory)) if value is not None}
    return {key: value for key, value in (("limits", limits), ("requests", requests)) if value}


def _pod(config: Config, options: KubernetesOptions, container: dict[str, Any]) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": f"{options.name}-config"}},
        # The default of 64 MiB is too small for loader processes and NCCL.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, (claim, folder) in enumerate(options.volumes.items()):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": folder})
    return {
        **({"serviceAccountName": options.service_account} if options.service_account is not None else {}),
        "terminationGracePeriodSeconds": config.checkpoint.grace_s + _LEAVE_S,
        "containers": [{**container, "volumeMounts": mounts}],
        "volumes": volumes,
    }


def _torchrun_pod(
    config: Config, ranks: Ranks, options: KubernetesOptions, *, container: str, place: list[str]
) -> dict[str, Any]:
    """A pod that starts its ranks itself; `place` says which of several pods it is."""
    sizes = [f"--nnodes={ranks.num_hosts}", f"--nproc-per-node={ranks.per_host}"]
    values = {
        "name": container,
        "image": options.image,
        "command": ["torchrun", *sizes, *(place if ranks.num_hosts > 1 else []), *_TRAIN],
        "env": _environment(config, options),
        "resources": _resources(config, ranks, options),
    }
    return _pod(config, options, values)


def _pytorch_job(config: Config, ranks: Ranks, options: KubernetesOptions) -> dict[str, Any]:
    # The operator sets these in every pod; there, RANK is the pod's number.
    place = ["--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"]
    pod = _torchrun_pod(config, ranks, options, container="pytorch", place=place)
    replicas = {"Master": 1, **({"Worker": ranks.num_hosts - 1} if ranks.num_hosts > 1 else {})}
    return {
        **_resource(options, "kubeflow.org/v1", "PyTorchJob"),
        "spec": {
            "nprocPerNode": str(ranks.per_host),
            "runPolicy": {"backoffLimit": options.restarts},
            "pytorchReplicaSpecs": {
                kind: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
                for kind, count in replicas.items()
            },
        },
    }


def _train_job(config: Config, ranks: Ranks, options: KubernetesOptions) -> dict[str, Any]:
    """Kubeflow's runtime gives torchrun its rank and rendezvous through PET_ variables."""
    patch = {"name": "node", "template": {"spec": {"template": {"spec": _pod(config, options, {"name": "node"})}}}}
    return {
        **_resource(options, "trainer.kubeflow.org/v1alpha1", "TrainJob"),
        "spec": {
            "runtimeRef": {"name": options.runtime},
            "trainer": {
                "image": options.image,
                "command": ["torchrun", *_TRAIN],
                "numNodes": ranks.num_hosts,
                "numProcPerNode": ranks.per_host,
                "env": _environment(config, options),
                "resourcesPerNode": _resources(config, ranks, options),
            },
            "runtimePatches": [
                {"manager": "threefold", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}}}
            ],
        },
    }


def _job_set(config: Config, ranks: Ranks, options: KubernetesOptions) -> dict[str, Any]:
    master = f"{options.name}-node-0-0.{options.name}"
    place = ["--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={master}", f"--master-port={_PORT}"]
    pod = {"restartPolicy": "Never", **_torchrun_pod(config, ranks, options, container="node", place=place)}
    count = ranks.num_hosts
    job = {"parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": 0}
    return {
        **_resource(options, "jobset.x-k8s.io/v1alpha2", "JobSet"),
        "spec": {
            # A pod that ends takes its peers with it: all are recreated together.
            "failurePolicy": {"maxRestarts": options.restarts},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {"name": "node", "replicas": 1, "template": {"spec": {**job, "template": {"spec": pod}}}}
            ],
        },
    }
