"""One run at a time in a folder: a lock that rank 0's process holds for the life of the run.

It is a kernel record lock (`fcntl.lockf`). The end of the process releases it, and it belongs to that process alone:
loader workers that outlive a killed rank do not keep it. On a network file system, other hosts see it. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import IO

from threefold.errors import EXIT_WRONG_REQUEST, ConfigError, ThreefoldError

log = logging.getLogger("threefold")

_FILE = "run.lock"
# A run that was just killed, or just told its launcher that it ended, may still be closing its files.
_PATIENCE_S = 2.0
_LOOKS_PER_S = 20


class RunLock:
    """This process's lock on a run's folder while open; removes a folder that was made for a refused request."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._made: Path | None = None

    def take(self, folder: Path, *, fresh: bool) -> None:
        """Locks the folder; a `fresh` one was made for this request.

        Raises:
            ConfigError: another process holds the lock.
        """
        self._made = folder if fresh else None
        self._file = file = (folder / _FILE).open("a+")
        if _locked(file):
            file.truncate(0)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M}"}
            file.write(json.dumps(holder) + "\n")
            file.flush()

    def keep(self) -> None:
        """Keeps the folder, because the request was accepted."""
        self._made = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        refused = isinstance(error, ThreefoldError) and error.exit_code == EXIT_WRONG_REQUEST
        if self._made is not None and (error is None or refused):
            _discard(self._made)
        if self._file is not None:
            self._file.close()


def _locked(file: IO[str]) -> bool:
    """Locks the file. Returns False if its file system has no locks; raises ConfigError if another process has it."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                log.warning("%s cannot be locked: %s", file.name, error)
                return False
        if time.monotonic() > until:
            raise _in_use(Path(file.name))
        time.sleep(1 / _LOOKS_PER_S)


def _in_use(path: Path) -> ConfigError:
    who, stop = "another process", "stop it"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(path.read_text())
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        stop = f"stop it (on {holder['host']}: kill {holder['pid']})"
    return ConfigError(
        f"log.dir = {path.parent} is in use by another run: {who}",
        expected="one run at a time in a folder: two would mix their metrics and remove one another's checkpoints",
        fix=f"wait for that run or {stop}, or --log.dir ANOTHER_FOLDER",
    )


def _discard(folder: Path) -> None:
    """Removes a folder that is not needed; files that others put there stay."""
    with contextlib.suppress(OSError):
        shutil.rmtree(folder / "logs")
        (folder / "checkpoints").rmdir()
        (folder / _FILE).unlink()
        folder.rmdir()
        folder.parent.rmdir()
