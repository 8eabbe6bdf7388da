"""A Kubernetes job from a config: a Kubeflow PyTorchJob or TrainJob, or a bare JobSet, with the config as a ConfigMap.

torchrun runs in every pod and starts its ranks. A pod that ends with an error, or after a stop that saved, is started
again and resumes; what it resumes from lies on a volume that all pods share. Secrets are named, their values stay in
the cluster's own Secret objects.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from threefold.config.schema import Config
from threefold.errors import ConfigError, Problem, RunError
from threefold.jobs.job import Ranks, as_document, checked_name

KINDS = ("pytorchjob", "trainjob", "jobset")
_CONFIG_FOLDER = "/etc/threefold"
_PORT = 29500
_LEAVE_S = 30
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class KubernetesOptions:
    """What a config does not say about a Kubernetes job.

    Attributes:
        kind: one of KINDS.
        volumes: PersistentVolumeClaim to the folder where pods see it.
        secrets: variable to `SECRET/KEY`.
        restarts: how often pods are started again.
        runtime: a TrainJob's runtime.
    """

    name: str
    image: str
    kind: str = "pytorchjob"
    namespace: str | None = None
    gpus_per_pod: int | None = None
    cpu: str | None = None
    memory: str | None = None
    shm: str = "8Gi"
    volumes: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    restarts: int = 10
    runtime: str = "torch-distributed"


def problems(config: Config, ranks: Ranks, options: KubernetesOptions) -> list[Problem]:
    """What would make the job fail, or lose its work."""
    found = []
    if options.kind not in KINDS:
        found.append(Problem(f"--kind {options.kind!r}", f"one of {', '.join(KINDS)}", f"--kind {KINDS[0]}"))
    for name, secret in options.secrets.items():
        if len(secret.split("/")) != 2 or not all(secret.split("/")):
            found.append(
                Problem(
                    f"--secret {name}={secret} names no key of a Secret",
                    "NAME=SECRET/KEY",
                    f"--secret {name}=my-secret/{name}",
                )
            )
    folders = [PurePosixPath(folder) for folder in options.volumes.values()]
    run = PurePosixPath(config.log.dir) if config.log.dir is not None else None
    if run is None or not any(run.is_relative_to(folder) for folder in folders):
        where = "is not set" if run is None else f"= {run} is on no volume"
        found.append(
            Problem(
                f"log.dir {where}: what a pod writes is lost with it",
                f"a folder on a volume{' that all pods share' if ranks.num_hosts > 1 else ''}, so that a pod that is "
                "started again goes on",
                "--volume CLAIM=/runs --log.dir /runs/my-run",
            )
        )
    return found


def manifests(config: Config, ranks: Ranks, options: KubernetesOptions) -> list[dict[str, Any]]:
    """The ConfigMap and the job."""
    checked_name(options.name, longest=50, lower=True)
    builders = {"pytorchjob": _pytorch_job, "trainjob": _train_job, "jobset": _job_set}
    text = as_document(config.model_dump(mode="json", exclude_none=True))
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(options, f"{options.name}-config"),
        "data": {"config.yaml": text},
    }
    return [config_map, builders[options.kind](config, ranks, options)]


def submit(documents: list[dict[str, Any]]) -> str:
    """Applies the manifests with kubectl; returns what it says.

    Raises:
        ConfigError: there is no kubectl. RunError: it refuses.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise ConfigError(
            "there is no kubectl here",
            expected="kubectl, which knows the cluster and who you are",
            fix="install kubectl, or: threefold submit kubernetes ... --dry-run > job.yaml, and apply that elsewhere",
        )
    done = subprocess.run(
        [program, "apply", "-f", "-"], input=as_document(*documents), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunError(
            f"kubectl has not taken the job: {done.stderr.strip()}",
            expected="a cluster with the operator of this --kind, and the right to create jobs in the namespace",
            fix="kubectl auth can-i create pytorchjobs; --kind jobset or trainjob where the operator is another",
        )
    return done.stdout.strip()


def _metadata(options: KubernetesOptions, name: str) -> dict[str, Any]:
    namespace = {"namespace": options.namespace} if options.namespace is not None else {}
    return {"name": name, **namespace, "labels": {"app.kubernetes.io/name": "threefold"}}


def _command(ranks: Ranks, *, place: list[str]) -> list[str]:
    return ["torchrun", *place, "-m", "threefold", "train", f"{_CONFIG_FOLDER}/config.yaml"]


def _environment(config: Config, options: KubernetesOptions) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in options.variables.items()]
    # torchrun reads it: how long its ranks may save after a stop signal.
    found.append({"name": "PET_SHUTDOWN_TIMEOUT", "value": str(config.checkpoint.grace_s)})
    for name, secret in options.secrets.items():
        secret_name, _, key = secret.partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}})
    return found


def _resources(config: Config, ranks: Ranks, options: KubernetesOptions) -> dict[str, Any]:
    gpus = options.gpus_per_pod
    if gpus is None:
        gpus = 0 if config.mesh.device == "cpu" else ranks.per_host
    limits: dict[str, Any] = {_GPU: str(gpus)} if gpus else {}
    requests = {key: value for key, value in (("cpu", options.cpu), ("memory", options.memory)) if value is not None}
    return {key: value for key, value in (("limits", limits), ("requests", requests)) if value}


def _volumes(options: KubernetesOptions) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes of a pod, their mounts in the container)."""
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
    return volumes, mounts


def _pod(
    config: Config, ranks: Ranks, options: KubernetesOptions, *, container: str, place: list[str]
) -> dict[str, Any]:
    volumes, mounts = _volumes(options)
    return {
        **({"serviceAccountName": options.service_account} if options.service_account is not None else {}),
        "terminationGracePeriodSeconds": config.checkpoint.grace_s + _LEAVE_S,
        "containers": [
            {
                "name": container,
                "image": options.image,
                "command": _command(ranks, place=place),
                "env": _environment(config, options),
                "resources": _resources(config, ranks, options),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _pytorch_job(config: Config, ranks: Ranks, options: KubernetesOptions) -> dict[str, Any]:
    place = [f"--nnodes={ranks.num_hosts}", f"--nproc-per-node={ranks.per_host}"]
    if ranks.num_hosts > 1:
        # The operator sets these in every pod; RANK is the pod's number there.
        place += ["--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)"]
    pod = _pod(config, ranks, options, container="pytorch", place=place)
    replicas = {"Master": 1, **({"Worker": ranks.num_hosts - 1} if ranks.num_hosts > 1 else {})}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(options, options.name),
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
    """Kubeflow's runtime gives torchrun its place through PET_ variables."""
    volumes, mounts = _volumes(options)
    account = {"serviceAccountName": options.service_account} if options.service_account is not None else {}
    spec = {
        **account,
        "terminationGracePeriodSeconds": config.checkpoint.grace_s + _LEAVE_S,
        "volumes": volumes,
        "containers": [{"name": "node", "volumeMounts": mounts}],
    }
    patch = {
        "name": "node",
        "template": {"spec": {"template": {"spec": spec}}},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(options, options.name),
        "spec": {
            "runtimeRef": {"name": options.runtime},
            "trainer": {
                "image": options.image,
                "command": _command(ranks, place=[]),
                "numNodes": ranks.num_hosts,
                "numProcPerNode": ranks.per_host,
                "env": _environment(config, options),
                "resourcesPerNode": _resources(config, ranks, options),
            },
            "runtimePatches": [
                {
                    "manager": "threefold",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
                }
            ],
        },
    }


def _job_set(config: Config, ranks: Ranks, options: KubernetesOptions) -> dict[str, Any]:
    place = [f"--nnodes={ranks.num_hosts}", f"--nproc-per-node={ranks.per_host}"]
    if ranks.num_hosts > 1:
        master = f"{options.name}-node-0-0.{options.name}"
        place += ["--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={master}", f"--master-port={_PORT}"]
    pod = {"restartPolicy": "Never", **_pod(config, ranks, options, container="node", place=place)}
    count = ranks.num_hosts
    job = {"parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": 0}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(options, options.name),
        "spec": {
            # A pod that ends takes its peers along: all are made again together.
            "failurePolicy": {"maxRestarts": options.restarts},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [
                {"name": "node", "replicas": 1, "template": {"spec": {**job, "template": {"spec": pod}}}}
            ],
        },
    }


def shown(documents: list[dict[str, Any]]) -> str:
    """The manifests as the text that kubectl reads."""
    return as_document(*json.loads(json.dumps(documents)))
