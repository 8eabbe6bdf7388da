"""`threefold submit`: the config is loaded and checked here, the job is rendered, and shown or sent. No torch."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from threefold.config import loading
from threefold.config.schema import Config
from threefold.errors import ConfigError, RunError
from threefold.jobs import kubernetes as clusters_kubernetes
from threefold.jobs import sagemaker as clusters_sagemaker
from threefold.jobs import slurm as clusters_slurm
from threefold.jobs.job import Ranks, ranks_of
from threefold.jobs.kubernetes import KubernetesOptions
from threefold.jobs.sagemaker import SageMakerOptions
from threefold.jobs.slurm import SlurmOptions
from threefold.mesh import environment


def read_config(path: str | None, overrides: Sequence[tuple[str, str]]) -> Config:
    """The config that the job will train with."""
    return loading.load(path, overrides, environ=environment.variables()).config


def ranks(config: Config, *, num_hosts: int, per_host: int | None, option: str) -> Ranks:
    """The job's ranks, checked against the mesh."""
    return ranks_of(config.mesh, num_hosts=num_hosts, per_host=per_host, option=option)


def slurm(config: Config, job: Ranks, options: SlurmOptions, *, dry_run: bool) -> Iterator[str]:
    """Submits the batch script; yields what there is to tell.

    Raises:
        ConfigError: there is no sbatch. RunError: it refuses.
    """
    text = clusters_slurm.script(config, job, options)
    if dry_run:
        yield text.rstrip("\n")
        return
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError(
            "there is no sbatch here",
            expected="a host that submits to Slurm, usually a login node",
            fix="threefold submit slurm ... --dry-run > job.sh, and there: sbatch job.sh",
        )
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            f"sbatch has not taken the job: {done.stderr.strip()}",
            expected="options that this cluster accepts",
            fix="--dry-run shows the script; sinfo shows partitions, sacctmgr show assoc your accounts",
        )
    yield done.stdout.strip()


def sagemaker(
    config: Config, job: Ranks, options: SageMakerOptions, *, region: str | None, dry_run: bool, source_to: Path | None
) -> Iterator[str]:
    """Uploads the source and creates the training job; yields what there is to tell.

    Args:
        source_to: also writes the source's files here, for a job of the SageMaker SDK.
    """
    environ = environment.variables()
    region = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    found = clusters_sagemaker.problems(config, job, options)
    if found:
        raise ConfigError.of(found)
    made = clusters_sagemaker.request(job, options, region=region)
    if source_to is not None:
        source_to.mkdir(parents=True, exist_ok=True)
        for name, content in clusters_sagemaker.source_files(config, options).items():
            (source_to / name).write_bytes(content)
        yield f"wrote {source_to}: entry script {clusters_sagemaker.ENTRY}"
    for warning in clusters_sagemaker.warnings(job, options):
        yield f"# warning: {warning}"
    if dry_run:
        # What variables hold may be private, and a terminal's text is kept.
        hidden = replace(options, variables=dict.fromkeys(options.variables, "(not shown)"))
        yield json.dumps(clusters_sagemaker.request(job, hidden, region=region), indent=2)
        return
    source = clusters_sagemaker.archive(config, options)
    yield clusters_sagemaker.submit(made, source, to=clusters_sagemaker.source_of(options), region=region)


def kubernetes(config: Config, job: Ranks, options: KubernetesOptions, *, dry_run: bool) -> Iterator[str]:
    """Applies the manifests; yields what there is to tell."""
    found = clusters_kubernetes.problems(config, job, options)
    if found:
        raise ConfigError.of(found)
    documents = clusters_kubernetes.manifests(config, job, options)
    if dry_run:
        yield clusters_kubernetes.shown(documents).rstrip("\n")
        return
    yield clusters_kubernetes.submit(documents)
