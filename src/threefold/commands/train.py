"""`threefold train`: parse, call, exit code."""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from threefold.commands.arguments import (
    AcceptChanges,
    Force,
    MaxRestarts,
    Quiet,
    load_config,
    settled,
)


def command(
    context: typer.Context,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the whole config: what automatic keys become, and why; do not train.",
        ),
    ] = False,
    max_restarts: MaxRestarts = 0,
    force: Force = False,
    accept_changes: AcceptChanges = False,
    quiet: Quiet = False,
    local_rank: Annotated[
        int | None,
        typer.Option(
            "--local_rank", "--local-rank", hidden=True, help="Added by older launchers."
        ),
    ] = None,
) -> None:
    """Train a model: threefold train [CONFIG.yaml] [--section.key value ...].

    With no arguments a Llama of about one million parameters learns the Python standard library's source, on 8 ranks
    of a CPU (dp=2 x cp=2 x tp=2; a model that this mesh cannot divide, in one process) or on the accelerators of this
    machine. Under torchrun each process becomes a rank; otherwise the ranks are started here. Every key can be set as
    --section.key value, read as YAML:
    --train.steps 500 --model.name_or_path ./my-model --optimizer.betas '[0.9, 0.99]'.
    """
    from threefold.mesh import environment

    if local_rank is not None:
        environment.accept_local_rank(local_rank)
    loaded = load_config(context.args)
    if print_config:
        from threefold.config.yaml_document import with_values

        return typer.echo(with_values(loaded, settled(loaded.config)))
    if sys.stderr.isatty() and not quiet and environment.current().rank == 0:
        # Torch takes seconds to load, and minutes from a busy disk.
        typer.echo("threefold: loading torch ...", err=True)
    from threefold.run.start import train_command

    loaded = replace(loaded, accept_changes=accept_changes, quiet=quiet, last=True)
    sys.exit(train_command(loaded, max_restarts=max_restarts, force=force))
