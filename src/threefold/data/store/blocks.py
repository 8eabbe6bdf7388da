"""The bytes of a token store that are known: a hash of each block of its files, in PREFIX.blocks.

A block is 1 MiB, hashed with XXH3 (128 bits): 16 MB of hashes for a TB, and a row is checked by reading one block or
two. The file also has the smallest and the largest id, which the same pass finds, and the size and the time of change
of each file that was hashed: while these are the same, nothing is read again. It is a line of JSON, then the hashes;
the line has a digest of everything, so that a damaged list is reported, not trusted.

The identity of the bytes (`Blocks.digest`) is that of .idx and .bin alone: it is the same for every copy of a store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import xxhash

from threefold.arrays import Array
from threefold.errors import DataError, shell_word
from threefold.jsonl import Values, from_json, write_whole

BLOCK_BYTES = 1 << 20
SUFFIX = ".blocks"
FORMAT = "threefold-blocks-1"
HASH_BYTES = 16
IDENTITY = (".idx", ".bin")
"""The files that a store's digest is made of; a .json names sources and paths, which may differ between copies."""
STORED = ".stored"
"""Says where a store is whose tokens are not on this machine."""
LOSS_MASK = ".loss_mask"
"""One bit a token, of stores that have a loss mask: whether it is trained on. Part of the digest too."""
OF_TOKENS = (".bin", LOSS_MASK)
"""Files of which each block belongs to some tokens."""

_READ_BYTES = 16 << 20


class FileBlocks(NamedTuple):
    """A file as it was hashed: `HASH_BYTES` of hash for each block."""

    size_bytes: int
    mtime_ns: int
    hashes: bytes

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    def of(self, number: int) -> bytes:
        """The hash of one block."""
        return self.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]


class Change(NamedTuple):
    """A block that is not what was hashed, of the file PREFIX + `suffix`; `size_bytes` of the file now, -1: gone."""

    suffix: str
    block: int
    size_bytes: int


class BlockHasher:
    """Hashes of a file's blocks from its bytes, in the order of the file and in pieces of any length."""

    def __init__(self) -> None:
        self._block, self._left, self._done = xxhash.xxh3_128(), BLOCK_BYTES, bytearray()

    def update(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(view):
            part = view[: self._left]
            self._block.update(part)
            self._left -= len(part)
            view = view[len(part) :]
            if not self._left:
                self._end_block()

    def finish(self) -> bytes:
        """The hashes of all blocks; the last block may be shorter."""
        if self._left < BLOCK_BYTES:
            self._end_block()
        return bytes(self._done)

    def _end_block(self) -> None:
        self._done += self._block.digest()
        self._block, self._left = xxhash.xxh3_128(), BLOCK_BYTES


class IdRange:
    """The smallest and the largest id of the tokens that were taken; 0 and -1 without any, or if they are no ids."""

    def __init__(self) -> None:
        self.low, self.high = 0, -1

    def take(self, tokens: Array) -> None:
        if not len(tokens) or tokens.dtype.kind == "f":
            return
        low, high = int(tokens.min()), int(tokens.max())
        first = self.high < self.low
        self.low, self.high = (
            (low, high) if first else (min(low, self.low), max(high, self.high))
        )


@dataclass(frozen=True)
class Blocks:
    """The hashes of a store's files by suffix, and the smallest and the largest id; an empty store has 0 and -1."""

    min_id: int
    max_id: int
    files: dict[str, FileBlocks]
    block_bytes: int = field(default_factory=lambda: BLOCK_BYTES)

    @cached_property
    def digest(self) -> str:
        """Identity of the bytes of .idx and .bin, whatever the files are called and when they were written."""
        names = [*IDENTITY, *([LOSS_MASK] if LOSS_MASK in self.files else [])]
        parts = [
            f"{self.block_bytes}",
            *(f"{name} {self.files[name].size_bytes}" for name in names),
        ]
        digest = xxhash.xxh3_128("\n".join(parts).encode())
        for name in names:
            digest.update(self.files[name].hashes)
        return digest.hexdigest()

    def unchanged(self, prefix: Path) -> bool:
        """Whether all files have the sizes and the times of change with which they were hashed."""
        now = stats_of(prefix)
        complete = set(IDENTITY) <= now.keys()
        return complete and all(
            stat == self.files[name][:2] for name, stat in now.items() if name in self.files
        )

    def timeless(self) -> Blocks:
        """The hashes alone, for a place where the times of files are other ones."""
        return replace(
            self, files={name: kept._replace(mtime_ns=0) for name, kept in self.files.items()}
        )

    def difference(self, other: Blocks) -> Change | None:
        """The first block in which `other` has other bytes; files that only one of them has are not compared."""
        for suffix, kept in self.files.items():
            if (theirs := other.files.get(suffix)) is None or theirs[::2] == kept[::2]:
                continue
            pairs = (
                number
                for number in range(kept.num_blocks)
                if kept.of(number) != theirs.of(number)
            )
            return Change(suffix, next(pairs, kept.num_blocks), theirs.size_bytes)
        return None

    def change(self, prefix: Path, suffix: str, numbers: Iterable[int]) -> Change | None:
        """The first of some blocks whose bytes are not what was hashed, read now; or where the file was cut."""
        kept = self.files[suffix]
        try:
            with with_suffix(prefix, suffix).open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != kept.size_bytes:
                    return Change(suffix, min(size, kept.size_bytes) // self.block_bytes, size)
                for number in numbers:
                    data = os.pread(file.fileno(), self.block_bytes, number * self.block_bytes)
                    if xxhash.xxh3_128_digest(data) != kept.of(number):
                        return Change(suffix, number, size)
        except FileNotFoundError:
            return Change(suffix, 0, -1)
        return None

    def write(self, place: Path) -> None:
        """Writes the file, complete or not at all."""
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, [self.to_bytes()])

    def to_bytes(self) -> bytes:
        """The content of a .blocks file."""
        hashes = b"".join(kept.hashes for kept in self.files.values())
        head = {
            "format": FORMAT,
            "block_bytes": self.block_bytes,
            "min_id": self.min_id,
            "max_id": self.max_id,
            "files": {name: kept[:2] for name, kept in self.files.items()},
        }
        return json.dumps({**head, "digest": _digest(head, hashes)}).encode() + b"\n" + hashes

    @classmethod
    def read(cls, place: Path) -> Blocks | None:
        """The list at `place`, None without one; a DataError if it is not as it was written."""
        try:
            content = place.read_bytes()
        except OSError:
            return None
        return cls.parse(content, place)

    @classmethod
    def parse(cls, content: bytes, place: Path) -> Blocks:
        """The inverse of `to_bytes`; a DataError, which names `place`, for anything else."""
        head, _, hashes = content.partition(b"\n")
        try:
            values = from_json(head)
            if values.pop("digest") != _digest(values, hashes) or values["format"] != FORMAT:
                raise ValueError("its digest differs")
            files, start = {}, 0
            for name, (size_bytes, mtime_ns) in values["files"].items():
                end = start + HASH_BYTES * -(-size_bytes // values["block_bytes"])
                files[name] = FileBlocks(size_bytes, mtime_ns, hashes[start:end])
                start = end
            return cls(values["min_id"], values["max_id"], files, values["block_bytes"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{place} is damaged: {str(error) or type(error).__name__}",
                expected="the hashes of the store's blocks as written: without them nothing can be compared",
                fix=f"rm {shell_word(place)}   (it is hashed again; a run that knows its bytes compares them)",
            ) from error


def stats_of(prefix: Path) -> dict[str, tuple[int, int]]:
    """(size, time of change in ns) of a store's existing files, by suffix."""
    stats = {}
    for suffix in (*IDENTITY, LOSS_MASK, ".json"):
        if (path := with_suffix(prefix, suffix)).is_file():
            stat = path.stat()
            stats[suffix] = stat.st_size, stat.st_mtime_ns
    return stats


def hashed(path: Path, *others: Callable[[bytes], object]) -> FileBlocks:
    """A file's blocks, hashed now; each of `others` gets the same pieces, of whole tokens.

    The time is that before the reading, so that a change meanwhile shows.
    """
    stat, hasher, size = path.stat(), BlockHasher(), 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            size += len(piece)
            for take in (hasher.update, *others):
                take(piece)
    return FileBlocks(size, stat.st_mtime_ns, hasher.finish())


def with_suffix(prefix: str | Path, suffix: str) -> Path:
    """`prefix` with `suffix` appended; a dot in the prefix's own name stays."""
    prefix = Path(prefix)
    return prefix.with_name(prefix.name + suffix)


def _digest(head: Values, hashes: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(head).encode() + b"\n" + hashes)
