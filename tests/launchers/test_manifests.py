"""Our Kubernetes manifests against the schemas: Kubernetes' own, strictly, and Kubeflow's models of its jobs."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from launchers import sagemaker
from threefold.config.loading import validate
from threefold.jobs import kubernetes
from threefold.jobs.job import ranks_of
from threefold.jobs.kubernetes import KINDS, KubernetesSettings

pytestmark = [
    pytest.mark.launchers,
    pytest.mark.skipif(sagemaker.why_not() is not None, reason=str(sagemaker.why_not())),
]

# The schemas lie in the launchers' venv. Kubeflow's models take unknown fields, so what they give back is compared.
CHECK = """
import json, sys
import kubernetes_validate
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob as TrainJob

config_map, *others, job = json.load(sys.stdin)
def strict(document):
    kubernetes_validate.validate(document, "1.30", strict=True)
strict(config_map)
pods = []
if job["kind"] == "PyTorchJob":
    pods = [each["template"] for each in job["spec"]["pytorchReplicaSpecs"].values()]
else:
    if job["kind"] == "TrainJob":
        assert TrainJob.from_dict(job).to_dict() == job, TrainJob.from_dict(job).to_dict()
        # A runtime of the job's own, which has a JobSet's spec.
        (runtime,) = others
        spec = runtime["spec"]["template"]["spec"]
        job = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "x"}, "spec": spec}
    for each in job["spec"]["replicatedJobs"]:
        strict({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **each["template"]})
    assert JobSet.from_dict(job).to_dict() == job, JobSet.from_dict(job).to_dict()
for pod in pods:
    strict({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod})
"""


def made(kind: str, num_hosts: int) -> list[dict[str, Any]]:
    config = validate({"mesh": {"dp": 4}, "log": {"dir": "/runs/a"}})
    job = ranks_of(config.mesh, num_hosts=num_hosts, per_host=None)
    options = KubernetesSettings(
        name="job",
        image="image",
        kind=kind,
        namespace="team",
        cpu="8",
        memory="32Gi",
        volumes={"claim": "/runs"},
        variables={"A": "b"},
        secrets={"HF_TOKEN": "hf/token"},
        resources={"vpc.amazonaws.com/efa": "4"},
        more={
            "serviceAccountName": "trainer",
            "nodeSelector": "{pool: gpu}",
            "tolerations": "[{key: nvidia.com/gpu, operator: Exists}, {key: team, value: ml, effect: NoSchedule}]",
            "imagePullSecrets": "[{name: registry}]",
            "priorityClassName": "high",
            "hostNetwork": "true",
            "dnsPolicy": "ClusterFirstWithHostNet",
        },
        queue="research",
    )
    assert list(kubernetes.problems(config, job, options)) == []
    return kubernetes.manifests(config, job, options)


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_are_what_the_cluster_knows(kind: str, num_hosts: int) -> None:
    done = check(made(kind, num_hosts))
    assert done.returncode == 0, done.stderr


def test_check_itself_finds_a_field_that_is_none() -> None:
    documents = made("jobset", 1)
    documents[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "shmSize"
    ] = "1Gi"
    assert "shmSize" in check(documents).stderr


def check(documents: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(sagemaker.PYTHON), "-c", CHECK],
        input=json.dumps(documents),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
