"""What the commands of `threefold submit` share: the app, options that several have, the config of a job. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.config.schema import Config

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make a cluster's job from a config, and submit it. --section.key value works as in `threefold train`.",
)

DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job, but do not submit it.")]
PerHost = Annotated[
    int | None, typer.Option("--ranks-per-node", min=1, help="Ranks on each host; default: what the mesh asks for.")
]
Gpus = Annotated[int | None, typer.Option(min=0, help="Default: one per rank, none with mesh.device: cpu.")]
Env = Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE, or NAME to pass it on; repeatable.")]


Options = TypeVar("Options")


def made(kind: type[Options], given: Mapping[str, Any], **own: Any) -> Options:
    """An options dataclass: each field from `own`, else from the option of the same name; lists become tuples."""
    names = {entry.name for entry in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {name: value for name, value in {**given, **own}.items() if name in names and value is not None}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def read_config(path: str | None, overrides: Sequence[tuple[str, str]]) -> Config:
    """The config that the job will train with; ConfigError also if it holds a secret."""
    from threefold.config import loading
    from threefold.jobs.job import secrets_in
    from threefold.mesh import environment

    config = loading.load(path, overrides, environ=environment.variables()).config
    if found := secrets_in(config):
        raise ConfigError.of(found)
    return config
