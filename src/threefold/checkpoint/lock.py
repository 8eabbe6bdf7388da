"""One run, or custom loop, at a time in a folder: a lock that rank 0's process holds for as long as it lives.

It is a kernel record lock (`fcntl.lockf`). The end of the process releases it, and it belongs to that process alone:
loader workers that outlive a killed rank do not keep it. On a network file system, other hosts see it. No torch.
"""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import IO, NamedTuple

from threefold.errors import EXIT_WRONG_REQUEST, ConfigError, ThreefoldError

_FILE = "run.lock"
# A run that was just killed, or has just reported its end to the launcher, may still be closing its files.
_PATIENCE_S = 2.0
_LOOKS_PER_S = 20


class Words(NamedTuple):
    """How a run is requested: by keys of the command, or by what a program writes."""

    program: bool = False

    def at(self, folder: Path) -> str:
        return f"the run's folder {folder}" if self.program else f"log.dir = {folder}"

    def another(self, folder: str = "ANOTHER_FOLDER") -> str:
        return (
            f"threefold.Run({folder!r}, ...)"
            if self.program
            else f"--log.dir {shlex.quote(folder)}"
        )

    def resume(self, checkpoint: Path | str, into: str = "") -> str:
        """From a checkpoint; `into` another folder."""
        option = f"config={{'checkpoint.resume': {str(checkpoint)!r}}}"
        if self.program:
            return f"threefold.Run({into!r}, ..., {option})" if into else option
        return f"--checkpoint.resume {shlex.quote(str(checkpoint))}" + (
            f" {self.another(into)}" if into else ""
        )


class RunLock:
    """This process's lock on a run's folder while open; removes a folder that was made for a refused request."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._made: Path | None = None

    def take(self, folder: Path, *, fresh: bool, at: str = "", other: str = "") -> None:
        """Locks the folder; a `fresh` one was made for this request.

        Args:
            at, other: how the folder was requested, and how another one is, for the error; as the command does.

        Raises:
            ConfigError: another process holds the lock.
        """
        words = Words()
        self._file = file = _locked(
            folder / _FILE, at or words.at(folder), other or words.another()
        )
        # Only what this process has locked is its own to remove.
        self._made = folder if fresh else None
        if not file.closed:
            file.truncate(0)
            holder = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": f"{datetime.now():%Y-%m-%d %H:%M}",
            }
            file.write(json.dumps(holder) + "\n")
            file.flush()

    @property
    def held(self) -> bool:
        """Whether a folder was taken."""
        return self._file is not None

    def keep(self) -> None:
        """Keeps the folder, because the request was accepted."""
        self._made = None

    def close(self) -> None:
        """Lets another process have the folder."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        refused = isinstance(error, ThreefoldError) and error.exit_code == EXIT_WRONG_REQUEST
        if self._made is not None and (error is None or refused):
            _discard(self._made)
        self.close()


def _locked(path: Path, at: str, other: str) -> IO[str]:
    """Opens and locks a file; one that cannot be locked is returned closed, and reported on the terminal.

    Raises:
        ConfigError: another process holds the lock.
    """
    until = time.monotonic() + _PATIENCE_S
    file = path.open("a+")
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                print(
                    f"{path} cannot be locked ({error.strerror}): a second run here would go unnoticed",
                    file=sys.stderr,
                )
                file.close()
                return file
        else:
            if _is_at(file, path):
                return file
            # The holder has removed the folder: the file there now is another one.
            file.close()
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
            continue
        if time.monotonic() > until:
            file.close()
            raise _in_use(path, at, other)
        time.sleep(1 / _LOOKS_PER_S)


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _in_use(path: Path, at: str, other: str) -> ConfigError:
    who, stop = "another process", "stop it"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(path.read_text())
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        stop = f"stop it (on {holder['host']}: kill {holder['pid']})"
    return ConfigError(
        f"{at} is in use by another run: {who}",
        expected="one run at a time in a folder: two would mix their metrics and remove one another's checkpoints",
        fix=f"wait for that run or {stop}, or {other}",
    )


def _discard(folder: Path) -> None:
    """Removes a folder that is not needed; files that others put there stay."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder / "logs")
        (folder / "checkpoints").rmdir()
        (folder / _FILE).unlink()
        folder.rmdir()
        folder.parent.rmdir()
