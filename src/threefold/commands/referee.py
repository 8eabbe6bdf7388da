"""`threefold referee -- COMMAND`: watches any training, and reports what is proved or refuted about it."""

import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from threefold import jsonl
from threefold.commands.arguments import AsJson
from threefold.errors import ConfigError

if TYPE_CHECKING:
    from threefold.referee.judge.verdict import CommandVerdict

_EXAMPLE = "threefold referee -- torchrun --nproc-per-node 2 train.py"


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND...", help="The command that starts the training; or: judge DIR"
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, help="Record the full inputs of this many steps.")
    ] = 3,
    record: Annotated[
        Path | None,
        typer.Option(help="New folder for the record; default: a temporary one."),
    ] = None,
    alone: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Trains the model in one process, for one step."),
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0, help="Maximum size of the record, in GiB.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Watch any training and judge it: rows, gradients, copies and updates, without changing a line of it.

    threefold referee judge DIR judges a record made elsewhere.
    """
    match arguments or []:
        case ["judge", *rest]:
            verdict = _judged(rest)
            as_json |= "--json" in rest
        case []:
            raise ConfigError(
                "no command to watch is given",
                expected="what starts the training, after --",
                fix=_EXAMPLE,
            )
        case watched:
            settings = {
                "num_whole": steps,
                "keep_bytes": int(keep * 2**30),
                "to_stderr": as_json,
            }
            verdict = _watched(watched, record, shlex.split(alone or ""), settings)
    typer.echo(jsonl.as_json(verdict.as_values()) if as_json else "\n".join(verdict.lines()))
    sys.exit(verdict.exit_code)


def _judged(arguments: list[str]) -> "CommandVerdict":
    from threefold.referee.judge.verdict import judge

    match [argument for argument in arguments if argument != "--json"]:
        case [folder] if not folder.startswith("-"):
            return judge(Path(folder))
        case others:
            raise ConfigError(
                f"`judge` takes one folder, not {shlex.join(others) or 'none'}",
                expected="the folder of --record",
                fix="threefold referee judge DIR",
            )


def _watched(
    watched: list[str], record: Path | None, alone: list[str], settings: dict[str, Any]
) -> "CommandVerdict":
    from threefold.referee.judge.verdict import judge
    from threefold.referee.watch import run_alone, watch

    with tempfile.TemporaryDirectory(prefix="threefold-referee-") as temporary:
        folder = record if record is not None else Path(temporary)
        watch(watched, folder, **settings)
        if alone:
            run_alone(alone, folder)
        return judge(folder)
