"""`threefold submit slurm|sagemaker|kubernetes`: shows or sends a cluster's job, made from a config and options.

An option with the name of a field of `SlurmOptions`, `SageMakerOptions` or `KubernetesOptions` sets that field. No
torch.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from threefold.commands.arguments import CONTEXT, split
from threefold.commands.endings import ending
from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.config.schema import Config
    from threefold.jobs.job import Ranks
    from threefold.jobs.kubernetes import KubernetesOptions
    from threefold.jobs.sagemaker import SageMakerOptions
    from threefold.jobs.slurm import SlurmOptions

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make a cluster's job from a config, and submit it. --section.key value works as in `threefold train`.",
)

_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job, but do not submit it.")]
_PerHost = Annotated[
    int | None, typer.Option("--ranks-per-node", min=1, help="Ranks on each host; default: what the mesh asks for.")
]
_Gpus = Annotated[int | None, typer.Option(min=0, help="Default: one per rank, none with mesh.device: cpu.")]
_Env = Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE, or NAME to pass it on; repeatable.")]


@app.command("slurm", context_settings=CONTEXT, **ending("submit slurm"))
def slurm(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    ranks_per_node: _PerHost = None,
    gpus_per_node: _Gpus = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="Cores of each rank.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each host: 64G.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit in sbatch's form: 12:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features of the hosts.")] = None,
    name: Annotated[str, typer.Option(help="The job's name.")] = "threefold",
    signal_ahead_s: Annotated[
        int | None,
        typer.Option(
            "--signal-ahead", min=1, help="Time before the limit at which ranks save, s; default: grace_s + 60."
        ),
    ] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue/--no-requeue", help="Queue again after a stop that saved.")
    ] = True,
    setup: Annotated[str | None, typer.Option(help="Shell file to source first: modules, an environment.")] = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", help="Another sbatch option: --option=--exclusive.")
    ] = None,
    python: Annotated[str, typer.Option(help="Interpreter with threefold on the hosts; default: this one.")] = "",
    dry_run: _DryRun = False,
) -> None:
    """Submit an sbatch script that starts ranks with srun, saves before the time limit and requeues itself.

    Secrets (HF_TOKEN, WANDB_API_KEY) reach the job through the environment, which sbatch passes on.
    """
    from threefold.jobs.job import ranks_of
    from threefold.jobs.slurm import SlurmOptions

    config = read_config(*split(context.args))
    job = ranks_of(config.mesh, num_hosts=nodes, per_host=ranks_per_node)
    chosen = _made(SlurmOptions, locals(), python=python or sys.executable)
    typer.echo(slurm_text(config, job, chosen, dry_run=dry_run))


@app.command("sagemaker", context_settings=CONTEXT, **ending("submit sagemaker"))
def sagemaker(
    context: typer.Context,
    role: Annotated[str, typer.Option(help="ARN of the job's role.")],
    image: Annotated[str, typer.Option(help="Training image with torch; threefold in it, or from --package.")],
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
    packages: Annotated[
        list[Path] | None, typer.Option("--package", help="A wheel to install first; repeatable.")
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Spot instances; the job resumes after an interruption.")
    ] = False,
    max_run_s: Annotated[int, typer.Option("--max-run", min=60, help="Longest time, s.")] = 86_400,
    max_wait_s: Annotated[
        int | None, typer.Option("--max-wait", min=60, help="With --spot: longest time including waiting, s.")
    ] = None,
    volume_gb: Annotated[int, typer.Option(min=1, help="Disk of each instance, GB.")] = 100,
    subnets: Annotated[list[str] | None, typer.Option("--subnet", help="Subnet of a VPC; repeatable.")] = None,
    security_groups: Annotated[
        list[str] | None, typer.Option("--security-group", help="Security group in the VPC; repeatable.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="Default: from your AWS configuration.")] = None,
    source_to: Annotated[
        Path | None, typer.Option(help="Also write the job's source here, for the SageMaker SDK.")
    ] = None,
    dry_run: _DryRun = False,
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
    options = _made(
        SageMakerOptions,
        locals(),
        name=name or f"threefold-{datetime.now():%Y-%m-%d-%H-%M-%S}",
        hyperparameters=dict(overrides),
        channels=named_pairs(channel, "--channel", "NAME=s3://BUCKET/PREFIX", example="train=s3://BUCKET/PREFIX"),
        variables=variables(env, environment.variables(), secret_fix="--secret {name}=ID_IN_SECRETS_MANAGER"),
        secrets=named_pairs(secret, "--secret", "NAME=ID", example="HF_TOKEN=my-secret"),
    )
    for line in sagemaker_lines(config, job, options, region=region, dry_run=dry_run, source_to=source_to):
        typer.echo(line)


@app.command("kubernetes", context_settings=CONTEXT, **ending("submit kubernetes"))
def kubernetes(
    context: typer.Context,
    image: Annotated[str, typer.Option(help="Image with threefold and torch.")],
    kind: Annotated[str, typer.Option(help="pytorchjob, trainjob or jobset.")] = "pytorchjob",
    nodes: Annotated[int, typer.Option(min=1, help="Pods.")] = 1,
    ranks_per_node: _PerHost = None,
    gpus_per_node: _Gpus = None,
    cpu: Annotated[str | None, typer.Option(help="Cores for each pod: 16.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory for each pod: 64Gi.")] = None,
    shm: Annotated[str, typer.Option(help="Size of /dev/shm.")] = "8Gi",
    name: Annotated[str, typer.Option(help="The job's name.")] = "threefold",
    namespace: Annotated[str | None, typer.Option(help="Namespace; default: kubectl's.")] = None,
    volume: Annotated[list[str] | None, typer.Option(help="CLAIM=/folder of a volume claim; repeatable.")] = None,
    env: _Env = None,
    secret: Annotated[list[str] | None, typer.Option(help="NAME=SECRET/KEY of a Secret; repeatable.")] = None,
    service_account: Annotated[str | None, typer.Option(help="Service account of the pods.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="How often pods are restarted.")] = 10,
    runtime: Annotated[str, typer.Option(help="trainjob: the runtime.")] = "torch-distributed",
    dry_run: _DryRun = False,
) -> None:
    """Apply a Kubeflow PyTorchJob or TrainJob, or a JobSet, with the config as a ConfigMap; needs kubectl."""
    from threefold.jobs.job import named_pairs, ranks_of, variables
    from threefold.jobs.kubernetes import KubernetesOptions
    from threefold.mesh import environment

    config = read_config(*split(context.args))
    job = ranks_of(config.mesh, num_hosts=nodes, per_host=ranks_per_node)
    options = _made(
        KubernetesOptions,
        locals(),
        volumes=named_pairs(volume, "--volume", "CLAIM=/folder", example="my-claim=/runs"),
        variables=variables(env, environment.variables(), secret_fix="--secret {name}=SECRET/KEY"),
        secrets=named_pairs(secret, "--secret", "NAME=SECRET/KEY", example="HF_TOKEN=my-secret/token"),
    )
    typer.echo(kubernetes_text(config, job, options, dry_run=dry_run))


_Options = TypeVar("_Options")


def _made(kind: type[_Options], given: Mapping[str, Any], **own: Any) -> _Options:
    """An options dataclass: each field from `own`, else from the option of the same name; lists become tuples."""
    names = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {name: value for name, value in {**given, **own}.items() if name in names and value is not None}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def read_config(path: str | None, overrides: Sequence[tuple[str, str]]) -> Config:
    """The config that the job will train with."""
    from threefold.config import loading
    from threefold.mesh import environment

    return loading.load(path, overrides, environ=environment.variables()).config


def slurm_text(config: Config, job: Ranks, options: SlurmOptions, *, dry_run: bool) -> str:
    """The batch script, or sbatch's answer to it."""
    from threefold.jobs import slurm

    text = slurm.script(config, job, options)
    return text.rstrip("\n") if dry_run else slurm.submit(text)


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


def kubernetes_text(config: Config, job: Ranks, options: KubernetesOptions, *, dry_run: bool) -> str:
    """The manifests, or kubectl's answer to them."""
    from threefold.config.text import as_document
    from threefold.jobs import kubernetes

    if found := list(kubernetes.problems(config, job, options)):
        raise ConfigError.of(found)
    documents = kubernetes.manifests(config, job, options)
    return as_document(*documents).rstrip("\n") if dry_run else kubernetes.submit(documents)
