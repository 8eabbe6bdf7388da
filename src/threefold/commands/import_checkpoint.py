"""`threefold import`: another program's checkpoint, as a run or as a Hugging Face folder."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from threefold import jsonl
from threefold.commands.arguments import AsJson, on_this_machine


def command(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A torch.distributed.checkpoint or DeepSpeed universal checkpoint folder.",
        ),
    ],
    to: Annotated[Path, typer.Option(callback=on_this_machine, help="The folder to create.")],
    weights: Annotated[
        bool,
        typer.Option("--weights", help="Make a Hugging Face folder of the weights, not a run."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import a checkpoint: threefold import CHECKPOINT --to RUN [CONFIG.yaml] [--section.key value ...].

    Reads what torch.distributed.checkpoint writes (torchtitan, accelerate, your own program), with transformers' names
    or torchtitan's for Llama 3 and Qwen3, and DeepSpeed universal checkpoints. The config names the run's model and
    data. The run resumes at the checkpoint's step, with its weights and AdamW's moments, and reads its data from the
    first row.
    """
    from threefold.commands.arguments import load_config
    from threefold.convert.convert import import_model, import_run

    config = load_config(context.args).config
    if weights:
        done, exported = import_model(source, to, config)
    else:
        done = import_run(source, to, config)
        exported = None
    if as_json:
        typer.echo(jsonl.as_json({"folder": str(to), **asdict(done)}))
        return
    if exported is not None:
        typer.echo(
            f"{to}: {exported.num_parameters:,} parameters, by the names of {done.program}; {exported.verified}"
        )
    else:
        typer.echo(
            f"{to}: step {done.step}, {done.num_weights} weights and their moments, by the names of {done.program}\n"
            f"  its data begin at the first row; to continue: threefold resume {shlex.quote(str(to))}"
        )
    if done.left_out:
        more = f" and {len(done.left_out) - 3:,} more" if len(done.left_out) > 3 else ""
        typer.echo(f"  left out: {', '.join(done.left_out[:3])}{more}")
