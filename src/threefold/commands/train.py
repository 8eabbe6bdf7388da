"""`threefold train`: parse, call, exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def command(
    context: typer.Context,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show every key, its value and where that came from; do not train.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Start the ranks again after a failure, this often.")
    ] = 0,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", "--local-rank", hidden=True, help="What older launchers add.")
    ] = None,
) -> None:
    """Train a model: threefold train [CONFIG.yaml] [--section.key value ...].

    With no arguments a Llama of about one million parameters learns the Python standard library's source, on 8 ranks
    of a CPU (dp=2 x cp=2 x tp=2) or on the accelerators of this machine. Under torchrun each process becomes a rank;
    otherwise the ranks are started here. Every key can be set as --section.key value, read as YAML:
    --train.steps 500 --model.name_or_path ./my-model --optimizer.betas '[0.9, 0.99]'.

    Exit codes: 0 done; 1 the run failed; 2 the request was wrong; 75 stopped by a signal with a checkpoint saved.
    """
    from threefold.commands.arguments import split
    from threefold.config import loading
    from threefold.config import text as config_text
    from threefold.mesh import environment

    path, overrides = split(context.args)
    if local_rank is not None:
        environment.accept_local_rank(local_rank)
    loaded = loading.load(
        path, overrides, environ=os.environ, defaults=environment.defaults(), settings=environment.settings()
    )
    if print_config:
        for key, value, origin in loaded.describe():
            text = config_text.as_yaml(value)
            typer.echo(f"{key}: {text}" if origin == "default" else f"{key}: {text}  # {origin}")
        return
    from threefold.run.start import train_command

    sys.exit(train_command(loaded, max_restarts=max_restarts))
