"""The command's root: its subcommands, `--version`, and how errors leave the process.

Each command is a file of this folder. Only the one that was asked for is loaded, or all of them for `--help`; each
imports what it uses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

from threefold import __version__
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
# In the order of `--help`; those with CONTEXT take any key of the config.
_COMMANDS = {
    "train": CONTEXT,
    "resume": CONTEXT,
    "eval": CONTEXT,
    "sample": None,
    "verify": CONTEXT,
    "export": None,
    "doctor": CONTEXT,
    "explain": None,
    "data": None,
    "submit": None,
}


def _load(names: Iterable[str]) -> None:
    for name in names:
        module = import_module(f"threefold.commands.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name, context_settings=_COMMANDS[name])(module.command)


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
    asked = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    _load([asked] if asked in _COMMANDS else _COMMANDS)
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
