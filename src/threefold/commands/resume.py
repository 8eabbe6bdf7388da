"""`threefold resume`: the run in a folder continues, from wherever the command is given."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from threefold.commands.arguments import AcceptChanges, Force, MaxRestarts, Quiet, load_config
from threefold.commands.run_argument import only_here, runs_here
from threefold.errors import ConfigError


def command(
    context: typer.Context,
    run: Annotated[
        Path,
        typer.Argument(
            autocompletion=runs_here,
            callback=only_here,
            help="A run's folder, or one of its checkpoints to go back to.",
        ),
    ],
    max_restarts: MaxRestarts = 0,
    force: Force = False,
    accept_changes: AcceptChanges = False,
    quiet: Quiet = False,
) -> None:
    """Resume a run: threefold resume RUN [--section.key value ...].

    RUN/config.yaml is what the run was trained with; keys given here override it: --train.steps 2000 trains on.
    With RUN/checkpoints/step-... the run goes back there, and its later checkpoints are set aside.
    """
    from threefold.config.paths import RUN_CONFIG, run_and_checkpoint
    from threefold.config.yaml_text import as_yaml
    from threefold.run.start import train_command

    folder, checkpoint = run_and_checkpoint(run)
    named = str(checkpoint or folder)
    fork = f"threefold train {shlex.quote(f'{folder}/{RUN_CONFIG}')} --checkpoint.resume {shlex.quote(named)} --log.dir"
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{folder} cannot be written",
            expected="a run that this user can continue in its own folder",
            fix=f"{fork} ANOTHER_FOLDER {shlex.join(context.args)}   (forks it)",
        )
    back = ("--checkpoint.resume", as_yaml(str(checkpoint))) if checkpoint else ()
    loaded = load_config([str(folder / RUN_CONFIG), *back, *context.args])
    into = loaded.config.log.dir
    if into is None or Path(into).resolve() != folder.resolve():
        raise ConfigError(
            f"log.dir = {into}, but the run to resume is in {folder}",
            expected="no log.dir: a run continues in its own folder",
            fix=f"threefold resume {shlex.quote(named)}   (or, to fork it: {fork} "
            f"{shlex.quote(into or 'ANOTHER_FOLDER')})",
        )
    loaded = replace(loaded, accept_changes=accept_changes, quiet=quiet, last=True)
    sys.exit(train_command(loaded, max_restarts=max_restarts, force=force))
