"""A managed job of SkyPilot from a config: a task in YAML that holds the config and starts torchrun on every host.

SkyPilot finds hosts at a cloud that has them, and starts the task again, elsewhere if need be, when a spot host is
taken away. That comes without a signal, so checkpoints must be written on the way, to a place that outlives the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from threefold.config.schema import Config
from threefold.config.text import as_document, dump
from threefold.errors import EXIT_STOPPED_WITH_CHECKPOINT, Problem
from threefold.jobs.job import Ranks, checked_name, handed_to

_PORT = 29500


@dataclass(frozen=True)
class SkyPilotOptions:
    """Settings of a SkyPilot job, outside the config; see `threefold submit skypilot --help`."""

    name: str = "threefold"
    gpu: str | None = None
    infra: str | None = None
    image: str | None = None
    setup: str | None = None
    spot: bool = False
    retries: int = 0
    # Folders: a bucket's address, and a volume's name, mounted there.
    buckets: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    # Names; SkyPilot takes their values from the environment of the submission.
    secrets: tuple[str, ...] = ()


def problems(config: Config, ranks: Ranks, options: SkyPilotOptions) -> Iterator[Problem]:
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


def task(config: Config, ranks: Ranks, options: SkyPilotOptions) -> dict[str, Any]:
    """The task, as its YAML reads; no value of a secret is in it."""
    checked_name(options.name, longest=60, lower=True)
    text = dump(config, nulls=False)
    end = "END_OF_CONFIG"
    while end in text:
        end += "_"
    run = [
        "set -u",
        f"cat > \"$HOME/threefold.yaml\" <<'{end}'",
        text.rstrip("\n"),
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


def submit(made: Mapping[str, Any], options: SkyPilotOptions) -> str:
    """Launches the task as a managed job and returns sky's output; raises as `handed_to`."""
    secrets = [part for name in options.secrets for part in ("--secret", name)]
    return handed_to(
        *("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, "task.yaml"),
        text=as_document(made),
        file="task.yaml",
        missing=("SkyPilot, which knows your clouds", "pip install skypilot, or elsewhere: --dry-run > task.yaml"),
        refused=("a task that a cloud of yours can run", "sky check shows your clouds, sky show-gpus what they have"),
    )
