"""Runs a command with the referee attached: its environment, its folder, its end.

The command gets the terminal, its signals and its own exit code; the referee only waits. The records of its ranks are
in the folder, which is new.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from threefold.errors import ConfigError
from threefold.referee.judge.parts import not_judged, read_alone, write_alone
from threefold.referee.record import write_command

_ATTACHED = Path(__file__).parent / "attached"


def watch(
    command: Sequence[str], folder: Path, *, num_whole: int, keep_bytes: int, to_stderr: bool
) -> int:
    """Runs the command, recorded in `folder`, and returns its exit code; 128 + n if signal n ended it.

    Args:
        num_whole: number of steps that are recorded with their whole inputs.
        keep_bytes: how large the record of all ranks may become.
        to_stderr: what the command prints goes to stderr, as stdout has an answer.

    Raises:
        ConfigError: the folder is not empty, or the command cannot be started.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no program {command[0]!r} to watch",
            expected="the command that starts your training, after --",
            fix=f"threefold referee -- {shlex.join([sys.executable, *command])}",
        )
    _prepare(folder, command)
    settings = {
        "THREEFOLD_REFEREE": str(folder.resolve()),
        "THREEFOLD_REFEREE_STEPS": str(num_whole),
        "THREEFOLD_REFEREE_KEEP": str(keep_bytes),
    }
    code = _run(command, settings, output=sys.stderr if to_stderr else None)
    write_command(folder, command, code)
    return code


def run_alone(command: Sequence[str], folder: Path) -> None:
    """Runs a command that makes the model of a record in one process, which ends at its first step.

    The gradients of the record are judged there, with the program's own model; the answer is in the folder.
    """
    code = _run(command, {"THREEFOLD_REFEREE_ALONE": str(folder.resolve())}, output=sys.stderr)
    if read_alone(folder) is None:
        what = f"`{shlex.join(command)}` ended with exit code {code} and did not train the model of the record"
        write_alone(folder, not_judged("gradients", what))


def _run(command: Sequence[str], settings: dict[str, str], *, output: TextIO | None) -> int:
    # A torch.distributed launcher passes its environment to its ranks; srun does too.
    path = os.pathsep.join(filter(None, (str(_ATTACHED), os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, **settings, "PYTHONPATH": path}
    with (
        subprocess.Popen(list(command), env=environ, stdout=output) as process,
        _signals_of(process),
    ):
        code = process.wait()
    return code if code >= 0 else 128 - code


def _prepare(folder: Path, command: Sequence[str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            write_command(folder, command, None)
            return
        what, fix = f"--record {folder} is not empty", f"{folder}-2"
    except OSError as error:
        what, fix = f"--record {folder} cannot be made ({error.strerror})", "referee-record"
    raise ConfigError(what, expected="a new folder, or an empty one", fix=f"--record {fix}")


@contextmanager
def _signals_of(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leaves signals to the command: Ctrl-C reaches it from the terminal, others are forwarded."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            process.send_signal(number)

    before = {
        number: signal.signal(number, hand_on)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
