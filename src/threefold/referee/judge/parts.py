"""The form of a verdict: parts, each proved, refuted, not judged or not there, in three lines."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from threefold.referee.rank.sealed import digest

Rows = Counter[str]
# What a process with the program's own model has judged.
ALONE_FILE = "alone.json"


class PartStatus(StrEnum):
    """What is known of a part. NONE: the program has nothing of this kind."""

    PROVED = "proved"
    REFUTED = "refuted"
    NOT_JUDGED = "not judged"
    NONE = "none"


@dataclass(frozen=True)
class JudgedPart:
    """One promise: what was seen of it, what was expected, and where to look (or why it could not be judged)."""

    name: str
    status: PartStatus
    what: str
    expected: str = ""
    where: str = ""

    def __str__(self) -> str:
        lines = [f"{self.status.value:10}  {self.name}: {self.what}"]
        if self.status is PartStatus.REFUTED:
            lines += [f"  expected: {self.expected}", f"  where: {self.where}"]
        return "\n".join(lines)


def judged_digest(folder: Path) -> str:
    """The digest of the records of all ranks."""
    return digest(b"".join(path.read_bytes() for path in sorted(folder.glob("rank-*.jsonl"))))


def write_alone(folder: Path, parts: list[JudgedPart]) -> None:
    """Keeps what was judged with the program's own model."""
    values = {"judged": judged_digest(folder), "parts": [asdict(part) for part in parts]}
    (folder / ALONE_FILE).write_text(json.dumps(values) + "\n", encoding="utf-8")


def read_alone(folder: Path) -> list[JudgedPart] | None:
    """What was judged with the program's own model; None if that was not, or of another record."""
    try:
        values = json.loads((folder / ALONE_FILE).read_text(encoding="utf-8"))
        parts = [JudgedPart(**{**part, "status": PartStatus(part["status"])}) for part in values["parts"]]
        return parts if values["judged"] == judged_digest(folder) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def proved(name: str, what: str) -> JudgedPart:
    """A part that holds."""
    return JudgedPart(name, PartStatus.PROVED, what)


def refuted(name: str, what: str, *, expected: str, where: str) -> JudgedPart:
    """A part that does not hold."""
    return JudgedPart(name, PartStatus.REFUTED, what, expected, where)


def not_judged(name: str, why: str) -> JudgedPart:
    """A part that could not be seen."""
    return JudgedPart(name, PartStatus.NOT_JUDGED, why)


def none_here(name: str, why: str) -> JudgedPart:
    """A part that this program does not have."""
    return JudgedPart(name, PartStatus.NONE, why)
