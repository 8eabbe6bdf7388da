"""The lease of a prefix, taken for a run's folder, which a lock restricts to one process at a time.

The folder records its lease holders. All but the last have ended, since the folder was locked again: their lease
is free at once, even after a kill. A copy of the folder has no such record.
"""

import json
import logging
import os
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from threefold.errors import ConfigError, ThreefoldError
from threefold.places.head import HeldHead, take
from threefold.places.object_store import ObjectStore

log = logging.getLogger("threefold")

FILE = ".lease.json"


def take_lease(place: ObjectStore, folder: Path, say: Callable[[str], None]) -> HeldHead:
    """Takes the lease of a prefix for the run in a folder, which this process has locked.

    Raises:
        ConfigError: another run has it.
    """
    before, owner = _owners(folder), uuid.uuid4().hex
    who = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M}"
    # Written first: a process that is killed between the two was then the last owner, too.
    _write_owners(folder, [*before[-1:], owner])
    try:
        return take(place, owner, who, dead=before.__contains__, say=say)
    except ConfigError:  # it was not taken
        _write_owners(folder, before)
        raise


def give_back(held: HeldHead, folder: Path) -> None:
    """Ends the lease of the run in a folder; one that cannot be ended now is left to the next run's patience."""
    try:
        held.release()
        _write_owners(folder, [])
    except (ThreefoldError, OSError) as error:
        log.warning("the lease of %s was not released: %s", held.place.url, error)


def _owners(folder: Path) -> list[str]:
    """The former owners of leases in this very folder: in a copy of it, they may still run."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads((folder / FILE).read_bytes())
        if values["folder"] == _place_of(folder):
            return [str(owner) for owner in values["owners"]]
    return []


def _write_owners(folder: Path, owners: Sequence[str]) -> None:
    path = folder / FILE
    if not owners:
        return path.unlink(missing_ok=True)
    with (temporary := path.with_suffix(".partial")).open("w") as file:
        json.dump({"owners": owners, "folder": _place_of(folder)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _place_of(folder: Path) -> list[int]:
    stat = folder.stat()
    return [stat.st_dev, stat.st_ino]
