"""The logs of the ranks (RUN/logs/rank-NNNN.log): their warnings and errors, and their processes. No torch."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from threefold.config.paths import LOG_START
from threefold.jsonl import object_of, open_file

_MOST_LOGS = 256
_MOST_BYTES = 1 << 26
_MOST_KINDS = 60
_LONGEST = 2000
_BLOCK = 1 << 16
_LINE = rb"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
_WARNING = re.compile(_LINE + rb"(WARNING|ERROR|CRITICAL) [^:\n]*: ([^\n]*)", re.MULTILINE)
_START = re.compile(
    _LINE + rb"INFO %b: (\{[^\n]*\})$" % re.escape(LOG_START.encode()), re.MULTILINE
)


@dataclass
class LoggedWarning:
    """A warning or an error: its text on the first rank, how often it was logged, and by which ranks."""

    level: str
    text: str
    times: int = 0
    ranks: set[int] = field(default_factory=set)


class RankLogs(NamedTuple):
    """Warnings and errors, and what was not read."""

    warnings: list[LoggedWarning]
    notes: list[str]


def paths_of(run: Path) -> Iterator[tuple[int, Path]]:
    """(rank, its log), by rank."""
    for path in sorted((run / "logs").glob("rank-*.log")):
        yield int("0" + "".join(filter(str.isdecimal, path.stem))), path


def read_logs(run: Path) -> RankLogs:
    """Reads the logs of a run: all of them up to 256 ranks and 64 MiB, then those of the first ranks."""
    warnings: dict[tuple[str, str], LoggedWarning] = {}
    notes: list[str] = []
    logs, room = list(paths_of(run)), _MOST_BYTES
    for number, (rank, path) in enumerate(logs):
        if number >= _MOST_LOGS or room <= 0:
            notes.append(
                f"the logs of {len(logs) - number} more ranks were not read, from {path.name} on"
            )
            break
        try:
            with open_file(path) as file:
                content = file.read(room)
        except OSError as error:
            notes.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        room -= len(content)
        for level, text in _WARNING.findall(content):
            _add(warnings, rank, level.decode(), text.decode(errors="replace"), notes)
    return RankLogs(list(warnings.values()), notes)


def _add(
    warnings: dict[tuple[str, str], LoggedWarning],
    rank: int,
    level: str,
    text: str,
    notes: list[str],
) -> None:
    # Those that differ in numbers only are of one kind.
    kind = level, re.sub(r"\d+", "#", text)
    if kind not in warnings and len(warnings) >= _MOST_KINDS:
        if (
            note := f"more than {_MOST_KINDS} kinds of warnings: the first are shown"
        ) not in notes:
            notes.append(note)
        return
    entry = warnings.setdefault(kind, LoggedWarning(level, text[:_LONGEST]))
    entry.times += 1
    entry.ranks.add(rank)


def process_of(path: Path) -> int:
    """The process that the last start of a rank's log names; 0: none. Looks at the log from its end."""
    try:
        with open_file(path) as file:
            end, after = file.seek(0, os.SEEK_END), b""
            while end > 0:
                begin = max(0, end - _BLOCK)
                file.seek(begin)
                block = file.read(end - begin) + after
                if starts := _START.findall(block):
                    process = (object_of(starts[-1]) or {}).get("process")
                    return process if type(process) is int else 0
                end, after = begin, block[:200]
    except OSError:
        pass
    return 0
