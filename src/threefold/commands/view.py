"""`threefold view`: runs in the browser while they train."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from threefold.commands.run_argument import only_here


def command(
    folder: Annotated[
        Path, typer.Argument(callback=only_here, help="A run's folder, or a folder of runs.")
    ] = Path("runs"),
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Default: 8733, or another free port."),
    ] = None,
) -> None:
    """Show runs live in the browser: threefold view [RUN or FOLDER] [--port N].

    The page of `threefold report`, which follows the run; for a folder, a list of its runs to compare. It answers only
    this machine, and only those who have the printed address. The runs notice nothing: only their files are read.
    """
    from threefold.config.paths import is_run, run_and_checkpoint
    from threefold.report.server import listen, serve

    if not folder.is_dir():
        folder = run_and_checkpoint(folder)[0]
    server = listen(folder.absolute(), port)
    at = server.server_port
    what = "the run" if is_run(folder) else "the runs in"
    typer.echo(f"{what} {folder}: http://127.0.0.1:{at}/?token={server.view.token}")
    typer.echo(
        f"from elsewhere: ssh -N -L {at}:127.0.0.1:{at} THIS_HOST, then the same address. Ctrl-C ends it."
    )
    serve(server)
    # A proof may continue in a thread, and one that the interpreter stops inside a C++ library aborts the process.
    sys.stdout.flush()
    os._exit(0)
