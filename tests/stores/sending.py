"""A process that sends one folder after another to a store, until it is killed: `python sending.py ADDRESS FOLDER`."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import xxhash

from threefold.places import mirror, snapshot
from threefold.places.lease import take_lease
from threefold.places.mirror import Mirror, Sent, SentFiles
from threefold.places.object_store import open_store
from threefold.places.snapshot import STATE

SIZES = (100_000, 30_000, 1, 0)


class OneRank:
    """The ranks of a mesh of one, and their key-value store."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> str:
        return self._values[key]

    def wait(self, keys: Sequence[str], limit: object) -> None:
        assert all(key in self._values for key in keys)

    def delete_key(self, key: str) -> None:
        del self._values[key]


def main(address: str, folder: Path) -> None:
    snapshot.PIECE_BYTES = mirror.PIECE_BYTES = 20_000
    held = take_lease(open_store(address, os.environ), folder, print)
    mirror.sweep(held)
    step = max([each.step for each in held.head.checkpoints], default=0)
    mirror.begin(held, {"id": folder.name}, step)

    def describe(sent: Sent) -> SentFiles:
        files = {}
        for number, size in enumerate(SIZES):
            path = sent.folder / f"rank-{number}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data := random.Random(sent.step * 10 + number).randbytes(size))
            files[STATE + path.name] = (0, size, xxhash.xxh3_128_hexdigest(data))
        return SentFiles(f"{sent.folder.name}-a{os.getpid()}", files, {})

    def best() -> int | None:
        return step // 7 * 7 or None

    one = OneRank()
    sender = Mirror(
        one,
        one,
        held.place,
        keep=2,
        continue_on_error=False,
        held=held,
        run=SimpleNamespace(contents=describe, best=best),
    )  # type: ignore[arg-type]
    while True:
        step += 1
        sender.send(Sent(folder / f"step-{step:08d}", step))
        sender.wait(lambda: None)
        print("stored", step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
