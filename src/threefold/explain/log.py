"""Logs of several ranks, line by line: where each line is from, and which rank on which host wrote it. No torch.

Launchers and torch each have their own way to put a rank before a line (`prefixes`); a log of one process has no ranks,
and then none is set. A long log repeats itself: `shapes` are its different lines, digits aside, each with the places
where it occurs. All searches are in these, so 100 MB take seconds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

from threefold.explain import prefixes

_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")
_LONGEST = 4000  # of a longer line its end is read
_MOST_PLACES = 4096


@dataclass(frozen=True)
class LogSource:
    """One file or stream: its text, the rank in its name, and what of it was not read."""

    name: str
    text: str
    rank: int | None = None
    left_out: str = ""


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
        host = f", on {self.host}" if self.host else ""
        who = host if self.rank is None else f", rank {self.rank}"
        return f"{self.file} line {self.number}{who}".lstrip()


class Log:
    """The lines of all sources, in order."""

    def __init__(self, sources: Iterable[LogSource]) -> None:
        self.sources = list(sources)
        self.raw: list[str] = []
        self._bounds = [0]  # of the sources
        # Of each line in `raw`: its number in its source, and what was before it.
        self._numbers = array("q")
        self._prefixes: list[str] = []
        for source in self.sources:
            lines = prefixes.lines_of(source.text)
            self.raw += [line.text[-_LONGEST:] for line in lines]
            self._prefixes += [line.prefix for line in lines]
            self._numbers.extend(line.number for line in lines)
            self._bounds.append(len(self.raw))

    @classmethod
    def of(cls, text: str) -> Log:
        """A single log."""
        return cls([LogSource("", text)])

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """The different lines, without their digits -> indices of the lines that have that shape, the first 4,096."""
        shapes: dict[str, list[int]] = {}
        for index, line in enumerate(self.raw):
            places = shapes.setdefault(line.translate(_WITHOUT_DIGITS), [])
            if len(places) < _MOST_PLACES:
                places.append(index)
        return shapes

    @cached_property
    def firsts(self) -> str:
        """The first line of every shape, joined: the text in which signs are looked for."""
        return "\n".join(self.raw[places[0]] for places in self._places)

    @cached_property
    def _ends(self) -> list[int]:
        """Where each shape's first line ends in `firsts`."""
        return list(accumulate(len(self.raw[places[0]]) + 1 for places in self._places))

    @cached_property
    def _places(self) -> list[list[int]]:
        return list(self.shapes.values())

    def shapes_containing(self, part: str) -> Iterator[list[int]]:
        """The places of every shape whose first line contains `part`, which has no digits, as they first appear."""
        at = self.firsts.find(part)
        while at >= 0:
            place = bisect_right(self._ends, at)
            yield self._places[place]
            at = self.firsts.find(part, self._ends[place])

    def indices(self, part: str) -> Iterator[int]:
        """Where lines have `part` in them."""
        return chain.from_iterable(self.shapes_containing(part))

    def containing(self, part: str) -> Iterator[LogLine]:
        """The lines that have `part` in them."""
        return map(self.line, self.indices(part))

    def line(self, index: int) -> LogLine:
        """The line at `index`, without its prefix."""
        source = self.sources[bisect_right(self._bounds, index) - 1]
        _, rank, host = prefixes.read(self._prefixes[index], source.rank)
        text, rank, host = prefixes.written(self.raw[index], rank, host)
        file = source.name if len(self.sources) > 1 else ""
        return LogLine(self._numbers[index], text, rank, host, file, index)

    def time(self, index: int) -> str | None:
        """When the line was written, in seconds as text that sorts, if it or one of the 30 before it shows it."""
        places = range(index, max(-1, index - 30), -1)
        begins = (self._prefixes[place] + self.raw[place] for place in places)
        return next(filter(None, map(prefixes.time_of, begins)), None)

    def source(self, index: int) -> range:
        """The indices of the source that holds the line at `index`."""
        place = bisect_right(self._bounds, index)
        return range(self._bounds[place - 1], self._bounds[place])
