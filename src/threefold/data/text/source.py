"""Documents from sources: what `data.source` names, as pieces that are read one by one.

A source has its `fingerprint` and its `pieces` before any document is decoded. A piece is an entire text file, some
lines of a .jsonl, some row groups of a .parquet or some rows of a Hub dataset; pieces are small, in the documents'
order and the same on every machine, so that the work on them can be shared out, stopped and resumed. Problems with the
documents are collected in a `ReadLog`, so that one error names several lines.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from threefold.errors import DataError, Problem

EXTENSIONS = (".txt", ".md", ".py", ".jsonl", ".parquet")
MAX_PROBLEMS = 10
MAX_FIELDS = 40


@dataclass(frozen=True)
class Source:
    """What is read, in the words of the config's `data` section.

    Args:
        name: `stdlib`, a file, folder or glob of .txt, .md, .py, .jsonl and .parquet, `hf:ID` (ID may be a folder), or
            a token store: a prepared folder or the prefix of a .bin/.idx pair.
        text_field: field of the text in the rows of .jsonl, .parquet and Hub datasets.
        split, config_name, revision: of a Hub dataset.
        skip_bad_lines: count lines, rows and files that cannot be read instead of refusing them.
    """

    name: str
    text_field: str = "text"
    split: str = "train"
    config_name: str | None = None
    revision: str | None = None
    skip_bad_lines: bool = False


@dataclass(frozen=True)
class Piece:
    """A stretch of one file: bytes of a .jsonl, row groups of a .parquet, rows of a Hub dataset, or a text file."""

    file: int
    start: int
    stop: int
    size_bytes: int


@dataclass
class ReadLog:
    """Counts of what was read, and the first problems; `skip_bad` only counts bad lines, rows and files."""

    skip_bad: bool = False
    num_rows: int = 0
    num_with_field: int = 0
    num_skipped: int = 0
    num_bad: int = 0
    problems: list[Problem] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)

    def bad(self, what: str, *, expected: str, fix: str) -> None:
        """One line, row or file that cannot be used."""
        if self.skip_bad:
            self.num_skipped += 1
            return
        self.num_bad += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(what, expected, fix))

    def saw_fields(self, names: Sequence[str]) -> None:
        """Remembers a row's field names, for the error if no row has the wanted one."""
        if len(self.fields) < MAX_FIELDS:
            self.fields.extend(name for name in names if name not in self.fields)

    def merge(self, other: ReadLog) -> None:
        """Adds the log of later pieces."""
        for count in ("num_rows", "num_with_field", "num_skipped", "num_bad"):
            setattr(self, count, getattr(self, count) + getattr(other, count))
        self.problems = (self.problems + other.problems)[:MAX_PROBLEMS]
        self.saw_fields(other.fields)


class TextSource(Protocol):
    """Documents in a fixed order. Pickles, so that other processes can read pieces."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """Identity of the content and of the way it is read; needs no decoding."""

    @property
    def text_field(self) -> str | None:
        """Field that holds the text; None if each file is one document."""

    @property
    def pieces(self) -> Sequence[Piece]: ...
    def read(self, piece: Piece, log: ReadLog) -> Iterator[str]:
        """The documents of one piece; problems with them go to `log`."""


def log_error(source: TextSource, log: ReadLog) -> DataError:
    """One error for the problems of a log; a field that no row has hides the rows that lack it."""
    if source.text_field is not None and log.num_rows and not log.num_with_field:
        return missing_field(source.name, field=source.text_field, fields=log.fields, num_rows=log.num_rows)
    problems = list(log.problems)
    if more := log.num_bad - len(problems):
        last = problems[-1]
        problems[-1] = Problem(f"{last.what}\n  (and {more:,} more like these)", last.expected, last.fix)
    return cast("DataError", DataError.of(problems))


def missing_field(where: str, *, field: str, fields: Sequence[str], num_rows: int | None = None) -> DataError:
    """The error for a text field that no row has: names the existing fields, and the nearest as the fix."""
    rows = f"none of the first {num_rows:,} rows has this field" if num_rows is not None else "no such field"
    nearest = (difflib.get_close_matches(field, fields, 1, 0.5) or list(fields[:1]) or ["NAME"])[0]
    return DataError(
        f"data.text_field = {field!r}: {where}: {rows}",
        expected=f"one of the existing fields: {', '.join(fields) or 'none'}",
        fix=f"--data.text_field {nearest}",
    )
