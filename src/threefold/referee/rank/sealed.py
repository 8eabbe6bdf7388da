"""Lines of JSON that are sealed one after the other: a changed, lost or added line is detected on reading.

The seal of a line is the digest of its text and of the seal before it. No pickle, no torch, nothing but the standard
library: it also runs where threefold is not installed.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

_MARK = ', "seal": "'
# Values that become JSON objects.
Values = dict[str, Any]


def digest(content: bytes) -> str:
    """16 hex digits of the recorded values."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


class SealedFile:
    """Appends sealed lines to a new file, as long as they fit into `most_bytes`.

    Raises:
        FileExistsError: the file exists.
    """

    def __init__(self, path: Path, *, most_bytes: int) -> None:
        self._file = path.open("x", encoding="utf-8", buffering=1)
        self._seal = ""
        self.left_bytes = most_bytes

    def write(self, kind: str, values: Values) -> None:
        """Adds a line; non-finite numbers in `values` become null."""
        text = json.dumps({"kind": kind, **_finite(values)})
        self._seal = digest((self._seal + text).encode())
        self.left_bytes -= self._file.write(f'{text[:-1]}{_MARK}{self._seal}"}}\n')

    def close(self) -> None:
        self._file.close()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_sealed(path: Path) -> tuple[list[Values], str | None]:
    """The lines up to the first one that is not as written, and the problem of that one."""
    lines: list[Values] = []
    seal = ""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        text, mark, rest = line.decode("utf-8", errors="replace").rpartition(_MARK)
        seal = digest((seal + text + "}").encode())
        if not mark or rest != f'{seal}"}}\n':
            return lines, f"line {number} of {path.name} was altered or cut short"
        lines.append(json.loads(text + "}"))
    return lines, None
