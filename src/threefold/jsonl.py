"""JSON lines that a run appends to, how they are read, and the protocol of its trackers; and files written whole.

A resumed run appends; a torn last line, left by a killed run, is cut before the first append, and is not read. A whole
line that is not a JSON object is named and skipped. Floats read back to the same value; non-finite ones are null.
"""

import errno
import json
import math
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Protocol

Values = Mapping[str, Any]
Metrics = Values

# What shows that a file is still the one that was read; damaged lines that are kept; bytes read at once, of the longest
# line, and of one that is quoted.
_REMEMBERED, _MOST_DAMAGED = 64, 50
_BLOCK, _LONGEST, _QUOTED = 1 << 26, 1 << 27, 60


class Tracker(Protocol):
    """Receives what a run logs, on rank 0 only."""

    def log(self, metrics: Metrics) -> None:
        """Receives one logged step or one evaluation."""

    def close(self) -> None:
        """Ends the tracker: the run is over, complete or not."""


class MetricsFile:
    """Appends to a run's metrics.jsonl.

    Args:
        continue_on_error: a line that cannot be written, on a full disk say, is left out, and that is printed once.
        timed: each line ends with its time (UTC).
    """

    def __init__(
        self, path: Path, *, continue_on_error: bool = False, timed: bool = False
    ) -> None:
        cut_torn_line(path)
        self._timed = timed
        self._file = path.open("ab", buffering=0)
        self._continue_on_error = continue_on_error
        self._said = False

    def log(self, metrics: Metrics) -> None:
        with self._attempt():
            time = {"time": utc_now()} if self._timed else {}
            line = as_json({**metrics, **time}).encode() + b"\n"
            start = os.fstat(self._file.fileno()).st_size
            if self._file.write(line) != len(line):
                self._file.truncate(start)  # no torn line between whole ones
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        with self._attempt():
            os.fsync(self._file.fileno())
        self._file.close()

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._continue_on_error:
                raise
            if not self._said:
                self._said = True
                print(
                    f"{self._file.name} cannot be written ({error.strerror}): lines are missing from it",
                    file=sys.stderr,
                )


def as_json(values: Metrics) -> str:
    """Values as one line of JSON; null for non-finite numbers, which JSON lacks."""
    return json.dumps(_finite(values), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def utc_now() -> str:
    """This moment in UTC, to the millisecond, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_whole(path: Path, content: Iterable[bytes]) -> None:
    """Writes a file that gets its name once all of it is on the disk: an error, or a kill, leaves what was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()


def cut_torn_line(path: Path) -> None:
    """Removes what a killed run left after the last complete line."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


class Damage(NamedTuple):
    """A line that no run writes: its file's name, its number (0: the whole file), and the problem."""

    file: str
    line: int
    what: str


class JsonLine(NamedTuple):
    """A whole line that is a JSON object, and its number in the file, from 1."""

    number: int
    values: dict[str, Any]


class Lines:
    """The lines of a file as it grows: each call of `read` returns the new lines.

    A file that was truncated, replaced or rewritten is read again from its beginning.

    Attributes:
        again: how often the file was read from its beginning after the first time.
        damaged: the first lines that cannot be read; `num_damaged` counts all.
        left_bytes: how many at the beginning are not read.
        torn: the number of a last line without its end, which is being written, or whose writer was killed; else 0.
    """

    def __init__(self, path: Path, *, most_bytes: int | None = None) -> None:
        """Args:
        most_bytes: only this many bytes at the end of a longer file are read; lines are counted from there.
        """
        self.path, self.again, self.torn = path, 0, 0
        self._most_bytes, self.left_bytes = most_bytes, 0
        self._begin()

    def _begin(self) -> None:
        self._offset = 0
        self._number = 0
        self._before = b""
        self._file = -1
        self.damaged: list[Damage] = []
        self.num_damaged = 0

    def read(self) -> list[JsonLine]:
        """The whole lines that are new since the last call; none if the file is not there."""
        try:
            with open_file(self.path) as file:
                return list(self._new_lines(file))
        except FileNotFoundError:
            return []
        except OSError as error:
            if not any(damage.line == 0 for damage in self.damaged):
                self.wrong(0, f"it cannot be read: {error.strerror}")
            return []

    def _new_lines(self, file: BinaryIO) -> Iterator[JsonLine]:
        if self._is_another(file):
            self._begin()
            self.again += 1
        self._file = _identity(file)
        if not self._offset:
            self._offset = self.left_bytes = self._begin_of(file)
        file.seek(self._offset)
        rest = b""
        while block := file.read(_BLOCK):
            *whole, rest = (rest + block).split(b"\n")
            for text in whole:
                self._offset += len(text) + 1
                if (line := self._line(text)) is not None:
                    yield line
            if len(rest) > _LONGEST:  # no run writes such a line
                self._line(rest[:_QUOTED])
                self._offset = self._offset + len(rest)
                rest = b""
        self.torn = self._number + 1 if rest else 0
        size = min(_REMEMBERED, self._offset)
        file.seek(self._offset - size)
        self._before = file.read(size)

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

    def _line(self, text: bytes) -> JsonLine | None:
        self._number += 1
        if not text.strip():
            return None
        if (values := object_of(text)) is not None:
            return JsonLine(self._number, values)
        quoted = text[:_QUOTED].decode(errors="replace")
        self.wrong(self._number, f"it is not a JSON object: {quoted!r}")
        return None

    def wrong(self, number: int, what: str) -> None:
        """Notes the problem of a line."""
        self.num_damaged += 1
        if len(self.damaged) < _MOST_DAMAGED:
            self.damaged.append(Damage(self.path.name, number, what))


def object_of(text: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None if it is not one."""
    try:
        values = from_json(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def from_json(text: bytes | str) -> Any:
    """The value of a text in JSON; ValueError if it is not JSON, or nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it has too many brackets: {error}") from error


def open_file(path: Path) -> BinaryIO:
    """Opens a file that another user may have made, for reading.

    Anything but a regular file (a FIFO, a device) would make a reader wait forever; a link that leads out of the folder
    would show one of the reader's own files.

    Raises:
        OSError: it does not exist, is not a file, or is a link to one outside its folder.
    """
    if leads_out(path, path.parent):
        raise OSError(errno.ELOOP, "it is a link that leads out of its folder", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(descriptor, "rb")


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path is a link to something outside of a folder."""
    try:
        return path.is_symlink() and not path.resolve().is_relative_to(folder.resolve())
    except RuntimeError:  # a loop of links
        return True


def _identity(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_ino
