"""`threefold export`: parse, call, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints.")],
    to: Annotated[Path, typer.Option(help="The folder to make.")],
) -> None:
    """Write a checkpoint as a Hugging Face folder, which AutoModelForCausalLM.from_pretrained loads."""
    from threefold.app.export import export

    written = export(run, to)
    typer.echo(f"{to}: {written}")
