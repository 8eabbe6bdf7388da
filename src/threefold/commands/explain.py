"""`threefold explain`: what a failed job left behind, in files, folders or a pipe -> cause and remedy."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Annotated

import typer

from threefold.commands.arguments import AsJson
from threefold.commands.run_argument import run_here
from threefold.errors import EXIT_FAILED, ConfigError


def command(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Logs, folders of logs, Flight Recorder dumps, or a run's folder; default: a pipe."
        ),
    ] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="Run the command that settles the cause on this machine; it only reads.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain what a failed job left behind: what happened, where, which line shows it, and what to do.

    For any torch.distributed program: threefold explain train.log, or ... 2>&1 | threefold explain.
    """
    text, code = explain_command(
        [run_here(log) for log in logs or []], ask=ask, as_json=as_json
    )
    typer.echo(text)
    sys.exit(code)


def explain_command(
    paths: Sequence[Path], *, ask: bool = False, as_json: bool = False
) -> tuple[str, int]:
    """(what to print, exit code); ConfigError if there is no such log, or nothing is piped in (no `paths`)."""
    from threefold.explain import answer
    from threefold.explain.ask import confirm
    from threefold.explain.evidence import gather, piped
    from threefold.explain.explain import Status

    diagnosis = answer.answer(gather(paths) if paths else piped(_input()))
    if ask and diagnosis.explanation is not None:
        diagnosis = replace(diagnosis, explanation=confirm(diagnosis.explanation))
    output = (
        json.dumps(answer.data(diagnosis), indent=2, ensure_ascii=False)
        if as_json
        else answer.text(diagnosis)
    )
    return output, EXIT_FAILED if diagnosis.status is Status.UNKNOWN else 0


def _input() -> IO[bytes]:
    if sys.stdin.isatty():
        raise ConfigError(
            "no log given, and nothing piped in",
            expected="the output of a failed program",
            fix="threefold explain train.log, or: torchrun ... 2>&1 | tee train.log | threefold explain",
        )
    return sys.stdin.buffer
