"""`threefold data prepare|order|audit`: parse, call, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prepare data, and prove who read what and when.")

_Run = Annotated[Path, typer.Argument(help="A run's folder.")]


@app.command("prepare")
def prepare(
    source: Annotated[str, typer.Option(help="stdlib, a file, folder or glob of .txt .md .py .jsonl .parquet, hf:ID.")],
    tokenizer: Annotated[str, typer.Option(help="`bytes`, a Hub id or a folder.")],
    to: Annotated[Path, typer.Option(help="The folder to make; the same command goes on with an unfinished one.")],
    text_field: Annotated[str, typer.Option(help="Field with the text in .jsonl, .parquet and Hub rows.")] = "text",
    split: Annotated[str, typer.Option(help="Split of a Hub dataset.")] = "train",
    config_name: Annotated[str | None, typer.Option(help="Configuration of a Hub dataset.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub dataset.")] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Count what cannot be read instead of refusing it.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", "--num-workers", min=1, help="Processes; default: one a core.")
    ] = None,
) -> None:
    """Make a memory-mapped token store (Megatron-LM's .bin and .idx) of a text source."""
    from threefold.commands.data import prepare_store
    from threefold.data.text.source import Source

    read = Source(source, text_field, split, config_name, revision, skip_bad_lines)
    for line in prepare_store(read, tokenizer, to, num_workers=workers):
        typer.echo(line)


@app.command("order")
def order(
    run: _Run,
    sample: Annotated[int | None, typer.Option(help="Who has read this row, and when.")] = None,
    step: Annotated[int | None, typer.Option(help="What this step has read.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the rows' text too.")] = False,
) -> None:
    """Say which steps and ranks have read a row, or which rows a step has read."""
    from threefold.commands.data import order_of_sample, order_of_step
    from threefold.errors import ConfigError

    if sample is not None and step is None:
        lines = order_of_sample(run, sample, show=show)
    elif step is not None and sample is None:
        lines = order_of_step(run, step, show=show)
    else:
        raise ConfigError(
            "--sample and --step are both given" if step is not None else "neither --sample nor --step is given",
            expected="one of them: a row, or a step",
            fix=f"threefold data order {run} --step 1",
        )
    for line in lines:
        typer.echo(line)


@app.command("audit")
def audit(
    run: _Run,
    contents: Annotated[
        bool, typer.Option("--contents", help="Read every token of the source again and compare it too.")
    ] = False,
) -> None:
    """Prove that every sample was read exactly once an epoch, over all restarts and meshes of a run.

    Exit codes: 0 proved; 1 not, with the first step that offends; 2 there is no such record.
    """
    from threefold.commands.data import audit

    for line in audit(run, contents=contents):
        typer.echo(line)
