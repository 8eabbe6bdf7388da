"""`threefold submit slurm|sagemaker|kubernetes`: a config and options become a cluster's job, which is shown or sent.

An option that has the name of a field of `SlurmOptions`, `SageMakerOptions` or `KubernetesOptions` is that field. No
torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.config.schema import Config
    from threefold.jobs.job import Ranks
    from threefold.jobs.kubernetes import KubernetesOptions
    from threefold.jobs.sagemaker import SageMakerOptions
    from threefold.jobs.slurm import SlurmOptions

_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make a cluster's job of a config, and submit it. --section.key value works as in `threefold train`.",
)

_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job and submit nothing.")]
_PerHost = Annotated[
    int | None, typer.Option("--ranks-per-node", min=1, help="Ranks on each host; default: what the mesh asks for.")
]
_Env = Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE, or NAME to take it from here; repeatable.")]


@app.command("slurm", context_settings=_CONTEXT)
def slurm(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    ranks_per_node: _PerHost = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=0, help="Default: one for each rank, none with mesh.device: cpu.")
    ] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores of each rank.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each host: 64G.")] = None,
    time: Annotated[str | None, typer.Option(help="Limit, as sbatch takes it: 12:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features of the hosts.")] = None,
    name: Annotated[str, typer.Option(help="The job's name.")] = "threefold",
    signal_ahead: Annotated[
        int | None, typer.Option(min=1, help="Seconds before the limit at which ranks save; default: grace_s + 60.")
    ] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue/--no-requeue", help="Queue again after a stop that saved.")
    ] = True,
    setup: Annotated[str | None, typer.Option(help="Shell file that the job sources first.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Another option of sbatch: --option=--exclusive.")] = None,
    python: Annotated[str, typer.Option(help="Interpreter with threefold on the hosts; default: this one.")] = "",
    dry_run: _DryRun = False,
) -> None:
    """Submit an sbatch script that srun's its ranks, saves ahead of the limit and queues itself again.

    Secrets (HF_TOKEN, WANDB_API_KEY) reach the job through the environment, which sbatch passes on.
    """
    from threefold.commands.arguments import split
    from threefold.jobs.slurm import SlurmOptions

    config = read_config(*split(context.args))
    job = ranks(config, num_hosts=nodes, per_host=ranks_per_node, option="--ranks-per-node")
    options = _made(
        SlurmOptions,
        locals(),
        signal_ahead_s=signal_ahead,
        options=tuple(option or ()),
        python=python or sys.executable,
    )
    _echo(slurm_lines(config, job, options, dry_run=dry_run))


@app.command("sagemaker", context_settings=_CONTEXT)
def sagemaker(
    context: typer.Context,
    role: Annotated[str, typer.Option(help="ARN of the role that the job takes.")],
    image: Annotated[str, typer.Option(help="Training image with torch; threefold in it, or by --package.")],
    output: Annotated[str, typer.Option(help="s3://BUCKET/PREFIX for source, checkpoints and model.")],
    instance_type: Annotated[str, typer.Option(help="ml.g5.12xlarge, ml.p5.48xlarge, ...")],
    instances: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    ranks_per_node: _PerHost = None,
    name: Annotated[str, typer.Option(help="The job's name; default: threefold and the time.")] = "",
    channel: Annotated[list[str] | None, typer.Option(help="NAME=s3://..., read as channel:NAME; repeatable.")] = None,
    env: _Env = None,
    secret: Annotated[
        list[str] | None, typer.Option(help="NAME=ID of a secret in AWS Secrets Manager; repeatable.")
    ] = None,
    package: Annotated[list[Path] | None, typer.Option(help="A wheel to install first; repeatable.")] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Spot instances; the job goes on after an interruption.")
    ] = False,
    max_run: Annotated[int, typer.Option(min=60, help="Longest time, s.")] = 86_400,
    max_wait: Annotated[int | None, typer.Option(min=60, help="With --spot: longest time with waiting, s.")] = None,
    volume_gb: Annotated[int, typer.Option(min=1, help="Disk of each instance, GB.")] = 100,
    subnet: Annotated[list[str] | None, typer.Option(help="Subnet of a VPC; repeatable.")] = None,
    security_group: Annotated[list[str] | None, typer.Option(help="Security group in the VPC; repeatable.")] = None,
    region: Annotated[str | None, typer.Option(help="Default: that of your AWS configuration.")] = None,
    source_to: Annotated[
        Path | None, typer.Option(help="Also write the job's source here, for the SageMaker SDK.")
    ] = None,
    dry_run: _DryRun = False,
) -> None:
    """Submit a SageMaker training job; needs `pip install 'threefold[sagemaker]'` and AWS credentials.

    Keys given as --section.key value become hyperparameters. Without log.dir the run's folder is the checkpoint folder.
    """
    from datetime import datetime

    from threefold.commands.arguments import split
    from threefold.jobs.job import named_pairs, variables
    from threefold.jobs.sagemaker import SageMakerOptions
    from threefold.mesh import environment

    path, overrides = split(context.args)
    config = read_config(path, overrides)
    job = ranks(config, num_hosts=instances, per_host=ranks_per_node, option="--ranks-per-node")
    options = _made(
        SageMakerOptions,
        locals(),
        name=name or f"threefold-{datetime.now():%Y-%m-%d-%H-%M-%S}",
        hyperparameters=dict(overrides),
        channels=named_pairs(
            channel or [], option="--channel", what="NAME=s3://BUCKET/PREFIX", example="train=s3://BUCKET/PREFIX"
        ),
        variables=variables(env or [], environment.variables(), secret_fix="--secret {name}=ID_IN_SECRETS_MANAGER"),
        secrets=named_pairs(secret or [], option="--secret", what="NAME=ID", example="HF_TOKEN=my-secret"),
        packages=tuple(package or ()),
        max_run_s=max_run,
        max_wait_s=max_wait,
        subnets=tuple(subnet or ()),
        security_groups=tuple(security_group or ()),
    )
    _echo(sagemaker_lines(config, job, options, region=region, dry_run=dry_run, source_to=source_to))


@app.command("kubernetes", context_settings=_CONTEXT)
def kubernetes(
    context: typer.Context,
    image: Annotated[str, typer.Option(help="Image with threefold and torch.")],
    kind: Annotated[str, typer.Option(help="pytorchjob, trainjob or jobset.")] = "pytorchjob",
    nodes: Annotated[int, typer.Option(min=1, help="Pods.")] = 1,
    ranks_per_node: _PerHost = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=0, help="Default: one for each rank, none with mesh.device: cpu.")
    ] = None,
    cpu: Annotated[str | None, typer.Option(help="Cores that each pod asks for: 16.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory that each pod asks for: 64Gi.")] = None,
    shm: Annotated[str, typer.Option(help="Size of /dev/shm.")] = "8Gi",
    name: Annotated[str, typer.Option(help="The job's name.")] = "threefold",
    namespace: Annotated[str | None, typer.Option(help="Namespace; default: kubectl's.")] = None,
    volume: Annotated[list[str] | None, typer.Option(help="CLAIM=/folder of a volume claim; repeatable.")] = None,
    env: _Env = None,
    secret: Annotated[list[str] | None, typer.Option(help="NAME=SECRET/KEY of a Secret; repeatable.")] = None,
    service_account: Annotated[str | None, typer.Option(help="Service account of the pods.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="How often pods are started again.")] = 10,
    runtime: Annotated[str, typer.Option(help="trainjob: the runtime.")] = "torch-distributed",
    dry_run: _DryRun = False,
) -> None:
    """Apply a Kubeflow PyTorchJob or TrainJob, or a JobSet, with the config as a ConfigMap; kubectl must be here."""
    from threefold.commands.arguments import split
    from threefold.jobs.job import named_pairs, variables
    from threefold.jobs.kubernetes import KubernetesOptions
    from threefold.mesh import environment

    config = read_config(*split(context.args))
    job = ranks(config, num_hosts=nodes, per_host=ranks_per_node, option="--ranks-per-node")
    options = _made(
        KubernetesOptions,
        locals(),
        gpus_per_pod=gpus_per_node,
        volumes=named_pairs(volume or [], option="--volume", what="CLAIM=/folder", example="my-claim=/runs"),
        variables=variables(env or [], environment.variables(), secret_fix="--secret {name}=SECRET/KEY"),
        secrets=named_pairs(
            secret or [], option="--secret", what="NAME=SECRET/KEY", example="HF_TOKEN=my-secret/token"
        ),
    )
    _echo(kubernetes_lines(config, job, options, dry_run=dry_run))


_Options = TypeVar("_Options")


def _made(kind: type[_Options], given: Mapping[str, Any], **own: Any) -> _Options:
    """An options dataclass: each field from `own`, else from the command line's option of the same name."""
    names = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in {**given, **own}.items() if name in names})


def _echo(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def read_config(path: str | None, overrides: Sequence[tuple[str, str]]) -> Config:
    """The config that the job will train with."""
    from threefold.config import loading
    from threefold.mesh import environment

    return loading.load(path, overrides, environ=environment.variables()).config


def ranks(config: Config, *, num_hosts: int, per_host: int | None, option: str) -> Ranks:
    """The job's ranks, checked against the mesh."""
    from threefold.jobs.job import ranks_of

    return ranks_of(config.mesh, num_hosts=num_hosts, per_host=per_host, option=option)


def slurm_lines(config: Config, job: Ranks, options: SlurmOptions, *, dry_run: bool) -> Iterator[str]:
    """Submits the batch script; yields what there is to tell."""
    from threefold.jobs import slurm

    text = slurm.script(config, job, options)
    yield text.rstrip("\n") if dry_run else slurm.submit(text)


def sagemaker_lines(
    config: Config, job: Ranks, options: SageMakerOptions, *, region: str | None, dry_run: bool, source_to: Path | None
) -> Iterator[str]:
    """Uploads the source and creates the training job; yields what there is to tell.

    Args:
        source_to: also writes the source's files here, for a job of the SageMaker SDK.
    """
    from threefold.jobs import sagemaker
    from threefold.mesh import environment

    environ = environment.variables()
    region = region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    found = sagemaker.problems(config, job, options)
    if found:
        raise ConfigError.of(found)
    made = sagemaker.request(job, options, region=region)
    if source_to is not None:
        source_to.mkdir(parents=True, exist_ok=True)
        for name, content in sagemaker.source_files(config, options).items():
            (source_to / name).write_bytes(content)
        yield f"wrote {source_to}: entry script {sagemaker.ENTRY}"
    for warning in sagemaker.warnings(job, options):
        yield f"# warning: {warning}"
    if dry_run:
        # What variables hold may be private, and a terminal's text is kept.
        hidden = dataclasses.replace(options, variables=dict.fromkeys(options.variables, "(not shown)"))
        yield json.dumps(sagemaker.request(job, hidden, region=region), indent=2)
        return
    source = sagemaker.archive(config, options)
    yield sagemaker.submit(made, source, to=sagemaker.source_of(options), region=region)


def kubernetes_lines(config: Config, job: Ranks, options: KubernetesOptions, *, dry_run: bool) -> Iterator[str]:
    """Applies the manifests; yields what there is to tell."""
    from threefold.jobs import kubernetes

    found = kubernetes.problems(config, job, options)
    if found:
        raise ConfigError.of(found)
    documents = kubernetes.manifests(config, job, options)
    if dry_run:
        yield kubernetes.shown(documents).rstrip("\n")
        return
    yield kubernetes.submit(documents)
