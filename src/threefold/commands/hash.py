"""`threefold hash`: one hash of the weights of runs, checkpoints and exported models."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from threefold.commands.arguments import AsJson, TrustRemoteCode
from threefold.commands.run_argument import run_here, runs_here
from threefold.errors import EXIT_FAILED


def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            autocompletion=runs_here, help="Runs, checkpoints, or folders with safetensors."
        ),
    ],
    ema: Annotated[
        bool,
        typer.Option("--ema", help="Hash the moving average of the weights (optimizer.ema)."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Print the SHA-256 of a model's weights, the same on any mesh and for its export.

    Given several, it says whether they are equal, and exits with 1 if they are not.
    """
    hashes = [
        _hashed(run_here(path, state=True), ema=ema, trust_remote_code=trust_remote_code)
        for path in paths
    ]
    for each in hashes:
        step = f", step {each['step']}" if "step" in each else ""
        text = (
            f"{each['sha256']}  {each['path']}{step}: {each['num_tensors']} tensors, "
            f"{each['num_parameters']:,} numbers"
        )
        typer.echo(json.dumps(each) if as_json else text)
    if len({each["sha256"] for each in hashes}) > 1:
        typer.echo("not equal", err=as_json)
        sys.exit(EXIT_FAILED)
    if len(hashes) > 1:
        typer.echo("equal", err=as_json)


def _hashed(path: Path, *, ema: bool, trust_remote_code: bool) -> dict[str, Any]:
    from threefold.checkpoint.checkpoint_folder import checkpoint_at, find
    from threefold.export.hashes import hash_of_checkpoint, hash_of_folder

    if checkpoint_at(path).complete or (path / "checkpoints").is_dir():
        checkpoint = find(path)
        hashed = hash_of_checkpoint(checkpoint, ema=ema, trust_remote_code=trust_remote_code)
        return {"path": str(path), "step": checkpoint.step, **dataclasses.asdict(hashed)}
    return {"path": str(path), **dataclasses.asdict(hash_of_folder(path))}
