"""A folder of files in a store, as pieces of bounded size and a seal that is put last, if absent.

A piece is its own object, written whole or not at all: a killed writer leaves no invisible parts of one, a write
that fails is repeated alone, and any reader takes its share of all bytes by ranges. The seal holds size and checksum of
every file and of every piece, so that what was damaged, swapped, cut or removed is named by its key.
"""

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from threefold.errors import CheckpointError
from threefold.places.faults import PlaceError
from threefold.places.head import CHECKPOINTS, KEY, checked_text, checked_values
from threefold.places.object_store import ObjectStore

PIECE_BYTES = 32 * 2**20
# A write that fails behind a run is repeated for so long: a store may be away for a while.
PATIENCE_S = 300.0
SEAL = "sealed.json"
# In a snapshot: the checkpoint as on disk, and the files of its run's folder that a start elsewhere needs.
STATE, RECORDS = "checkpoint/", "records/"
_RANGE_BYTES = 16 * 2**20
_NUM_WRITES, _NUM_READS = 2, 4
_INSIDE = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
# Objects of anybody else are left alone.
_OF_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/(step-\d+-\w+)/")
_T = TypeVar("_T")


class StoredDamage(CheckpointError):
    """The contents of a store differ from what was written."""


@dataclass(frozen=True)
class StoredFile:
    """A file as it was sent: bytes, and xxh3 of the whole and of each piece of PIECE_BYTES (128 bits, hexadecimal)."""

    size: int
    checksum: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Snapshot:
    """A sealed folder: its name, the step that it is of, the bytes of its pieces, and its files by their names."""

    name: str
    step: int
    piece_bytes: int
    files: Mapping[str, StoredFile]

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def only(self, wanted: Callable[[str], bool]) -> "Snapshot":
        """The snapshot with those of its files alone."""
        files = {name: file for name, file in self.files.items() if wanted(name)}
        return Snapshot(self.name, self.step, self.piece_bytes, files)

    def to_values(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Snapshot":
        """The inverse of `to_values`; ValueError, KeyError or TypeError if they are none."""
        files = {
            name: StoredFile(**{**file, "pieces": tuple(file["pieces"])})
            for name, file in values["files"].items()
        }
        snapshot = cls(values["name"], values["step"], values["piece_bytes"], files)
        sizes = [snapshot.step, snapshot.piece_bytes, *(file.size for file in files.values())]
        if any(type(size) is not int or size < 0 for size in sizes) or not snapshot.piece_bytes:
            raise ValueError("a size is not a valid number")
        # An untrusted seal must not lead out of the folder.
        for name, file in files.items():
            if not _INSIDE.fullmatch(name) or ".." in name.split("/"):
                raise ValueError(f"{name!r} is not a file of a checkpoint")
            if len(file.pieces) != -(-file.size // snapshot.piece_bytes):
                raise ValueError(f"{name} does not have as many pieces as its size needs")
        return snapshot


def digest(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def send(place: ObjectStore, name: str, file: str, path: Path) -> StoredFile:
    """Writes a local file below a snapshot's name, piece by piece, as long as it was when the call began.

    Raises:
        PlaceError: the store has failed for PATIENCE_S. ThreefoldError: it refuses. OSError: the file cannot be read.
    """
    left, size, whole, pieces = path.stat().st_size, 0, xxhash.xxh3_128(), list[str]()
    with path.open("rb") as source, ThreadPoolExecutor(_NUM_WRITES) as pool:
        waiting = list[Future[None]]()
        while data := source.read(min(PIECE_BYTES, left - size)):
            # One more than are being written is in memory.
            if len(waiting) == _NUM_WRITES:
                waiting.pop(0).result()
            size += len(data)
            whole.update(data)
            write = partial(place.write, _key(name, file, len(pieces)), data, in_parts=False)
            pieces.append(xxhash.xxh3_128_hexdigest(data))
            waiting.append(pool.submit(persist, write))
        for each in waiting:
            each.result()
    return StoredFile(size, whole.hexdigest(), tuple(pieces))


def persist(call: Callable[..., _T], *arguments: Any) -> _T:
    """The result of a call, repeated for PATIENCE_S while the store fails."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call(*arguments)
        except PlaceError:
            if time.monotonic() > until:
                raise
            time.sleep(random.uniform(0.5, 2.0))


def seal(place: ObjectStore, snapshot: Snapshot) -> str:
    """Puts the seal of what was sent, if absent, and returns its checksum.

    Raises:
        PlaceError: as `send`, or another writer has sealed it.
    """
    content = checked_text(snapshot.to_values())
    if persist(place.create, _seal_key(snapshot.name), content) is None:
        raise PlaceError(
            f"{place.url}/{_seal_key(snapshot.name)} exists, from another writer",
            expected="one writer below a prefix",
            fix="--checkpoint.store ANOTHER_PREFIX",
        )
    return xxhash.xxh3_128_hexdigest(content)


def read_seal(place: ObjectStore, name: str, checksum: str | None = None) -> Snapshot:
    """The seal under a name.

    Args:
        checksum: of the seal, where the head has it.

    Raises:
        StoredDamage: there is no seal, or it is not what was written.
    """
    key = _seal_key(name)
    if (stored := place.get(key)) is None:
        raise _damaged(
            place, key, "it is missing, so nothing shows that the checkpoint is complete"
        )
    if checksum is not None and xxhash.xxh3_128_hexdigest(stored[0]) != checksum:
        raise _damaged(place, key, "its checksum is not the one in the head")
    try:
        snapshot = Snapshot.of(checked_values(stored[0]))
        if snapshot.name != name:
            raise ValueError(f"it belongs to {snapshot.name}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(place, key, f"it is not a seal as it was written ({error})") from error
    return snapshot


def fetch(
    place: ObjectStore, snapshot: Snapshot, folder: Path, *, share: tuple[int, int] = (0, 1)
) -> int:
    """Reads the i-th of n equal parts of all bytes of a snapshot into a folder, and returns how many those are.

    The n readers may work at once, and none needs another. When all are done, `damage` compares.

    Raises:
        MissingObject: a piece is gone or short. PlaceError: the store failed.
    """
    reads = list(_reads(snapshot, *share))
    for name, file in snapshot.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as made:  # empty files too
            if made.tell() > file.size:
                made.truncate(file.size)

    def read(job: tuple[str, int, int, int]) -> int:
        name, number, start, length = job
        data = place.read(_key(snapshot.name, name, number), start=start, length=length)
        with (folder / name).open("r+b") as file:
            file.seek(number * snapshot.piece_bytes + start)
            file.write(data)
        return length

    with ThreadPoolExecutor(_NUM_READS) as pool:
        return sum(pool.map(read, reads))


def _reads(
    snapshot: Snapshot, index: int, num_shares: int
) -> Iterator[tuple[str, int, int, int]]:
    """(file, piece, first byte in the piece, bytes) of the i-th of n equal parts."""
    first, end = (snapshot.num_bytes * place // num_shares for place in (index, index + 1))
    begin = 0
    for name, file in sorted(snapshot.files.items()):
        for number in range(len(file.pieces)):
            low = number * snapshot.piece_bytes
            high = min(low + snapshot.piece_bytes, file.size)
            start, stop = max(first - begin, low), min(end - begin, high)
            for at in range(start, stop, _RANGE_BYTES):
                yield name, number, at - low, min(_RANGE_BYTES, stop - at)
        begin += file.size


def damage(
    place: ObjectStore, snapshot: Snapshot, folder: Path, *, share: tuple[int, int] = (0, 1)
) -> str | None:
    """The first object, of every n-th from the i-th, whose bytes in a folder are not those that were sent; or None."""
    pieces = [
        (name, number)
        for name, file in sorted(snapshot.files.items())
        for number in range(len(file.pieces))
    ]
    for name, number in pieces[share[0] :: share[1]]:
        with (folder / name).open("rb") as file:
            file.seek(number * snapshot.piece_bytes)
            data = file.read(snapshot.piece_bytes)
        if xxhash.xxh3_128_hexdigest(data) != snapshot.files[name].pieces[number]:
            key = _key(snapshot.name, name, number)
            return f"{place.url}/{key} is not what was written: its checksum differs"
    return None


def unsealed(place: ObjectStore, kept: Sequence[str]) -> list[str]:
    """The keys of checkpoints that are not among those kept: what a killed or lost writer has left."""
    keys = [(each.key, _OF_CHECKPOINT.match(each.key)) for each in place.list(CHECKPOINTS)]
    return [key for key, match in keys if match and match[1] not in kept]


def remove(place: ObjectStore, names: Sequence[str]) -> None:
    """Removes checkpoints, their seals first, so that none is half there."""
    place.delete([_seal_key(name) for name in names])
    place.delete([each.key for name in names for each in place.list(f"{CHECKPOINTS}/{name}")])


def _key(name: str, file: str, number: int) -> str:
    return f"{CHECKPOINTS}/{name}/{file}.{number:05d}"


def _seal_key(name: str) -> str:
    return f"{CHECKPOINTS}/{name}/{SEAL}"


def _damaged(place: ObjectStore, key: str, reason: str) -> StoredDamage:
    return StoredDamage(
        f"{place.url}/{key}: {reason}",
        expected="the objects as they were written, which their checksums show",
        fix=f"resume from another one: --checkpoint.resume {place.url}/{CHECKPOINTS}/NAME   (names: in "
        f"{place.url}/{KEY})",
    )
