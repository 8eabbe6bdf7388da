"""Checks that a checkpoint is what was written: sizes and checksums of all its files. No torch.

The marker holds the manifest's checksum, and the manifest holds every other file's, so no byte can change unnoticed.
Checksums find damage; they are not a signature. xxh3 reads about 30 GB/s per core, so checking costs no more than
reading.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

_BLOCK_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Seal:
    """A file as it was written: its size in bytes and its xxh3 checksum (128 bits, hexadecimal)."""

    size_bytes: int
    checksum: str

    def to_json(self) -> list[Any]:
        return [self.size_bytes, self.checksum]

    @classmethod
    def from_json(cls, values: Any) -> "Seal":
        """The inverse of `to_json`; ValueError if `values` is not a seal."""
        match values:
            case [int(size_bytes), str(checksum)] if (
                isinstance(values, list) and type(size_bytes) is int
            ):
                return cls(size_bytes, checksum)
        raise ValueError(f"{values!r} is not a size and a checksum")


def checksum_of(content: bytes) -> str:
    """Returns the checksum of a text or of a small file's content."""
    return xxhash.xxh3_128_hexdigest(content)


class SealedWriter:
    """A file that is written once, from start to end, while its size and checksum are computed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._sum = xxhash.xxh3_128()
        self._size_bytes = 0

    def write(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        for start in range(0, len(view), _BLOCK_BYTES):
            block = view[start : start + _BLOCK_BYTES]
            self._sum.update(block)
            self._file.write(block)
        self._size_bytes += len(view)

    def close(self) -> Seal:
        """Flushes the file to disk and returns its seal."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Seal(self._size_bytes, self._sum.hexdigest())

    def __enter__(self) -> "SealedWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # a file that could not be written must not hide why
            self._file.close()


def write_sealed(path: Path, content: bytes) -> Seal:
    """Writes a small file and flushes it to disk."""
    with SealedWriter(path) as writer:
        writer.write(content)
        return writer.close()


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shares(seals: Mapping[str, Seal], num_ranks: int) -> list[list[str]]:
    """Divides the files among ranks so that each reads about the same amount."""
    parts: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for name in sorted(seals, key=lambda name: (-seals[name].size_bytes, name)):
        rank = loads.index(min(loads))
        parts[rank].append(name)
        loads[rank] += seals[name].size_bytes
    return parts


def wrong_sizes(folder: Path, seals: Mapping[str, Seal]) -> str | None:
    """Returns the first file that is missing or has a different size than when it was written, or None."""
    for name, seal in seals.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size != seal.size_bytes:
            return f"{name} has {size:,} bytes, not {seal.size_bytes:,}"
    return None


def wrong_checksums(
    folder: Path, seals: Mapping[str, Seal], names: Iterable[str]
) -> str | None:
    """Returns the first of `names` whose content differs from what was written, or None."""
    for name in names:
        try:
            with (folder / name).open("rb", buffering=0) as file:
                digest = hashlib.file_digest(file, xxhash.xxh3_128)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if digest.hexdigest() != seals[name].checksum:
            return f"the content of {name} has changed: its checksum is not the one it was written with"
    return None
