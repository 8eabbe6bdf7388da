"""`threefold submit CLUSTER`: shows or sends a cluster's job, made from a config and that kind's settings. No torch."""

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from threefold import jsonl
from threefold.commands.arguments import CONTEXT, AsJson, split
from threefold.commands.help_examples import ending_of
from threefold.config.schema import Config
from threefold.errors import ConfigError
from threefold.jobs.clusters import CLUSTERS, Job, kind_of
from threefold.jobs.job import ranks_of, secrets_in
from threefold.jobs.settings import described, read
from threefold.mesh import environment

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make a cluster job from a config and submit it. --section.key value works as in `threefold train`.",
)
_KEYS = "[CONFIG.yaml] [--section.key VALUE ...] [OPTIONS]"
_CODES = "0 submitted, or shown; 1 the cluster refused it; 2 the request was wrong"


def read_config(path: str | None, overrides: Sequence[tuple[str, str]]) -> Config:
    """The config that the job will train with; ConfigError also if it holds a secret."""
    from threefold.config import loading

    config = loading.load(path, overrides, environ=environment.variables()).config
    ConfigError.raise_for(secrets_in(config))
    return config


def _command_of(name: str) -> Callable[..., None]:
    kind = kind_of(name)

    def command(
        context: typer.Context,
        nodes: Annotated[int, typer.Option(min=1, help="Hosts.")] = 1,
        ranks_per_node: Annotated[
            int | None,
            typer.Option(min=1, help="Ranks per host; default: what the mesh asks for."),
        ] = None,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Print the job, but do not submit it.")
        ] = False,
        as_json: AsJson = False,
    ) -> None:
        settings, rest = read(kind.Settings, context.args, environment.variables())
        path, overrides = split(rest)
        config = read_config(path, overrides)
        job = Job(
            config,
            ranks_of(config.mesh, num_hosts=nodes, per_host=ranks_per_node),
            dict(overrides),
        )
        ConfigError.raise_for(kind.problems(config, job.ranks, settings))
        text = kind.text(job, settings) if dry_run else kind.send(job, settings)
        answer = {"cluster": name, "submitted": not dry_run, "hosts": nodes, "text": text}
        typer.echo(jsonl.as_json(answer) if as_json else text)

    return command


def _help_of(name: str) -> str:
    kind = kind_of(name)
    summary, _, _ = (kind.__doc__ or "").partition("\n")
    width = max(len(option) for option, _ in described(kind.Settings))
    lines = [f"  {option:{width}}  {meaning}" for option, meaning in described(kind.Settings)]
    return "\n".join([summary, "", "\b", "Settings of the job:", *lines])


# As in `commands.help_examples`.
ENDINGS = {
    f"submit {name}": (
        _KEYS,
        _CODES,
        (f"threefold submit {name} job.yaml --mesh.dp 8 {kind_of(name).EXAMPLE} --dry-run",),
    )
    for name in CLUSTERS
}
for _name in CLUSTERS:
    _settled = {
        "context_settings": CONTEXT,
        "help": _help_of(_name),
        **ending_of(*ENDINGS[f"submit {_name}"]),
    }
    app.command(_name, **_settled)(_command_of(_name))
