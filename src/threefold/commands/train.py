"""`threefold train`: parse, call, exit code."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer


def command(
    context: typer.Context,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show every key, its value and the value's origin; do not train.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="How often to restart the ranks after a failure.")
    ] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Start more local ranks than this machine has room for.")
    ] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume with keys that change what is trained.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print nothing but errors; the run's logs keep it all.")
    ] = False,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", "--local-rank", hidden=True, help="Added by older launchers.")
    ] = None,
) -> None:
    """Train a model: threefold train [CONFIG.yaml] [--section.key value ...].

    With no arguments a Llama of about one million parameters learns the Python standard library's source, on 8 ranks
    of a CPU (dp=2 x cp=2 x tp=2) or on the accelerators of this machine. Under torchrun each process becomes a rank;
    otherwise the ranks are started here. Every key can be set as --section.key value, read as YAML:
    --train.steps 500 --model.name_or_path ./my-model --optimizer.betas '[0.9, 0.99]'.
    """
    from threefold.commands.arguments import load_config
    from threefold.config.text import as_yaml
    from threefold.mesh import environment

    if local_rank is not None:
        environment.accept_local_rank(local_rank)
    loaded = load_config(context.args)
    if print_config:
        for key, value, origin in loaded.describe():
            typer.echo(f"{key}: {as_yaml(value)}" + ("" if origin == "default" else f"  # {origin}"))
        return
    if sys.stderr.isatty() and not quiet and environment.current().rank == 0:
        # Torch takes seconds to load, and minutes from a busy disk.
        typer.echo("threefold: loading torch ...", err=True)
    from threefold.run.start import train_command

    loaded = replace(loaded, accept_changes=accept_changes, quiet=quiet, last=True)
    sys.exit(train_command(loaded, max_restarts=max_restarts, force=force))
