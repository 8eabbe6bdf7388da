"""`threefold submit sagemaker|skypilot|ray`: shows or sends a job of a service, made from a config and options.

An option with the name of a field of `SageMakerOptions`, `SkyPilotOptions` or `RayOptions` sets that field. No torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from threefold.commands.arguments import CONTEXT, split
from threefold.commands.endings import ending
from threefold.commands.submission import DryRun, Env, PerHost, app, made, read_config
from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.config.schema import Config
    from threefold.jobs.job import Ranks
    from threefold.jobs.sagemaker import SageMakerOptions

_AwsRetries = Annotated[
    int | None, typer.Option(min=1, max=30, help="How often SageMaker starts the job again after its own errors.")
]
_KeepAlive = Annotated[
    int | None, typer.Option("--keep-alive", min=1, max=3600, help="Time that instances stay for the next job, s.")
]
_MaxWait = Annotated[
    int | None, typer.Option("--max-wait", min=60, help="With --spot: longest time including waiting, s.")
]
_Groups = Annotated[list[str] | None, typer.Option("--security-group", help="Security group in the VPC; repeatable.")]


@app.command("sagemaker", context_settings=CONTEXT, **ending("submit sagemaker"))
def sagemaker(
    context: typer.Context,
    role: Annotated[str, typer.Option(help="ARN of the job's role.")],
    image: Annotated[str, typer.Option(help="Training image with torch; threefold in it, or from --package.")],
    output: Annotated[str, typer.Option(help="s3://BUCKET/PREFIX for source, checkpoints and model.")],
    instance_type: Annotated[str, typer.Option(help="ml.g5.12xlarge, ml.p5.48xlarge, ...")],
    instances: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    ranks_per_node: PerHost = None,
    name: Annotated[str, typer.Option(help="The job's name; default: threefold and the time.")] = "",
    channel: Annotated[list[str] | None, typer.Option(help="NAME=s3://..., read as channel:NAME; repeatable.")] = None,
    env: Env = None,
    secret: Annotated[
        list[str] | None, typer.Option(help="NAME=ID of a secret in AWS Secrets Manager; repeatable.")
    ] = None,
    packages: Annotated[
        list[Path] | None, typer.Option("--package", help="A wheel to install first; repeatable.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Spot instances; interrupted, the job resumes.")] = False,
    max_run_s: Annotated[int, typer.Option("--max-run", min=60, help="Longest time, s.")] = 86_400,
    max_wait_s: _MaxWait = None,
    volume_gb: Annotated[int, typer.Option(min=1, help="Disk of each instance, GB.")] = 100,
    subnets: Annotated[list[str] | None, typer.Option("--subnet", help="Subnet of a VPC; repeatable.")] = None,
    security_groups: _Groups = None,
    retries: _AwsRetries = None,
    training_plan: Annotated[str | None, typer.Option(help="ARN of a training plan whose capacity is used.")] = None,
    keep_alive_s: _KeepAlive = None,
    tag: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the job; repeatable.")] = None,
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Encrypt what instances send one another.")] = False,
    region: Annotated[str | None, typer.Option(help="Default: from your AWS configuration.")] = None,
    source_to: Annotated[
        Path | None, typer.Option(help="Also write the job's source here, for the SageMaker SDK.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Submit a SageMaker training job; needs `pip install 'threefold[sagemaker]'` and AWS credentials.

    Keys given as --section.key value become hyperparameters. Without log.dir the run's folder is the checkpoint folder.
    """
    from datetime import datetime

    from threefold.jobs.job import named_pairs, ranks_of, variables
    from threefold.jobs.sagemaker import SageMakerOptions
    from threefold.mesh import environment

    path, overrides = split(context.args)
    config = read_config(path, overrides)
    job = ranks_of(config.mesh, num_hosts=instances, per_host=ranks_per_node)
    options = made(
        SageMakerOptions,
        locals(),
        name=name or f"threefold-{datetime.now():%Y-%m-%d-%H-%M-%S}",
        hyperparameters=dict(overrides),
        channels=named_pairs(channel, "--channel", "NAME=s3://BUCKET/PREFIX", example="train=s3://BUCKET/PREFIX"),
        tags=named_pairs(tag, "--tag", "KEY=VALUE", example="team=research"),
        variables=variables(env, environment.variables(), secret_fix="--secret {name}=ID_IN_SECRETS_MANAGER"),
        secrets=named_pairs(secret, "--secret", "NAME=ID", example="HF_TOKEN=my-secret"),
    )
    for line in sagemaker_lines(config, job, options, region=region, dry_run=dry_run, source_to=source_to):
        typer.echo(line)


@app.command("skypilot", context_settings=CONTEXT, **ending("submit skypilot"))
def skypilot(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    ranks_per_node: PerHost = None,
    gpu: Annotated[str | None, typer.Option(help="Accelerator, as `sky show-gpus` names it: H100.")] = None,
    infra: Annotated[
        str | None, typer.Option(help="Where: aws, gcp/us-central1, k8s/CONTEXT; default: cheapest.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Image with threefold: docker:IMAGE.")] = None,
    setup: Annotated[str | None, typer.Option(help="Shell file that installs threefold on a host.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Spot hosts; interrupted, the job resumes.")] = False,
    retries: Annotated[int, typer.Option(min=0, help="How often to start again after a crash.")] = 0,
    name: Annotated[str, typer.Option(help="The job's name.")] = "threefold",
    bucket: Annotated[list[str] | None, typer.Option(help="/FOLDER=s3://..., mounted there; repeatable.")] = None,
    volume: Annotated[list[str] | None, typer.Option(help="/FOLDER=NAME of a volume; repeatable.")] = None,
    env: Env = None,
    secrets: Annotated[
        list[str] | None, typer.Option("--secret", help="NAME whose value sky takes from here; repeatable.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Launch a managed job of SkyPilot, which recovers from lost hosts; needs `sky`."""
    from threefold.config.text import as_document
    from threefold.jobs import skypilot
    from threefold.jobs.job import named_pairs, ranks_of, variables
    from threefold.mesh import environment

    config = read_config(*split(context.args))
    job = ranks_of(config.mesh, num_hosts=nodes, per_host=ranks_per_node)
    options = made(
        skypilot.SkyPilotOptions,
        locals(),
        buckets=named_pairs(bucket, "--bucket", "/FOLDER=ADDRESS", example="/runs=s3://BUCKET/PREFIX"),
        volumes=named_pairs(volume, "--volume", "/FOLDER=NAME", example="/runs=my-volume"),
        variables=variables(env, environment.variables(), secret_fix="--secret {name}"),
    )
    if found := list(skypilot.problems(config, job, options)):
        raise ConfigError.of(found)
    task = skypilot.task(config, job, options)
    typer.echo(as_document(task).rstrip("\n") if dry_run else skypilot.submit(task, options))


@app.command("ray", context_settings=CONTEXT, **ending("submit ray"))
def ray(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts that --ranks-per-node counts.")] = 1,
    ranks_per_node: PerHost = None,
    cpus_per_rank: Annotated[int, typer.Option(min=1, help="Cores of each rank.")] = 1,
    retries: Annotated[int, typer.Option(min=0, help="How often to start again after a crash or a lost host.")] = 0,
    name: Annotated[str, typer.Option(help="The job's name.")] = "threefold",
    address: Annotated[str | None, typer.Option(help="http://HEAD:8265; default: RAY_ADDRESS.")] = None,
    env: Env = None,
    dry_run: DryRun = False,
) -> None:
    """Submit a Ray Train job, a Python file with a TorchTrainer; needs `ray`."""
    from threefold.jobs import ray_train
    from threefold.jobs.job import ranks_of, variables
    from threefold.mesh import environment

    config = read_config(*split(context.args))
    job = ranks_of(config.mesh, num_hosts=nodes, per_host=ranks_per_node)
    fix = "set {name} on the cluster's hosts"
    options = made(ray_train.RayOptions, locals(), variables=variables(env, environment.variables(), secret_fix=fix))
    if found := list(ray_train.problems(config, options)):
        raise ConfigError.of(found)
    text = ray_train.script(config, job, options)
    typer.echo(text.rstrip("\n") if dry_run else ray_train.submit(text, options))


def sagemaker_lines(
    config: Config, job: Ranks, options: SageMakerOptions, *, region: str | None, dry_run: bool, source_to: Path | None
) -> Iterator[str]:
    """Uploads the source (and writes it to `source_to`, for the SDK), creates the job; yields the lines to print."""
    from threefold.jobs import sagemaker
    from threefold.mesh import environment

    environ = environment.variables()
    region = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if found := list(sagemaker.problems(config, job, options)):
        raise ConfigError.of(found)
    made = sagemaker.request(job, options, region=region)
    if source_to is not None:
        source_to.mkdir(parents=True, exist_ok=True)
        for name, content in sagemaker.source_files(config, options).items():
            (source_to / name).write_bytes(content)
        yield f"wrote {source_to}: entry script {sagemaker.ENTRY}"
    yield from (f"# warning: {warning}" for warning in sagemaker.warnings(job, options))
    if dry_run:
        # Values of variables may be private, and terminals keep their text.
        hidden = dataclasses.replace(options, variables=dict.fromkeys(options.variables, "(not shown)"))
        yield json.dumps(sagemaker.request(job, hidden, region=region), indent=2)
        return
    source = sagemaker.archive(config, options)
    yield sagemaker.submit(made, source, to=sagemaker.source_of(options), region=region)
