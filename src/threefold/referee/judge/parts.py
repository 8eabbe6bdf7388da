"""The form of a verdict: parts, each proved, refuted, not judged or not there, in three lines."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import ParamSpec

from threefold.referee.rank.sealed import digest

Rows = Counter[str]
P = ParamSpec("P")
# The judgement of a process with the program's own model.
ALONE_FILE = "alone.json"


class Unjudgeable(Exception):
    """Why something of a record cannot be judged."""


class Refuted(Exception):
    """The problem of a part, the expectation, and where to look."""


class PartStatus(StrEnum):
    """The status of a part. NONE: the program has nothing of this kind."""

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
        lines = [f"{self.status:10}  {self.name}: {self.what}"]
        if self.status is PartStatus.REFUTED:
            lines += [f"  expected: {self.expected}", f"  where: {self.where}"]
        return "\n".join(lines)


def judged_digest(folder: Path) -> str:
    """The digest of the records of all ranks."""
    return digest(b"".join(path.read_bytes() for path in sorted(folder.glob("rank-*.jsonl"))))


def write_alone(folder: Path, part: JudgedPart) -> None:
    """Keeps what was judged with the program's own model."""
    values = {"judged": judged_digest(folder), "part": asdict(part)}
    (folder / ALONE_FILE).write_text(json.dumps(values) + "\n", encoding="utf-8")


def read_alone(folder: Path) -> JudgedPart | None:
    """The judgement with the program's own model; None if there is none, or only of another record."""
    try:
        values = json.loads((folder / ALONE_FILE).read_text(encoding="utf-8"))
        if values["judged"] == judged_digest(folder):
            part = JudgedPart(**values["part"])
            return replace(part, status=PartStatus(part.status))
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return None


def judges(name: str) -> Callable[[Callable[P, JudgedPart]], Callable[P, JudgedPart]]:
    """Names what a function judges; it may raise `Refuted` or `Unjudgeable` instead of returning a part."""

    def named(judge: Callable[P, JudgedPart]) -> Callable[P, JudgedPart]:
        @wraps(judge)
        def judged(*args: P.args, **kwargs: P.kwargs) -> JudgedPart:
            try:
                return replace(judge(*args, **kwargs), name=name)
            except Refuted as wrong:
                return JudgedPart(name, PartStatus.REFUTED, *wrong.args)
            except Unjudgeable as why:
                return not_judged(name, why)

        return judged

    return named


def numbers_text(first: int, last: int) -> str:
    """The steps from one to another, in words."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def listed(names: Iterable[str], texts: dict[str, str] | None = None) -> str:
    """Parameters with what is reported about them, those of several layers under one name, the first eight."""
    groups = defaultdict[str, list[str]](list)
    for name in names:
        groups[re.sub(r"\.\d+\.", ".*.", name)].append(name)
    shown = [
        (group if others else name) + (texts[name] if texts else "")
        for group, (name, *others) in groups.items()
    ]
    return ", ".join(shown[:8])


def proved(what: str) -> JudgedPart:
    """A part that holds, without its name."""
    return JudgedPart("", PartStatus.PROVED, what)


def none_here(why: str) -> JudgedPart:
    """A part that this program does not have, without its name."""
    return JudgedPart("", PartStatus.NONE, why)


def not_judged(name: str, why: object) -> JudgedPart:
    """A part that could not be seen."""
    return JudgedPart(name, PartStatus.NOT_JUDGED, str(why))
