"""`threefold init`: a commented config to begin with."""

import os
import shlex
from itertools import count

import typer

from threefold.errors import ConfigError


def command(context: typer.Context) -> None:
    """Write a commented config: threefold init [CONFIG.yaml] [--section.key value ...].

    The file has every key with its meaning. Keys that you give are set; the others are commented out, at their
    defaults. The file is config.yaml if none is named; an existing one is never overwritten.
    """
    from threefold.commands.arguments import split
    from threefold.config import loading
    from threefold.config.yaml_document import with_meanings

    named, overrides = split(context.args)
    path = named or "config.yaml"
    text = with_meanings(loading.load(None, overrides, environ={}))
    run = f"threefold train {shlex.quote(path)}"
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(f"# {run}\n# Remove the # before a key to set it.\n\n{text}")
    except OSError as error:
        unused = next(
            name for number in count(1) if not os.path.lexists(name := f"config-{number}.yaml")
        )
        raise ConfigError(
            f"{path}: {error.strerror}",
            expected="the name of a new file, in a folder that exists",
            fix=shlex.join(
                ["threefold", "init", unused, *(f"--{key}={value}" for key, value in overrides)]
            ),
        ) from None
    typer.echo(f"{path}: every key, {len(overrides)} of them set\ntrain it: {run}")
