"""A run in a store as a folder on this machine, for commands that read one: its newest checkpoint, or one by its name.

The copy is of what the store's seal names, and compared with it; it is made once, and again when the run has gone on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from threefold.places.head import CHECKPOINTS, read_head
from threefold.places.object_store import open_store
from threefold.places.restore import Restore, checkpoints_of, parted, restore
from threefold.places.snapshot import read_seal
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


@dataclass(frozen=True)
class RunCopies:
    """The copies on this machine.

    Attributes:
        folder: for all of them.
        identity_file: gets what a run is, as the store's head says it.
        mark: a file that says that a folder is a copy, and of which checkpoint.
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
            say: is given lines on what is fetched.

        Raises:
            CheckpointError: there is no such run or checkpoint, or it is not what was sent. ConfigError, PlaceError:
                the store cannot be used, or does not answer.
        """
        prefix, asked = parted(address)
        place = open_store(prefix, environ)
        name, seal = checkpoints_of(place, asked)[0]
        whole = read_seal(place, name, seal)
        folder = (
            self.folder
            / f"{xxhash.xxh3_64_hexdigest(prefix.encode())}{'' if state else '-records'}"
        )
        into = folder / xxhash.xxh3_64_hexdigest(repr(whole).encode())
        with locked(folder, "run"):
            if not into.exists():
                for earlier in folder.glob("[!.]*"):
                    shutil.rmtree(earlier)
                files = [(self.mark, f"{prefix}/{CHECKPOINTS}/{name}")]
                if (there := read_head(place)) is not None:
                    files.append((self.identity_file, json.dumps(there[0].identity) + "\n"))
                wanted = Restore(
                    [(name, seal)],
                    str(into),
                    whole=True,
                    state=state,
                    records=("",),
                    files=tuple(files),
                )
                restore(wanted, place, _Alone(), say)
        return into if asked is None else into / CHECKPOINTS / f"step-{whole.step:08d}"
