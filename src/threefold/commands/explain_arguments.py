"""`threefold explain`: parse, call, exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    log: Annotated[
        Path | None, typer.Argument(help="What a failed program has printed, or a folder of logs; default: a pipe.")
    ] = None,
) -> None:
    """Say what has happened in a failed run's log, which line matters, and what to do.

    For any torch.distributed program: threefold explain train.log, or ... 2>&1 | threefold explain.

    Exit codes: 0 explained; 1 no error in it is known; 2 there is no such log.
    """
    from threefold.commands.explain import explain_command

    text, code = explain_command(log)
    typer.echo(text)
    sys.exit(code)
