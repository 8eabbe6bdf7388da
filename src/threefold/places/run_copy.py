"""A run in a store as a folder on this machine, for commands that read one: its newest checkpoint, or one by its name.

The copy has the files of the store's seal, and is compared with it; it is made once, and again when the run continued.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from threefold.places.head import CHECKPOINTS, read_head
from threefold.places.object_store import ObjectStore, open_store
from threefold.places.restore import Restore, checkpoints_of, is_restored, parted, restore
from threefold.places.snapshot import StoredDamage, read_seal
from threefold.places.text_files import locked


class _Alone:
    """The ranks of a command."""

    rank, world_size = 0, 1

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        return make()

    def decide_on(
        self, name: str, make: Callable[[], Any], conclude: Callable[[list[Any]], Any]
    ) -> Any:
        return conclude([make()])


def _lock_of(copy: Path) -> int:
    return os.open(copy.with_name(f".lock-{copy.name}"), os.O_RDWR | os.O_CREAT)


def _is_read(copy: Path) -> bool:
    """Whether a command that still runs has asked for a copy."""
    lock = _lock_of(copy)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@dataclass(frozen=True)
class RunCopies:
    """The copies on this machine.

    Attributes:
        folder: for all of them.
        identity_file: gets the run's identity from the store's head.
        mark: a file that marks a folder as a copy, and names its checkpoint.
    """

    folder: Path
    identity_file: str
    mark: str

    def of(
        self,
        address: str,
        environ: Mapping[str, str],
        *,
        state: bool,
        say: Callable[[str], None],
    ) -> Path:
        """The run's folder, or the checkpoint in it that the address names.

        Args:
            state: whether its weights are fetched too.
            say: receives progress lines.

        Raises:
            CheckpointError: there is no such run or checkpoint, or it was changed since. ConfigError, PlaceError:
                the store cannot be used, or does not answer.
        """
        prefix, name = parted(address)
        place = open_store(prefix, environ)
        while True:
            checkpoints = checkpoints_of(place, name)
            try:
                return self._of(place, checkpoints[0], name, state, say)
            except StoredDamage:
                # A run that continues removes what it does not keep.
                if checkpoints_of(place, name) == checkpoints:
                    raise

    def _of(
        self,
        place: ObjectStore,
        checkpoint: tuple[str, str | None],
        name: str | None,
        state: bool,
        say: Callable[[str], None],
    ) -> Path:
        whole = read_seal(place, *checkpoint)
        folder = (
            self.folder
            / f"{xxhash.xxh3_64_hexdigest(str(place.url).encode())}{'' if state else '-records'}"
        )
        into = folder / xxhash.xxh3_64_hexdigest(repr(whole).encode())
        files = [(self.mark, f"{place.url}/{CHECKPOINTS}/{whole.name}")]
        if (current := read_head(place)) is not None:
            files.append((self.identity_file, json.dumps(current[0].identity) + "\n"))
        wanted = Restore(
            [checkpoint], str(into), whole=True, state=state, records=("",), files=tuple(files)
        )
        with locked(folder, "run"):
            if not is_restored(whole.only(wanted.wants), into):
                for earlier in folder.glob("[!.]*"):
                    if earlier == into or not _is_read(earlier):
                        shutil.rmtree(earlier)
                restore(wanted, place, _Alone(), say)
            fcntl.flock(_lock_of(into), fcntl.LOCK_SH)  # until this process ends
        return into if name is None else into / CHECKPOINTS / f"step-{whole.step:08d}"
