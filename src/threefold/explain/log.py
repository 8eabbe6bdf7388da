"""Logs of several ranks, line by line: where each line is from, and which rank on which host wrote it. No torch.

Launchers and torch each have their own way to put a rank before a line (`prefixes`); a log of one process has no ranks,
and then none is given. A long log says the same again and again: `shapes` are its different lines, digits aside, each
with the places where it stands. Whatever is looked for is looked for in these, so 100 MB take seconds.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from threefold.explain import prefixes
from threefold.explain.prefixes import LineOrigin

_TIME = re.compile(r"(20\d\d-\d\d-\d\d)[T _](\d\d:\d\d:\d\d)")
_INSIDE = re.compile(r"\b[Rr]ank[ :=]*(\d+)\b")
# `rank` within a process group that is not the default one counts differently.
_SMALL_GROUP = re.compile(r"\bPG (?:ID |GUID )*0*[1-9]")
_TASK = re.compile(r"srun: error: (?P<host>[\w.-]+): tasks? (?P<task>\d+)")
_NCCL_HOST = re.compile(r"^(?:\[[^\]]*\] )?(?P<host>[A-Za-z][\w.-]*):\d+:\d+ \[\d+\] ")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_WITHOUT_DIGITS = dict.fromkeys(map(ord, "0123456789"))
# A line with a time, a host, a rank or an error's name is no rest of the line before.
_NEW_LINE = re.compile(r"\S+:\d+:\d+ \[|\[|Traceback|\d{4}-\d\d-\d\d|\S+/\d+ \[|\w+: |\s*\d+%\|")
_LONGEST = 4000
_MOST_PLACES = 4096


@dataclass(frozen=True)
class LogSource:
    """One file or stream: its text, and the rank or host that its name tells."""

    name: str
    text: str
    rank: int | None = None
    host: str | None = None


@dataclass(frozen=True)
class LogLine:
    """One line without its prefix; `number` counts from 1 in its file, `index` from 0 in all of them."""

    number: int
    text: str
    rank: int | None = None
    host: str | None = None
    file: str = ""
    index: int = 0

    def where(self) -> str:
        """Line, rank and host, as far as they are known."""
        named = [self.file] if self.file else []
        if self.rank is not None:
            place = [f"line {self.number}", f"rank {self.rank}"]
        else:
            place = [f"line {self.number}", *([f"on {self.host}"] if self.host else [])]
        return " ".join([*named, ", ".join(place)])


class Log:
    """The lines of all sources, in order."""

    def __init__(self, sources: Iterable[LogSource]) -> None:
        self.sources = list(sources)
        self.raw: list[str] = []
        self._begins: list[int] = []
        # Of each line in `raw`: its number in its source, and what stood before it.
        self._numbers = array("q")
        self._prefixes: list[str] = []
        for source in self.sources:
            text = source.text if "\x1b" not in source.text else _COLOURS.sub("", source.text)
            lines = text.replace("\r\n", "\n").split("\n")
            before, numbers = [""] * len(lines), list(range(1, len(lines) + 1))
            if (unprefixed := prefixes.taken_off(lines)) is not None:
                lines, before, numbers = map(list, zip(*unprefixed, strict=True))
            if (unwrapped := _unwrapped(lines)) is not None:
                lines, firsts = unwrapped
                before, numbers = [before[first - 1] for first in firsts], [numbers[first - 1] for first in firsts]
            self._begins.append(len(self.raw))
            self.raw += lines
            self._prefixes += before
            self._numbers.extend(numbers)

    @classmethod
    def of(cls, text: str) -> Log:
        """A single log."""
        return cls([LogSource("", text)])

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """The different lines, without their digits -> indices of the lines that have that shape, the first 4,096."""
        found: dict[str, list[int]] = {}
        for index, line in enumerate(self.raw):
            shape = (line if len(line) < _LONGEST else line[-_LONGEST:]).translate(_WITHOUT_DIGITS)
            places = found.get(shape)
            if places is None:
                found[shape] = [index]
            elif len(places) < _MOST_PLACES:
                places.append(index)
        return found

    @cached_property
    def firsts(self) -> str:
        """The first line of every shape, joined: the text in which signs are looked for."""
        return "\n".join(_shortened(self.raw[places[0]]) for places in self.shapes.values())

    @cached_property
    def _words(self) -> str:
        """Every word of the log once: a part whose words are not among them need not be looked for."""
        return "\n".join({word for shape in self.shapes for word in shape.split()})

    def has(self, part: str) -> bool:
        """Whether a line contains `part`, which has no digits."""
        return all(word in self._words for word in part.split()) and part in self.firsts

    @cached_property
    def _ends(self) -> list[int]:
        ends, end = [], 0
        for places in self.shapes.values():
            end += len(_shortened(self.raw[places[0]])) + 1
            ends.append(end)
        return ends

    @cached_property
    def _places(self) -> list[list[int]]:
        return list(self.shapes.values())

    def containing(self, part: str) -> Iterator[LogLine]:
        """Every line that has `part` in it, which has no digits, in order of first appearance of its shape."""
        for _, places in self.shapes_containing(part):
            yield from (self.line(index) for index in places)

    def shapes_containing(self, part: str) -> Iterator[tuple[str, list[int]]]:
        """(its first line, the places of all) of every shape whose first line contains `part`."""
        at = self.firsts.find(part) if self.has(part) else -1
        while at >= 0:
            place = bisect_right(self._ends, at)
            yield self.raw[self._places[place][0]], self._places[place]
            at = self.firsts.find(part, self._ends[place])

    def line(self, index: int) -> LogLine:
        """The line at `index`, without its prefix."""
        source, named = self.sources[bisect_right(self._begins, index) - 1], len(self.sources) > 1
        before, number = self._prefixes[index], self._numbers[index]
        return _parsed(self.raw[index], number, index, source, before=before, named=named)

    def is_of_rank(self, line: LogLine) -> bool:
        """Whether a rank wrote the line, and not only a task, as launchers count them of any program."""
        own = prefixes.read(self.raw[line.index], LineOrigin())[1]
        of_task = prefixes.is_task(self._prefixes[line.index]) and own.rank is None and own.role is None
        return line.rank is not None and not of_task

    def lines(self) -> Iterator[LogLine]:
        """Every line, in order."""
        return map(self.line, range(len(self.raw)))

    def time(self, index: int) -> str | None:
        """When the line was written, in seconds as text that sorts, if it or one of the 30 before it says."""
        for before in range(index, max(-1, index - 30), -1):
            if found := _TIME.search((self._prefixes[before] + self.raw[before])[:80]):
                return f"{found[1]} {found[2]}"
        return None

    def source_begin(self, index: int) -> int:
        """Index of the first line of the source that holds the line at `index`."""
        return self._begins[bisect_right(self._begins, index) - 1]

    def source_end(self, index: int) -> int:
        """Index after the last line of the source that holds the line at `index`."""
        place = bisect_right(self._begins, index)
        return self._begins[place] if place < len(self._begins) else len(self.raw)


def _shortened(line: str) -> str:
    return line if len(line) < _LONGEST else line[-_LONGEST:]


def _parsed(text: str, number: int, index: int, source: LogSource, *, before: str, named: bool) -> LogLine:
    text = _shortened(text.rstrip("\r")).rpartition("\r")[2]  # the rest of a progress bar's line
    _, known = prefixes.read(before, LineOrigin(source.rank, source.host))
    text, (rank, host, role) = prefixes.read(text, known)
    if rank is None:
        rank = role
    if task := _TASK.search(text):
        rank, host = int(task["task"]), task["host"]
    elif nccl := _NCCL_HOST.match(text):
        host = nccl["host"]
    if (
        rank is None
        and (inside := _INSIDE.search(text))
        and "[" in text[: inside.start()]
        and not _SMALL_GROUP.search(text)
    ):
        rank = int(inside[1])
    return LogLine(number, text.rstrip(), rank, host, source.name if named else "", index)


def _unwrapped(lines: Sequence[str]) -> tuple[list[str], list[int]] | None:
    """(lines, their first numbers) of a log that a terminal has cut at its width; None if it was not cut."""
    if len(lines) > 20_000:
        return None
    width = max(map(len, lines), default=0)
    full = Counter(map(len, lines))[width]
    if not 70 <= width <= 400 or full < 2 or any(line[-1:] in "-=*#_ │╮╯]}" for line in lines if len(line) == width):
        return None
    if any(_NEW_LINE.match(after) for line, after in pairwise(lines) if len(line) == width):
        return None
    joined: list[str] = []
    numbers: list[int] = []
    cut = False
    for number, line in enumerate(lines, 1):
        if cut and line:
            joined[-1] += line
        else:
            joined.append(line)
            numbers.append(number)
        cut = len(line) == width
    return joined, numbers
