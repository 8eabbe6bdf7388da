"""Files of JSON lines as they grow: only what is new is read, and a line that cannot be read is told, not fatal.

In: a path that a run appends to. Out: its whole lines as objects, each once. A file that was cut, replaced or written
anew is read again from its beginning, and `again` counts how often that was.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any, NamedTuple

from threefold.report.opened import opened

_REMEMBERED = 64
_MOST_DAMAGED = 50
_MOST_BYTES, _LONGEST, _SHOWN = 1 << 26, 1 << 27, 1000


class Damage(NamedTuple):
    """A line that is not what a run writes: its file, its number (0: the whole file), and what is wrong."""

    file: str
    line: int
    what: str


class Line(NamedTuple):
    """A whole line that is an object, and its number in the file, from 1."""

    number: int
    values: dict[str, Any]


class Tail:
    """The lines of one file.

    Attributes:
        again: how often the file was read from its beginning after the first time.
        damaged: the first lines that cannot be read; `num_damaged` counts all.
        left_bytes: how many at the beginning are not read.
        torn: a line without its end is the last one now: it is being written, or its writer was killed.
    """

    def __init__(self, path: Path, *, most_bytes: int | None = None) -> None:
        """Args:
        most_bytes: of a longer file only so many at its end are read; lines are counted from there.
        """
        self.path, self.again, self.torn = path, 0, False
        self._most_bytes, self.left_bytes = most_bytes, 0
        self._begin()

    def _begin(self) -> None:
        self._offset, self._number, self._before, self._file = 0, 0, b"", -1
        self.damaged: list[Damage] = []
        self.num_damaged = 0

    def read(self) -> list[Line]:
        """The whole lines that are new since the last call; none if the file is not there."""
        found: list[Line] = []
        try:
            with opened(self.path) as file:
                if self._is_another(file):
                    self._begin()
                    self.again += 1
                self._file = _identity(file)
                if not self._offset:
                    self._offset = self.left_bytes = self._begin_of(file)
                file.seek(self._offset)
                rest = b""
                while block := file.read(_MOST_BYTES):
                    *whole, rest = (rest + block).split(b"\n")
                    found += [line for text in whole if (line := self._line(text)) is not None]
                    self._offset += sum(map(len, whole)) + len(whole)
                    if len(rest) > _LONGEST:  # it is read as a line, which it is not
                        self._line(rest[:_SHOWN])
                        self._offset, rest = self._offset + len(rest), b""
                self.torn = bool(rest)
                size = min(_REMEMBERED, self._offset)
                file.seek(self._offset - size)
                self._before = file.read(size)
        except FileNotFoundError:
            return []
        except OSError as error:
            if not any(damage.line == 0 for damage in self.damaged):
                self.wrong(0, f"it cannot be read: {error.strerror}")
        return found

    def _begin_of(self, file: IO[bytes]) -> int:
        """Where the first whole line begins that is to be read."""
        size = os.fstat(file.fileno()).st_size
        if self._most_bytes is None or size <= self._most_bytes:
            return 0
        file.seek(size - self._most_bytes)
        return size - self._most_bytes + len(file.readline(self._most_bytes))

    def _is_another(self, file: IO[bytes]) -> bool:
        """Whether the file is not the one that was read, longer or the same."""
        if self._file == -1:
            return False
        file.seek(self._offset - len(self._before))
        return self._file != _identity(file) or file.read(len(self._before)) != self._before

    def _line(self, text: bytes) -> Line | None:
        self._number += 1
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict):
            return Line(self._number, values)
        self.wrong(self._number, f"it is not a JSON object: {text[:60].decode(errors='replace')!r}")
        return None

    def wrong(self, number: int, what: str) -> None:
        """Notes what is wrong with a line."""
        self.num_damaged += 1
        if len(self.damaged) < _MOST_DAMAGED:
            self.damaged.append(Damage(self.path.name, number, what))


def _identity(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_ino
