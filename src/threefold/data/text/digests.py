"""Digests of files, remembered in the cache: a file is read again only if its size or times have changed.

One file of the cache for each folder of a source. It is a memory and no record: whatever is wrong with it, the files
are read, and it is written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

import xxhash

FORMAT = "threefold-files-1"

# A file that changes again within a tick of its file system's clock keeps its time; so new ones are not remembered.
_SETTLED_NS = 2_000_000_000


class Digests:
    """The BLAKE2b digests of files below one root, remembered below the folder `memory`; None: nowhere."""

    def __init__(self, root: Path, memory: Path | None) -> None:
        self._root = root
        name = hashlib.blake2b(os.fsencode(root.resolve()), digest_size=16).hexdigest()
        self._place = memory / f"{name}.json" if memory is not None else None
        self._known: dict[str, list[int | str]] = self._read()
        self._changed = False

    def of(self, path: str) -> tuple[int, str]:
        """(size, digest of the content) of the file at a path below the root; OSError if it cannot be read."""
        with (self._root / path).open("rb") as file:
            stat = os.fstat(file.fileno())
            facts = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
            known = self._known.get(path)
            if known is not None and known[:3] == facts:
                return stat.st_size, str(known[3])
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            size = file.tell()
        if size == stat.st_size and max(facts[1:]) < time.time_ns() - _SETTLED_NS:
            self._known[path], self._changed = [*facts, content], True
        return size, content

    def keep(self) -> None:
        """Writes what was learned, if the cache can be written."""
        if self._place is None or not self._changed:
            return
        text = json.dumps(self._known)
        temporary = self._place.with_name(f".{self._place.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            self._place.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(f"{FORMAT} {xxhash.xxh3_128_hexdigest(text.encode())}\n{text}\n")
            os.replace(temporary, self._place)

    def _read(self) -> dict[str, list[int | str]]:
        if self._place is None:
            return {}
        try:
            head, text, _ = self._place.read_text().split("\n")
            if head != f"{FORMAT} {xxhash.xxh3_128_hexdigest(text.encode())}":
                return {}
            known: dict[str, list[int | str]] = json.loads(text)
        except (OSError, ValueError):
            return {}
        return known
