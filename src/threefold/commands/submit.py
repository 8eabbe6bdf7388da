"""`threefold submit slurm|kubernetes`: shows or sends a cluster's job, made from a config and options.

An option with the name of a field of `SlurmOptions` or `KubernetesOptions` sets that field. No torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from threefold.commands import cloud
from threefold.commands.arguments import CONTEXT, split
from threefold.commands.endings import ending
from threefold.commands.submission import DryRun, Env, Gpus, PerHost, app, made, read_config
from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.config.schema import Config
    from threefold.jobs.job import Ranks
    from threefold.jobs.kubernetes import KubernetesOptions
    from threefold.jobs.slurm import SlurmOptions

__all__ = ["app", "cloud", "kubernetes", "kubernetes_text", "read_config", "slurm", "slurm_text"]


@app.command("slurm", context_settings=CONTEXT, **ending("submit slurm"))
def slurm(
    context: typer.Context,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
    ranks_per_node: PerHost = None,
    gpus_per_node: Gpus = None,
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
        list[str] | None, typer.Option("--option", help="Another sbatch option: --option=--exclusive; repeatable.")
    ] = None,
    srun_options: Annotated[
        list[str] | None, typer.Option("--srun-option", help="An srun option: --srun-option=--mpi=pmix; repeatable.")
    ] = None,
    container: Annotated[
        str | None, typer.Option(help="Image with threefold: a .sif file or docker://... (apptainer), else pyxis'.")
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="How often to submit again after a crash, without the node that failed first.")
    ] = 0,
    python: Annotated[
        str, typer.Option(help="Interpreter with threefold on the hosts; default: this one, a container's python.")
    ] = "",
    dry_run: DryRun = False,
) -> None:
    """Submit an sbatch script that starts ranks with srun, saves before the time limit and requeues itself.

    Secrets (HF_TOKEN, WANDB_API_KEY) reach the job through the environment, which sbatch passes on.
    """
    from threefold.jobs.job import ranks_of
    from threefold.jobs.slurm import SlurmOptions

    config = read_config(*split(context.args))
    job = ranks_of(config.mesh, num_hosts=nodes, per_host=ranks_per_node)
    interpreter = sys.executable if container is None else "python"
    chosen = made(SlurmOptions, locals(), python=python or interpreter)
    typer.echo(slurm_text(config, job, chosen, dry_run=dry_run))


@app.command("kubernetes", context_settings=CONTEXT, **ending("submit kubernetes"))
def kubernetes(
    context: typer.Context,
    image: Annotated[str, typer.Option(help="Image with threefold and torch.")],
    kind: Annotated[str, typer.Option(help="pytorchjob, trainjob or jobset.")] = "pytorchjob",
    nodes: Annotated[int, typer.Option(min=1, help="Pods.")] = 1,
    ranks_per_node: PerHost = None,
    gpus_per_node: Gpus = None,
    cpu: Annotated[str | None, typer.Option(help="Cores for each pod: 16.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory for each pod: 64Gi.")] = None,
    shm: Annotated[str, typer.Option(help="Size of /dev/shm.")] = "8Gi",
    name: Annotated[
        str | None, typer.Option(help="The job's name; default: threefold and a digest of the job.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace; default: kubectl's.")] = None,
    volume: Annotated[list[str] | None, typer.Option(help="CLAIM=/folder of a volume claim; repeatable.")] = None,
    env: Env = None,
    secret: Annotated[list[str] | None, typer.Option(help="NAME=SECRET/KEY of a Secret; repeatable.")] = None,
    service_account: Annotated[str | None, typer.Option(help="Service account of the pods.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="How often pods are restarted.")] = 10,
    resource: Annotated[
        list[str] | None, typer.Option(help="NAME=COUNT for each pod: vpc.amazonaws.com/efa=4; repeatable.")
    ] = None,
    node_selector: Annotated[list[str] | None, typer.Option(help="LABEL=VALUE of the nodes; repeatable.")] = None,
    tolerations: Annotated[
        list[str] | None, typer.Option("--toleration", help="KEY[=VALUE][:EFFECT] of a taint; repeatable.")
    ] = None,
    pull_secrets: Annotated[
        list[str] | None, typer.Option("--pull-secret", help="Secret for the image's registry; repeatable.")
    ] = None,
    priority: Annotated[str | None, typer.Option(help="Priority class of the pods.")] = None,
    queue: Annotated[str | None, typer.Option(help="Local queue of Kueue's.")] = None,
    volcano_queue: Annotated[str | None, typer.Option(help="Queue of Volcano's, for a gang of all pods.")] = None,
    host_network: Annotated[bool, typer.Option("--host-network", help="Pods use the host's network.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Apply a Kubeflow PyTorchJob or TrainJob, or a JobSet, with the config as a ConfigMap; needs kubectl."""
    from threefold.jobs.job import named_pairs, ranks_of, variables
    from threefold.jobs.kubernetes import KubernetesOptions
    from threefold.mesh import environment

    config = read_config(*split(context.args))
    job = ranks_of(config.mesh, num_hosts=nodes, per_host=ranks_per_node)
    options = made(
        KubernetesOptions,
        locals(),
        resources=named_pairs(resource, "--resource", "NAME=COUNT", example="vpc.amazonaws.com/efa=4"),
        node_selectors=named_pairs(node_selector, "--node-selector", "LABEL=VALUE", example="pool=gpu"),
        volumes=named_pairs(volume, "--volume", "CLAIM=/folder", example="my-claim=/runs"),
        variables=variables(env, environment.variables(), secret_fix="--secret {name}=SECRET/KEY"),
        secrets=named_pairs(secret, "--secret", "NAME=SECRET/KEY", example="HF_TOKEN=my-secret/token"),
    )
    typer.echo(kubernetes_text(config, job, options, dry_run=dry_run))


def slurm_text(config: Config, job: Ranks, options: SlurmOptions, *, dry_run: bool) -> str:
    """The batch script, or sbatch's answer to it."""
    from threefold.jobs import slurm

    found = [*slurm.problems(config, options), *(() if dry_run else slurm.missing_setup(options))]
    if found:
        raise ConfigError.of(found)
    text = slurm.script(config, job, options)
    return text.rstrip("\n") if dry_run else slurm.submit(text)


def kubernetes_text(config: Config, job: Ranks, options: KubernetesOptions, *, dry_run: bool) -> str:
    """The manifests, or kubectl's answer to them."""
    from threefold.config.text import as_document
    from threefold.jobs import kubernetes

    if found := list(kubernetes.problems(config, job, options)):
        raise ConfigError.of(found)
    documents = kubernetes.manifests(config, job, options)
    return as_document(*documents).rstrip("\n") if dry_run else kubernetes.submit(documents)
