"""What the logs of the ranks (RUN/logs/rank-NNNN.log) say: the head of each start, warnings and errors. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from threefold.report.opened import opened

_MOST_LOGS, _MOST_BYTES, _MOST_SAID = 256, 1 << 26, 60
_LINE = rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
_SAID = re.compile(_LINE + rb"(WARNING|ERROR|CRITICAL) [^:\n]*: ([^\n]*)", re.MULTILINE)
_LATE = re.compile(
    rb"^(?:" + _LINE[1:] + rb"INFO threefold: )?(rank \d+ has been the slowest since [^\n]*)", re.MULTILINE
)
_HEAD = re.compile(_LINE + rb"INFO threefold: threefold \S+  [^\n]*\n((?:  [^\n]*\n)+)", re.MULTILINE)
_FILES = re.compile(_LINE + rb"INFO threefold:   files  ([^\n]*)", re.MULTILINE)
_NAMED = re.compile(
    r"([a-z][\w.]*(?: [a-z]\w*)*): (.*)|(model|mesh|data|format|bos|shares|dpo|steps|lr|hosts|files) +(.*)"
)


class Head(NamedTuple):
    """What a start printed first: (what, how and why)."""

    entries: tuple[tuple[str, str], ...] = ()


@dataclass
class Said:
    """A warning or an error: what the first rank has said, how often, and by which ranks."""

    level: str
    text: str
    times: int = 0
    ranks: set[int] = field(default_factory=set)


class RankLogs(NamedTuple):
    """The heads of the starts, oldest first; warnings and errors; and what was not read."""

    heads: list[Head]
    said: list[Said]
    notes: list[str]


def read_logs(run: Path) -> RankLogs:
    """Reads the logs of a run: all of them up to 256 ranks and 64 MiB, then those of the first ranks."""
    heads: list[Head] = []
    said: dict[tuple[str, str], Said] = {}
    notes: list[str] = []
    paths, room = sorted((run / "logs").glob("rank-*.log")), _MOST_BYTES
    for number, path in enumerate(paths):
        if number >= _MOST_LOGS or room <= 0:
            notes.append(f"the logs of {len(paths) - number} more ranks were not read, from {path.name} on")
            break
        try:
            with opened(path) as file:
                content = file.read(room)
        except OSError as error:
            notes.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        room -= len(content)
        rank = int("0" + "".join(filter(str.isdecimal, path.stem)))
        heads = heads or _heads(content)
        for level, text in [*_SAID.findall(content), *((b"WARNING", text) for text in _LATE.findall(content))]:
            _add(said, rank, level.decode(), text.decode(errors="replace"), notes)
    return RankLogs(heads, list(said.values()), notes)


def _add(said: dict[tuple[str, str], Said], rank: int, level: str, text: str, notes: list[str]) -> None:
    key = level, re.sub(r"\d+", "#", text)
    if key not in said and len(said) >= _MOST_SAID:
        if (note := f"more than {_MOST_SAID} kinds of warnings: the first are shown") not in notes:
            notes.append(note)
        return
    entry = said.setdefault(key, Said(level, text[:2000]))
    entry.times += 1
    entry.ranks.add(rank)


def _heads(content: bytes) -> list[Head]:
    """The heads in the first rank's log; lines that continue another are indented further."""
    found = []
    for match in _HEAD.finditer(content):
        entries: list[tuple[str, str]] = []
        for line in match[1].decode(errors="replace").splitlines():
            text = line[2:]
            if text.startswith(" ") and entries:
                name, before = entries[-1]
                entries[-1] = (name, f"{before}\n{text.strip()}")
            elif (named := _NAMED.fullmatch(text)) is not None:
                entries.append((named[1] or named[3], named[2] or named[4]))
            else:
                entries.append(("", text))
        found.append(Head(tuple(entries)))
    files = [match[1].decode(errors="replace") for match in _FILES.finditer(content)]
    if found and files:
        found[-1] = Head((*found[-1].entries, ("files", files[-1])))
    return found
