"""A log of several ranks, line by line: which rank wrote it, and which lines are the errors of tracebacks.

Launchers and torch each have their own way to put the rank before a line; a log of one process has no ranks. No torch.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

# torch's own handler and its C++ log, torchrun --tee, srun --label, Open MPI --tag-output, Megatron.
_PREFIX = re.compile(
    r"^(?:\[rank(\d+)\]:? ?|\[\w*?(\d+)\]:|(\d+): |\[\d+,(\d+)\]<std(?:out|err)>: ?|\[Rank (\d+)\] ?|\(.*? pid=\d+\) ?)"
)
# The prefix of a container's runtime or a logger.
_STAMP = re.compile(r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}\S*\s(?:std(?:out|err) [FP] )?")
_INSIDE = re.compile(r"\b[Rr]ank[ :=]*(\d+)\b")
_ERROR = re.compile(
    r"^(?P<kind>(?:[\w<>]+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Missing|Failed\w*|Warning|Elapsed)\w*)(?::|$)"
)
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_INSTALLED = ("site-packages", "dist-packages", "<frozen", "/lib/python3", "runpy.py", "<string>", "/bin/")
# Errors that only report another one.
_REPORTING = (
    "ChildFailedError",
    "ProcessRaisedException",
    "ProcessExitedException",
    "CalledProcessError",
    "SystemExit",
)


@dataclass(frozen=True)
class Line:
    """One line without its rank's prefix; `number` counts from 1."""

    number: int
    text: str
    rank: int | None = None

    def where(self) -> str:
        return f"line {self.number}" + (f", rank {self.rank}" if self.rank is not None else "")


@dataclass(frozen=True)
class Raised:
    """The error that ended a traceback, and the innermost frame that belongs to no installed package."""

    line: Line
    kind: str
    frame: str | None = None

    @property
    def reports_another(self) -> bool:
        return self.kind.rpartition(".")[2] in _REPORTING


@dataclass(frozen=True)
class Log:
    """A log as text, with the line of any offset."""

    text: str
    _ends: list[int] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, text: str) -> Log:
        text = re.sub(r"\x1b\[[0-9;]*m", "", text.replace("\r\n", "\n"))
        return cls(text, list(accumulate(len(line) + 1 for line in text.split("\n"))))

    def line_at(self, offset: int) -> Line:
        """The line that holds the character at `offset`."""
        number = bisect_right(self._ends, offset)
        begin = self._ends[number - 1] if number else 0
        return _parsed(number + 1, self.text[begin : self._ends[number] - 1])

    def lines(self) -> Iterator[Line]:
        """Every line, in order."""
        for number, text in enumerate(self.text.split("\n"), 1):
            yield _parsed(number, text)

    def raised(self) -> list[Raised]:
        """The errors of all tracebacks, in order; of chained errors only the last one."""
        found: list[Raised] = []
        # Ranks write at the same time, so each may have an open traceback.
        frames: dict[int | None, str | None] = {}
        chained: set[int | None] = set()
        for line in self.lines():
            if _TRACEBACK in line.text:  # may follow a progress bar on the same line
                frames[line.rank] = None
                continue
            if line.text.startswith(_CHAINED):
                chained.add(line.rank)
            if line.rank not in frames:
                continue
            if frame := _FRAME.match(line.text):
                if not any(place in frame["file"] for place in _INSTALLED):
                    frames[line.rank] = f"{frame['file']}:{frame['line']} in {frame['function']}"
            elif error := _ERROR.match(line.text):
                if line.rank in chained:
                    chained.discard(line.rank)
                    before = [raised for raised in found if raised.line.rank == line.rank]
                    if before:
                        found.remove(before[-1])
                found.append(Raised(line, error["kind"], frames.pop(line.rank)))
        return found


def _parsed(number: int, text: str) -> Line:
    rank: int | None = None
    text = text.rstrip("\r").rpartition("\r")[2]  # the rest of a progress bar's line
    text = _STAMP.sub("", text)
    # There may be two: a launcher's and torch's.
    for _ in range(2):
        prefix = _PREFIX.match(text)
        if prefix is None:
            break
        named = next((group for group in prefix.groups() if group is not None), None)
        rank = int(named) if named is not None else rank
        text = text[prefix.end() :]
    if rank is None and (inside := _INSIDE.search(text)) is not None and "[" in text[: inside.start()]:
        rank = int(inside[1])
    return Line(number, text.rstrip(), rank)
