"""The bytes of a source's files as they were hashed: later reads are compared with them, block by block.

In: files below a root. Out: a digest of each MiB of them, of which a source's fingerprint is made, and readers that
return no byte of any other block. So a store has the bytes that its fingerprint names, whatever was written meanwhile,
and whatever the file's times. Digests are remembered by the files' sizes, times and numbers, which a write changes.
"""

import contextlib
import hashlib
import io
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import xxhash

from threefold.errors import DataError, shell_word
from threefold.jsonl import write_whole

BLOCK_BYTES = 1 << 20
_DIGEST_BYTES = 16
_FORMAT = "threefold-files-2"

# A file that changes again within a tick of its file system's clock keeps its time; so new ones are not remembered.
_SETTLED_NS = 2_000_000_000


class HashedFile(NamedTuple):
    """A file as it was hashed: its size, times and number, and `_DIGEST_BYTES` for each block."""

    facts: tuple[int, ...]
    blocks: bytes

    @property
    def size_bytes(self) -> int:
        return self.facts[0]

    @property
    def content(self) -> str:
        """The size and the digest of the content."""
        return f"{self.size_bytes}\0{content_digest(self.blocks)}"

    def refuse_other(self, path: Path) -> None:
        """DataError if a file has changed since it was hashed, judged without reading it."""
        try:
            now = facts_of(path.stat())
        except OSError:
            now = ()
        if now != self.facts:
            raise changed(path)


@dataclass(frozen=True)
class SourceFile:
    """A file that is read; only what was hashed, if it was. As text: its path."""

    path: Path
    hashed: HashedFile | None = None

    def __str__(self) -> str:
        return str(self.path)

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.hashed is None else self.hashed.size_bytes

    def open(self) -> BinaryIO:
        """The file's bytes; reading raises a DataError where they are not what was hashed."""
        if self.hashed is None:
            return self.path.open("rb")
        return cast(
            "BinaryIO", io.BufferedReader(_Compared(self.path, self.hashed), BLOCK_BYTES)
        )


class _Compared(io.RawIOBase):
    """A file of which each block is compared as it is read."""

    def __init__(self, path: Path, hashed: HashedFile) -> None:
        self._path, self._hashed, self._at = path, hashed, 0
        self._file = path.open("rb", buffering=0)
        self._number, self._block = -1, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._hashed.size_bytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        number, within = divmod(self._at, BLOCK_BYTES)
        if self._at >= self._hashed.size_bytes:
            return 0
        if number != self._number:
            self._number, self._block = number, self._read(number)
        part = self._block[within : within + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _read(self, number: int) -> bytes:
        data = os.pread(self._file.fileno(), BLOCK_BYTES, number * BLOCK_BYTES)
        kept = self._hashed.blocks[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES]
        if _digest(data) != kept:
            raise changed(self._path)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


class Digests:
    """The digests of files below one root, kept below the folder `memory`; None: nowhere.

    A file is read again only if its size, times or number have changed. This is a cache, not a record: whatever is
    wrong with it, the files are read, and it is rewritten.
    """

    def __init__(self, root: Path, memory: Path | None) -> None:
        self._root = root
        name = content_digest(os.fsencode(root.resolve()))
        self._place = memory / f"{name}.json" if memory is not None else None
        self._known: dict[str, list[Any]] = self._read()
        self._changed = False

    def of(self, path: str) -> HashedFile:
        """The file at a path below the root; OSError if it cannot be read."""
        with (self._root / path).open("rb") as file:
            facts = facts_of(os.fstat(file.fileno()))
            entry = self._known.get(path)
            if entry is not None and tuple(entry[:-1]) == facts:
                return HashedFile(facts, bytes.fromhex(entry[-1]))
            blocks = b"".join(iter(lambda: _digest(file.read(BLOCK_BYTES)), _digest(b"")))
            size = file.tell()
        if size == facts[0] and max(facts[1:3]) < time.time_ns() - _SETTLED_NS:
            self._known[path], self._changed = [*facts, blocks.hex()], True
        return HashedFile((size, *facts[1:]), blocks)

    def keep(self) -> None:
        """Writes what was learned, if the cache can be written."""
        if self._place is None or not self._changed:
            return
        text = json.dumps(self._known).encode()
        head = f"{_FORMAT} {xxhash.xxh3_128_hexdigest(text)}"
        with contextlib.suppress(OSError):
            self._place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._place, [head.encode(), b"\n", text, b"\n"])

    def _read(self) -> dict[str, list[Any]]:
        entries: dict[str, list[Any]] = {}
        if self._place is None:
            return entries
        with contextlib.suppress(OSError, ValueError):
            head, text, _ = self._place.read_text().split("\n")
            if head == f"{_FORMAT} {xxhash.xxh3_128_hexdigest(text.encode())}":
                entries = json.loads(text)
        return entries


def facts_of(stat: os.stat_result) -> tuple[int, ...]:
    """Size, times and number of a file, which a write changes."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def changed(path: Path, *, fix: str | None = None) -> DataError:
    """The error for a file that is not what was hashed."""
    return DataError(
        f"{path} has changed, or is gone, since its fingerprint was made",
        expected="files that do not change while they are read: a store is named after the bytes that it was made from",
        fix=fix
        or f"touch {shell_word(path)}   and run the same command again once nothing writes to it any more",
    )


def content_digest(content: str | bytes) -> str:
    """The digest by which a content, or what it is made of, is known: 32 hexadecimal digits."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() if data else b""
