"""`threefold view`: runs in the browser while they go."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from threefold.errors import ConfigError


def command(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or one of runs.")] = Path("runs"),
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8733, or another that is free.")] = None,
) -> None:
    """Show runs in the browser while they go: threefold view [RUN or FOLDER] [--port N].

    The page of `threefold report`, which follows the run; of a folder a list of its runs, to be compared. Only this
    machine is answered, and only who has the printed address. The runs notice nothing: their files are read.
    """
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            expected="what serves the page",
            fix="pip install 'threefold[view]'   (or threefold report RUN, which needs nothing)",
        )
    from threefold.report.gathered import is_run, run_folder
    from threefold.report.server import new_token, opened, serve

    if not folder.is_dir():
        folder = run_folder(folder)
    listening, token = opened(port), new_token()
    at = listening.getsockname()[1]
    what = "the run" if is_run(folder) else "the runs in"
    typer.echo(f"{what} {folder}: http://127.0.0.1:{at}/?token={token}")
    typer.echo(f"from elsewhere: ssh -N -L {at}:127.0.0.1:{at} THIS_HOST, then the same address. Ctrl-C ends it.")
    serve(folder.absolute(), listening, token=token)
