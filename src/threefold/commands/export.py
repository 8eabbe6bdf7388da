"""`threefold export`: a checkpoint as a Hugging Face folder."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from threefold import jsonl
from threefold.commands.arguments import AsJson, TrustRemoteCode
from threefold.commands.run_argument import RunOrCheckpoint, run_here


def _folder_of(address: str) -> AbstractContextManager[Path]:
    from threefold.mesh import environment
    from threefold.places.upload import sent_to

    return sent_to(address, environment.variables())


def command(
    run: RunOrCheckpoint,
    to: Annotated[str, typer.Option(help="The folder to create, or s3://BUCKET/PREFIX.")],
    max_shard_size: Annotated[
        str, typer.Option(help="Largest weights file: 500MB, 5GB, 2GiB.")
    ] = "5GB",
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Reload the folder and compare logits. Default: if the model fits in memory.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    ema: Annotated[
        bool,
        typer.Option(
            "--ema",
            help="Write the moving average of the weights (optimizer.ema) instead.",
        ),
    ] = False,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter", help="Write only the adapters of a LoRA run, as peft loads them."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, which AutoModelForCausalLM.from_pretrained loads.

    One process exports a run from any mesh, in memory for one weights file and one layer. If the run trained
    adapters (model.lora.r), they are merged into the complete model, which needs memory for that model.
    """
    from threefold.checkpoint.checkpoint_folder import find
    from threefold.commands.arguments import is_address, num_bytes

    place = run_here(run, state=True)
    find(place)  # refused before anything heavy is loaded
    with _folder_of(to) if is_address(to) else nullcontext(Path(to)) as folder:
        from threefold.export.model_folder import export

        done = export(
            place,
            folder,
            max_shard_bytes=num_bytes(max_shard_size, option="--max-shard-size"),
            verify=verify,
            trust_remote_code=trust_remote_code,
            adapter=adapter,
            ema=ema,
        )
    if as_json:
        typer.echo(jsonl.as_json({"folder": to, **asdict(done)}))
        return
    files = f"{len(done.files)} file{'s' if len(done.files) > 1 else ''} of weights"
    typer.echo(
        f"{to}: step {done.step} of {run}, {done.num_parameters:,} parameters, {files}; {done.verified}"
    )
