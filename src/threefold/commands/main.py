"""The command's root: its subcommands, `--version`, and how errors leave the process.

This imports only what `--help` needs; each command imports what it uses.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from threefold import __version__
from threefold.commands import data, doctor, explain, export, submit, train, verify
from threefold.commands.arguments import CONTEXT
from threefold.errors import ThreefoldError

app = typer.Typer(
    name="threefold",
    help="Train Hugging Face language models on a data x context x tensor mesh: exact, and it can prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train", context_settings=CONTEXT)(train.command)
app.command("verify", context_settings=CONTEXT)(verify.command)
app.command("export")(export.command)
app.command("doctor", context_settings=CONTEXT)(doctor.command)
app.command("explain")(explain.command)
app.add_typer(data.app, name="data")
app.add_typer(submit.app, name="submit")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"threefold {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _speaks_for_all() -> bool:
    # All ranks of a host find the same error, but hosts may differ. A wrongly set up launcher has no rank to choose.
    from threefold.mesh import environment

    try:
        return environment.current().local_rank == 0
    except ThreefoldError:
        return True


def run() -> None:
    """Runs the command line; prints a user's error in its three parts and exits with its code."""
    try:
        app()
    except ThreefoldError as error:
        if _speaks_for_all():
            from threefold.mesh import environment

            environment.tell_failure(str(error))
            sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
