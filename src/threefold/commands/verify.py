"""`threefold verify`: parse, call, exit code."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def command(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare.")] = 3,
    layers: Annotated[int | None, typer.Option(min=1, help="Use the first N layers only.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Random weights instead of the named ones.")] = False,
    against: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare the metrics of two finished runs instead.")
    ] = None,
) -> None:
    """Compare the mesh with one process on your own model: threefold verify [CONFIG.yaml] [--section.key value ...].

    Both train a few steps in float32 on the same rows. Shown are losses, gradient norms and the largest relative
    difference of the gradients; where they depart, the first layer and the axis of the mesh that are wrong.

    Exit codes: 0 the mesh follows the single process; 1 it does not; 2 the request was wrong.
    """
    if against is not None:
        from threefold.verify.comparison import compare_runs

        lines, holds = compare_runs(*against)
        typer.echo("\n".join(lines))
        sys.exit(0 if holds else 1)
    from threefold.commands.arguments import split
    from threefold.config import loading
    from threefold.mesh import environment
    from threefold.verify.comparison import Options, verify_command

    path, overrides = split(context.args)
    loaded = loading.load(path, overrides, environ=os.environ, defaults=environment.defaults())
    sys.exit(verify_command(loaded, Options(steps, layers, random)))
