"""`threefold doctor`: parse, call, exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def command(
    context: typer.Context,
    as_json: Annotated[
        bool, typer.Option("--json", help="All findings and what they were found from, as JSON.")
    ] = False,
    limit: Annotated[float, typer.Option(min=0.1, help="Longest time of one test between ranks, s.")] = 30.0,
) -> None:
    """Look for what is in the way of a run: threefold doctor [CONFIG.yaml] [--section.key value ...].

    Alone it looks at this machine. With a mesh (--mesh.tp 2) it starts ranks here, and under a launcher each of its
    ranks reports; every axis is then tried and measured, and pairs of ranks.

    Exit codes: 0 nothing is in the way; 1 something would stop a run; 2 the request was wrong.
    """
    from threefold.commands.arguments import split
    from threefold.commands.doctor import Options, doctor_command
    from threefold.config import loading
    from threefold.mesh import environment

    path, overrides = split(context.args)
    loaded = loading.load(
        path, overrides, environ=os.environ, defaults=environment.defaults(), settings=environment.settings()
    )
    sys.exit(doctor_command(loaded, Options(as_json, limit)))
