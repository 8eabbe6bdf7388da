"""`threefold why`: what stands out in a run, or in a step of it, with the rows, documents and text that made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    step: Annotated[int | None, typer.Option(help="This step alone, with its rows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")] = False,
) -> None:
    """Say why a run went as it did: threefold why RUN [--step N].

    Spikes of the loss and of the gradient norm, with the rows that made them; rows whose loss is far above or below
    that of their like; sources that drift apart; ranks that were slow; keys that changed. The most telling five, each
    with the facts that show it. A run that goes on is only read.
    """
    from threefold.commands.arguments import run_and_checkpoint
    from threefold.report.opened import check_files
    from threefold.why import said
    from threefold.why.batch_rows import Batches
    from threefold.why.lookback import Lookback

    folder = run_and_checkpoint(run)[0]
    check_files(folder)
    batches = Batches(Lookback.of(folder))
    if as_json:
        typer.echo(json.dumps(said.values(batches, step)))
        return
    for line in said.run_lines(batches) if step is None else said.step_lines(batches, step):
        typer.echo(line)
