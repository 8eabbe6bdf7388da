"""The form of a verdict: parts, each proved, refuted, not judged or not there, in three lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

Rows = Counter[str]


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
