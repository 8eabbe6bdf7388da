"""`threefold report`: a run, or several, as one HTML file that opens anywhere."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from threefold import jsonl
from threefold.commands.arguments import AsJson, is_address, on_this_machine
from threefold.commands.run_argument import run_here, runs_here
from threefold.errors import ConfigError, shell_word


def command(
    runs: Annotated[
        list[str],
        typer.Argument(autocompletion=runs_here, help="Folders of runs; several are overlaid."),
    ],
    to: Annotated[
        Path | None,
        typer.Option(
            callback=on_this_machine,
            help="The file to write; default: report.html in the first run, or here.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page about a run: threefold report RUN [--to FILE]; several runs are compared.

    One HTML file that needs no network and no other file: what was trained, its curves with starts and rewinds, what
    was read and whether that is proved, checkpoints, samples, late ranks and warnings. It only reads the run's files.
    """
    from threefold.config.paths import run_and_checkpoint
    from threefold.records.files import names_of
    from threefold.report.document import report
    from threefold.report.facts import gather

    folders = [run_and_checkpoint(run_here(run))[0].absolute() for run in runs]
    if len(set(folders)) < len(folders):
        raise ConfigError(
            f"{runs[-1]} is named twice" if len(runs) == 2 else "a run is named twice",
            expected="each run once",
            fix=f"threefold report {shell_word(runs[0])}",
        )
    target = to or (Path() if is_address(str(runs[0])) else folders[0]) / "report.html"
    _refuse_other(target)
    page = report(
        [
            gather(folder, name=name)
            for folder, name in zip(folders, names_of(folders), strict=True)
        ]
    )
    # A new file, under a name where no link can have been placed.
    temporary = target.with_name(f".report-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(page)
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}",
            expected="a file in a folder that this user can write",
            fix=f"threefold report {shell_word(runs[0])} --to report.html",
        ) from error
    answer = {"page": str(target), "bytes": len(page), "runs": list(map(str, folders))}
    typer.echo(jsonl.as_json(answer) if as_json else f"{target}: {len(page) / 1000:,.0f} KB")


def _refuse_other(target: Path) -> None:
    """Raises ConfigError if the existing file is not a run's page; a link is replaced, not followed."""
    if not target.exists() or target.is_dir():
        return
    # A device would be replaced too, and /dev/stdout with it, which may lead to a file.
    replaced = target.is_file() and Path("/dev") not in target.absolute().parents
    if not (replaced and (target.is_symlink() or _is_page(target))):
        raise ConfigError(
            f"{target} already exists, and `threefold report` did not write it",
            expected="a new file, or an earlier page to replace",
            fix="--to ANOTHER_FILE.html",
        )


def _is_page(file: Path) -> bool:
    with file.open("rb") as opened:
        return b" - threefold</title>" in opened.read(1 << 16)
