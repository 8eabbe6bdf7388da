"""`threefold sample`: text that a run's model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from threefold.errors import ConfigError


def command(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to write.")] = 200,
) -> None:
    """Write text with a run's model: threefold sample RUN [--prompt TEXT] [--tokens N].

    One process reads the newest checkpoint, or the one that is named, and samples with a fixed seed.
    """
    from threefold.checkpoint.layout import damaged, find
    from threefold.commands.arguments import load_config, run_and_checkpoint
    from threefold.run.rank import quieten_libraries
    from threefold.run.request import tokenizer_of

    quieten_libraries()
    folder, _ = run_and_checkpoint(run)
    config, checkpoint = load_config([str(folder / "config.yaml")]).config, find(run)
    if (reason := checkpoint.damage()) is not None:
        raise damaged(checkpoint, reason)
    tokenizer = tokenizer_of(config)
    if not (ids := tokenizer.encode_batch([prompt])[0].tolist()):
        raise ConfigError("--prompt has no token", expected="text to continue", fix="--prompt 'Once upon a time'")
    from threefold.export.model_folder import generate_sample

    typer.echo(generate_sample(checkpoint, tokenizer, ids, num_tokens=tokens))
