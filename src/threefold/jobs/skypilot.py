"""A managed job of SkyPilot, which recovers from lost hosts; needs `sky`.

Its task, in YAML, holds the config and starts torchrun on every host.

SkyPilot finds hosts at a cloud that has them, and starts the task again, elsewhere if need be, when a spot host is
taken away. That comes without a signal, so checkpoints must be written on the way, to a place that outlives the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from threefold.config.schema import Config
from threefold.config.text import as_document, dump
from threefold.errors import EXIT_STOPPED_WITH_CHECKPOINT, Problem
from threefold.jobs.clusters import Job
from threefold.jobs.job import Ranks, checked_name, handed_to
from threefold.jobs.settings import setting

_PORT = 29500


EXAMPLE = "--gpu H100 --setup setup.sh --volume /runs=V --log.dir /runs/a"


@dataclass(frozen=True)
class SkyPilotSettings:
    """Settings of a SkyPilot job, outside the config."""

    name: str = setting("the job's name", "threefold")
    gpu: str | None = setting("accelerator, as `sky show-gpus` names it: H100")
    infra: str | None = setting("where: aws, gcp/us-central1, k8s/CONTEXT; default: cheapest")
    image: str | None = setting("image with threefold: docker:IMAGE")
    setup: str | None = setting("shell file that installs threefold on a host", form="FILE")
    spot: bool = setting("spot hosts; interrupted, the job resumes", False)
    retries: int = setting("how often to start again after a crash", 0)
    buckets: Mapping[str, str] = setting(
        "a bucket, mounted there", {}, option="bucket", form="/FOLDER=ADDRESS", example="/runs=s3://BUCKET/PREFIX"
    )
    volumes: Mapping[str, str] = setting(
        "a volume, mounted there", {}, option="volume", form="/FOLDER=NAME", example="/runs=my-volume"
    )
    variables: Mapping[str, str] = setting(
        "variable of the hosts, or a name to pass it on", {}, option="env", form="NAME=VALUE",
        secret_fix="--secret {name}",
    )  # fmt: skip
    # SkyPilot takes their values from the environment of the submission.
    secrets: tuple[str, ...] = setting("whose value sky takes from here", (), option="secret", form="NAME")


Settings = SkyPilotSettings


def problems(config: Config, ranks: Ranks, options: SkyPilotSettings) -> Iterator[Problem]:
    """Yields what would make the job fail or lose its work."""
    if config.mesh.device != "cpu" and options.gpu is None:
        yield Problem("no --gpu", "the accelerator of each host, as `sky show-gpus` names it", "--gpu H100")
    if options.image is None and options.setup is None:
        expected = "an image with threefold in it, or a shell file that installs it"
        yield Problem("nothing brings threefold to the hosts", expected, "--setup FILE, or --image docker:IMAGE")
    if options.setup is not None and not Path(options.setup).is_file():
        yield Problem(
            f"--setup {options.setup} is no file here", "a shell file that installs threefold", "--setup FILE"
        )
    if not config.checkpoint.every:
        expected = "checkpoints during the run: a host is taken away without a signal"
        yield Problem("checkpoint.every = 0", expected, "--checkpoint.every 100")
    run = PurePosixPath(config.log.dir) if config.log.dir is not None else None
    kept = [*options.volumes, *(options.buckets if ranks.num_hosts == 1 else ())]
    if run is None or not any(run.is_relative_to(folder) for folder in kept):
        where = "is not set" if run is None else f"= {run} is not on a volume" + (" or bucket" * (ranks.num_hosts == 1))
        expected = "a folder that outlives the hosts"
        if ranks.num_hosts > 1:
            expected += " and that all of them see at once, as those of a bucket do not"
        fix = "--volume /runs=NAME --log.dir /runs/my-run   (sky volumes apply makes one)"
        yield Problem(f"log.dir {where}", expected, fix)


def task(config: Config, ranks: Ranks, options: SkyPilotSettings) -> dict[str, Any]:
    """The task, as its YAML reads; no value of a secret is in it."""
    checked_name(options.name, longest=60, lower=True)
    document = dump(config, nulls=False)
    end = "END_OF_CONFIG"
    while end in document:
        end += "_"
    run = [
        "set -u",
        f"cat > \"$HOME/threefold.yaml\" <<'{end}'",
        document.rstrip("\n"),
        end,
        f'torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {ranks.per_host} --node-rank "$SKYPILOT_NODE_RANK" '
        f'--master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port {_PORT} '
        '-m threefold train "$HOME/threefold.yaml"',
        "",
    ]
    recovery = {"max_restarts_on_errors": options.retries, "recover_on_exit_codes": [EXIT_STOPPED_WITH_CHECKPOINT]}
    gpus = {"accelerators": f"{options.gpu}:{ranks.per_host}"} if options.gpu is not None else {}
    image = {"image_id": options.image} if options.image is not None else {}
    infra = {"infra": options.infra} if options.infra is not None else {}
    buckets = {folder: {"source": source, "mode": "MOUNT_CACHED"} for folder, source in options.buckets.items()}
    made = {
        "name": options.name,
        "num_nodes": ranks.num_hosts,
        "resources": {**infra, **gpus, **image, "use_spot": options.spot, "job_recovery": recovery},
        # torchrun reads it: how long its ranks may take to save after a stop signal.
        "envs": {**options.variables, "PET_SHUTDOWN_TIMEOUT": str(config.checkpoint.grace_s)},
        "secrets": dict.fromkeys(options.secrets),
        "file_mounts": buckets,
        "volumes": dict(options.volumes),
        "setup": Path(options.setup).read_text() if options.setup is not None else "",
        "run": "\n".join(run),
    }
    return {key: value for key, value in made.items() if value or key == "num_nodes"}


def text(job: Job, options: SkyPilotSettings) -> str:
    """The task, as a document."""
    return as_document(task(job.config, job.ranks, options)).rstrip("\n")


def send(job: Job, options: SkyPilotSettings) -> str:
    """Launches the task as a managed job and returns sky's output; raises as `handed_to`."""
    secrets = [part for name in options.secrets for part in ("--secret", name)]
    return handed_to(
        *("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, "task.yaml"),
        text=text(job, options),
        file="task.yaml",
        missing=("SkyPilot, which knows your clouds", "pip install skypilot, or elsewhere: --dry-run > task.yaml"),
        refused=("a task that a cloud of yours can run", "sky check shows your clouds, sky show-gpus what they have"),
    )
