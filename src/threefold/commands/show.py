"""`threefold data show`: rows as they are trained, and which of their tokens are learnt.

Of a source: its documents, numbered as they are in it, before they are packed. Of a run: the packed rows that it reads,
numbered as in its audit. A token is learnt if it is the label of the token before it.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from threefold.commands.source import SOURCE_HELP, option_of, own_flags, with_source_options
from threefold.errors import ConfigError

SHOWN = 3


@with_source_options
def command(
    run: Annotated[Path | None, typer.Argument(help="A run's folder: the packed rows that it reads.")] = None,
    source: Annotated[list[str] | None, typer.Option(help=SOURCE_HELP)] = None,
    tokenizer: Annotated[str | None, typer.Option(help="`bytes`, a Hub id or a folder.")] = None,
    row: Annotated[int | None, typer.Option(min=0, help="Only this row, or document of the source.")] = None,
    first: Annotated[
        int | None, typer.Option(min=1, help=f"The first N rows; default: {SHOWN}, with --json all.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Also print token ids; those learnt in brackets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each row.")] = False,
    **options: Any,
) -> None:
    """Show rows as text, what is learnt of them in [[ ]] or in colour: of a source, or the packed rows of a RUN."""
    given = {"source": source, "tokenizer": tokenizer, **options}
    _refuse_both(run, given)
    from threefold.commands import documents

    with own_flags():
        rows, named = documents.run_rows(run, row) if run is not None else documents.rows_of_source(given, row)
        if as_json:
            lines = documents.json_lines(islice(rows, first))
        else:
            lines = documents.text_lines(rows, named, show=first or SHOWN, ids=ids, count=row is None)
        there = False
        for line in lines:
            typer.echo(line)
            there = True
    if row is not None and not there:
        fix = "--row 0, or a row that is there"
        raise ConfigError(f"--row {row} is not there", expected="a row of the source, counted from 0", fix=fix)


def _refuse_both(run: Path | None, given: dict[str, Any]) -> None:
    options = [option_of(key) for key, value in given.items() if value]
    if run is not None and options:
        what = f"{run} and {', '.join(options)} are both given"
        raise ConfigError(what, expected="a run, which has a source of its own, or a source", fix=f"leave out {run}")
    if run is None and not (given["source"] and given["tokenizer"]):
        missing = "neither a run nor --source is given" if not given["source"] else "--source has no --tokenizer"
        fix = "threefold data show --source chat.jsonl --tokenizer bytes"
        raise ConfigError(missing, expected="a run's folder, or a source and the tokenizer to read it with", fix=fix)
