"""A Ray Train job, a Python file whose TorchTrainer calls `threefold.train` on its workers; needs `ray`.

Ray starts one worker a rank and its process group. After a crash or a lost host it starts all of them again, and the
run resumes from its newest checkpoint. A worker trains in a thread, which gets no signals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from threefold.config.schema import Config
from threefold.errors import Problem
from threefold.jobs.clusters import Job
from threefold.jobs.job import Ranks, checked_name, handed_to
from threefold.jobs.settings import setting

FILE = "job.py"


EXAMPLE = "--log.dir /shared/a"


@dataclass(frozen=True)
class RaySettings:
    """Settings of a Ray job, outside the config."""

    name: str = setting("the job's name", "threefold")
    cpus_per_rank: int = setting("cores of each rank", 1, least=1)
    retries: int = setting("how often to start again after a crash or a lost host", 0)
    address: str | None = setting("http://HEAD:8265; default: RAY_ADDRESS")
    variables: Mapping[str, str] = setting(
        "variable of the workers, or a name to pass it on", {}, option="env", form="NAME=VALUE",
        secret_fix="set {name} on the cluster's hosts",
    )  # fmt: skip


Settings = RaySettings


def problems(config: Config, ranks: Ranks, options: RaySettings) -> Iterator[Problem]:
    """Yields what would make the job fail or lose its work."""
    run = config.log.dir
    if run is None or not PurePosixPath(run).is_absolute():
        where = "is not set" if run is None else f"= {run} is below a worker's own folder"
        expected = "an absolute path on a file system that all hosts of the cluster share"
        yield Problem(f"log.dir {where}", expected, "--log.dir /shared/my-run")
    given = config.data.source
    for source in [given] if isinstance(given, str) else given or ():
        if not PurePosixPath(source).is_absolute() and Path(source).exists():
            what = f"data.source = {source} is here, but a worker has a folder of its own"
            expected = "an absolute path on that file system, or a data set of the Hub"
            yield Problem(what, expected, f"--data.source {Path(source).resolve()}")
    if options.retries and not config.checkpoint.every:
        expected = "checkpoints during the run, from which another start goes on"
        yield Problem("--retries with checkpoint.every = 0", expected, "--checkpoint.every 100")


def script(config: Config, ranks: Ranks, options: RaySettings) -> str:
    """The job's file: it runs by itself where `ray` is (on a cluster, or on Ray started locally)."""
    name = checked_name(options.name, longest=60)
    assert config.log.dir is not None
    values = config.model_dump(mode="json", exclude_none=True)
    scaling = {
        "num_workers": ranks.topology.world_size,
        "use_gpu": config.mesh.device != "cpu",
        "resources_per_worker": {
            "CPU": options.cpus_per_rank,
            **({"GPU": 1} if config.mesh.device != "cpu" else {}),
        },
    }
    return f'''"""Trains by Ray Train what CONFIG says, on {scaling["num_workers"]} workers: python {FILE}"""

import json

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

CONFIG = json.loads({json.dumps(values)!r})


def train_on_rank():
    import threefold

    threefold.train(CONFIG)


TorchTrainer(
    train_on_rank,
    torch_config=TorchConfig(timeout_s={int(config.mesh.timeout_s)}),
    scaling_config=ScalingConfig(**{scaling!r}),
    run_config=RunConfig(
        name={name!r},
        storage_path={str(PurePosixPath(config.log.dir).parent / "ray")!r},
        failure_config=FailureConfig(max_failures={options.retries}),
        worker_runtime_env={{"env_vars": {dict(options.variables)!r}}},
    ),
).fit()
'''


def text(job: Job, options: RaySettings) -> str:
    """The job's file."""
    return script(job.config, job.ranks, options).rstrip("\n")


def send(job: Job, options: RaySettings) -> str:
    """Hands the job to a Ray cluster and returns ray's output; raises as `handed_to`."""
    address = ["--address", options.address] if options.address is not None else []
    return handed_to(
        *("ray", "job", "submit", *address, "--no-wait", "--working-dir", ".", "--", "python", FILE),
        text=script(job.config, job.ranks, options),
        file=FILE,
        missing=("Ray, which knows the cluster", f"pip install 'ray[default]', or there: --dry-run > {FILE}"),
        refused=("a Ray cluster at --address, or at RAY_ADDRESS", "ray job list --address http://HEAD:8265"),
    )
