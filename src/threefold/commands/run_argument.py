"""A run that a command names: a folder of this machine, or where the command can read it, an address of a store."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from threefold.commands.arguments import is_address
from threefold.errors import ConfigError


def runs_here(incomplete: str) -> list[str]:
    """The runs in the folder `runs`, and in the folder that is being typed."""
    from threefold.config.paths import is_run

    folders = {Path("runs"), Path(f"{incomplete}x").parent}
    return sorted(str(path) for folder in folders for path in folder.glob("*") if is_run(path))


RunOrCheckpoint = Annotated[
    str,
    typer.Argument(autocompletion=runs_here, help="A run's folder, or one of its checkpoints."),
]


def run_here(run: str | Path, *, state: bool = False) -> Path:
    """The path of a run or of one of its checkpoints; of an address, of a copy on this machine.

    Args:
        state: whether weights are read. Else a copy has none.

    Raises:
        ConfigError: one of its files is not a file: a reader would wait for it.
    """
    from threefold.records.files import check_files

    if isinstance(run, Path) or not is_address(run):
        check_files(Path(run))
        return Path(run)
    from threefold.config.paths import COPY_FILE, RUN_FILE
    from threefold.mesh.environment import cache_folder, variables
    from threefold.places.run_copy import RunCopies

    copies = RunCopies(cache_folder() / "runs", identity_file=RUN_FILE, mark=COPY_FILE)
    return copies.of(run, variables(), state=state, say=partial(typer.echo, err=True))


def only_here(run: Path) -> Path:
    """A run's folder, unless it is a store's address."""
    if is_address(str(run)):
        address = str(run).replace(":/", "://", 1)
        raise ConfigError(
            f"{address} is an address of a store",
            expected="the folder of a run on this machine",
            fix=f"threefold report {address}   (to continue: threefold train CONFIG --checkpoint.store {address})",
        )
    return run
