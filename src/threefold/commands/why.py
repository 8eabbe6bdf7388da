"""`threefold why`: anomalies in a run, or in a step of it, with the rows, documents and text behind them."""

import json
from typing import Annotated

import typer

from threefold.commands.arguments import AsJson
from threefold.commands.run_argument import run_here, runs_here


def command(
    run: Annotated[str, typer.Argument(autocompletion=runs_here, help="A run's folder.")],
    step: Annotated[int | None, typer.Option(help="Only this step, with its rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Explain how a run went: threefold why RUN [--step N].

    Spikes of the loss and the gradient norm, with the rows that caused them; rows whose loss is an outlier among
    comparable rows; sources that drift apart; slow ranks; changed keys. It shows the five that matter most, each with
    its evidence, and only reads the run's files.
    """
    from threefold.config.paths import run_and_checkpoint
    from threefold.why import format
    from threefold.why.batch_rows import StepBatches
    from threefold.why.lookback import Lookback

    batches = StepBatches(Lookback.of(run_and_checkpoint(run_here(run))[0]))
    if as_json:
        typer.echo(json.dumps(format.values(batches, step)))
        return
    for line in format.run_lines(batches) if step is None else format.step_lines(batches, step):
        typer.echo(line)
