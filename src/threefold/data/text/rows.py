"""Documents from the rows of .jsonl, .json, .csv and .parquet files, and errors by line, row or row group.

A .jsonl is cut by bytes: a piece holds the lines that begin inside it, so that pieces can be made without reading the
file. A .parquet is cut by row groups; only the text column is read. Other files are one piece each: a .json is a list
of objects, which is read whole, or lines as a .jsonl; a .csv has the names of its columns in the first line. A row
whose text is missing, null or not a string is treated like a line that does not parse: it is refused by file and line,
or counted. A compressed file is read to its end before any of its rows is used, so a damaged one yields none.
"""

import contextlib
import csv
import functools
import gzip
import io
import itertools
import json
import math
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, cast

from threefold.data.text.fields import (
    AGAIN,
    SKIP,
    TextField,
    one_list,
    refuse_repeated,
    require_text,
    rows_of_table,
)
from threefold.data.text.known_bytes import SourceFile
from threefold.data.text.source import Document, Labeller, Piece, ReadLog, chat_or
from threefold.errors import DataError, first_line

_PIECE_BYTES = 4 << 20
_ENOUGH_ROWS = 1000
BOM = b"\xef\xbb\xbf"
_CORRECT = f"correct the line, or {SKIP}"


@contextlib.contextmanager
def opened(path: SourceFile, compression: str | None) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed."""
    with path.open() as file:
        if compression is None:
            yield file
            return
        # Arrow takes zeros behind the end, of tapes and block devices, for damage.
        if compression == "gzip":
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast("BinaryIO", io.BufferedReader(unpacked, 1 << 20))
            return
        import pyarrow

        with pyarrow.CompressedInputStream(
            pyarrow.PythonFile(file, "r"), compression
        ) as stream:
            yield cast("BinaryIO", io.BufferedReader(stream, 1 << 20))


def damage(path: SourceFile, compression: str) -> str | None:
    """The damage of a compressed file, found by reading it to its end; None if it is intact."""
    try:
        with opened(path, compression) as file:
            while file.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error) as error:
        return f"{path} cannot be decompressed: {first_line(error)}"
    return None


def jsonl_pieces(size: int, *, number: int) -> list[Piece]:
    """Ranges of about 4 MiB of a .jsonl file with this many bytes."""
    return [
        Piece(number, start, min(start + _PIECE_BYTES, size), min(_PIECE_BYTES, size - start))
        for start in range(0, size, _PIECE_BYTES)
    ]


def read_jsonl(
    path: SourceFile,
    piece: Piece,
    *,
    take: Labeller,
    log: ReadLog,
    compression: str | None = None,
) -> Iterator[Document]:
    """The texts of the lines that begin inside `piece`, of all lines of a compressed file; empty lines do not count."""
    with opened(path, compression) as file:
        at, stop = piece.start, piece.stop if compression is None else math.inf
        if at:
            # Skip the line that began before this piece; one that begins right here is kept. No further than the piece:
            # of a line over many pieces each would read all the rest.
            file.seek(at - 1)
            rest = file.readline(piece.stop - at)
            if not rest.endswith(b"\n"):
                return
            at += len(rest) - 1

        def lines(at: int) -> Iterator[tuple[int, Any]]:
            for number in itertools.count(1):
                if at >= stop or not (raw := file.readline()):
                    return
                line, at = raw.removeprefix(BOM) if at == 0 else raw, at + len(raw)
                if at == len(raw) and line.lstrip().startswith(b"["):
                    yield number, one_list(path)
                elif line.strip():
                    yield number, _parsed(line)

        before = functools.cache(lambda: _newlines_before(path, at))
        yield from _texts(
            lines(at), lambda number: f"line {before() + number}", path, take=take, log=log
        )


def read_json(
    path: SourceFile, piece: Piece, *, take: Labeller, log: ReadLog, compression: str | None
) -> Iterator[Document]:
    """The texts of a list of objects, of a single object, or of lines with an object each."""
    with opened(path, compression) as file:
        # The first two lines that are not blank distinguish lines from a value that spans several.
        filled = (
            line.strip() for line in itertools.chain([file.readline().removeprefix(BOM)], file)
        )
        first, second = next(lines := filter(None, filled), b""), next(lines, b"")
    if first.startswith(b"{") and (
        second.startswith(b"{") or (second and isinstance(_parsed(first), dict))
    ):
        yield from read_jsonl(path, piece, take=take, log=log, compression=compression)
        return
    try:
        with opened(path, compression) as file:
            decoded = _decoded(file.read().removeprefix(BOM).decode() or "[]")
    except (ValueError, RecursionError) as error:
        log.bad(
            f"{path} is not JSON: {error}",
            expected="a JSON list of objects, or an object per line",
            fix=AGAIN,
        )
        return
    rows = enumerate(decoded if isinstance(decoded, list) else [decoded])
    yield from _texts(rows, lambda number: f"row {number}", path, take=take, log=log)


def read_csv(
    path: SourceFile, _: Piece, *, take: Labeller, log: ReadLog, compression: str | None
) -> Iterator[Document]:
    """The texts of a column. Fields are separated by commas; quoted ones may hold commas and line ends."""
    csv.field_size_limit(sys.maxsize)  # else no document above 128 KiB
    with (
        opened(path, compression) as raw,
        io.TextIOWrapper(
            raw, encoding="utf-8-sig", errors="surrogateescape", newline=""
        ) as lines,
    ):
        rows, line = csv.reader(lines, strict=True), 1

        def numbered() -> Iterator[tuple[int, Any]]:
            nonlocal line
            refuse_repeated(str(path), header := next(rows, []), take.columns)
            _refuse_separator(path, header)
            line = rows.line_num + 1
            for row in rows:
                number, line = line, rows.line_num + 1
                if len(row) == len(header):
                    yield number, dict(zip(header, row, strict=True))
                elif row:
                    yield (
                        number,
                        (f"{len(row)} fields, not {len(header)}", "a field for each column"),
                    )

        try:
            yield from _texts(
                numbered(), lambda number: f"line {number}", path, take=take, log=log
            )
        except csv.Error as error:
            log.bad(
                f"{path}, line {line}: {error}; nothing after it can be read",
                expected='fields in quotes, each quote inside them doubled: "say ""hi"""',
                fix=_CORRECT,
            )


def _refuse_separator(path: SourceFile, header: list[str]) -> None:
    """DataError for a table whose only column holds several: all of them would be one text."""
    if len(header) == 1 and (match := re.search(r"[;\t|]", header[0])):
        read = f"csv.reader(open({str(path)!r}, newline=''), delimiter={match[0]!r})"
        code = f"import csv; csv.writer(open('NEW.csv', 'w', newline='')).writerows({read})"
        raise DataError(
            f"{path} has columns separated by {match[0]!r}",
            expected="columns separated by commas",
            fix=f"python3 -c {shlex.quote(code)}",
        )


def parquet_columns(path: SourceFile) -> list[str]:
    """The names of the columns; none of a file that cannot be read, which `parquet_pieces` names."""
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open() as file:
            return [str(name) for name in pyarrow.parquet.read_schema(file).names]
    except (pyarrow.ArrowException, OSError, ValueError):
        return []


def parquet_pieces(
    path: SourceFile, *, number: int, take: Labeller, skip_bad: bool = False
) -> list[Piece]:
    """A piece for each row group; a DataError if it is not a .parquet with such a field of text.

    Args:
        skip_bad: for a file that is no .parquet, one empty piece instead, which is counted when it is read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open() as file, pyarrow.parquet.ParquetFile(file) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            sizes = [
                metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)
            ]
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if skip_bad:
            return [Piece(number, 0, 0, 0)]
        raise DataError(
            f"{path} is not readable as .parquet: {first_line(error)}",
            expected="a complete .parquet file",
            fix=AGAIN,
        ) from error
    refuse_repeated(str(path), schema.names, take.columns)
    if isinstance(take, TextField):
        require_text(str(path), schema, take.name)
    return [Piece(number, i, i + 1, size) for i, size in enumerate(sizes)]


def read_parquet(
    path: SourceFile, piece: Piece, *, take: Labeller, log: ReadLog
) -> Iterator[Document]:
    """The texts of a row group. Of a damaged one, the rows before the damage are used."""
    import pyarrow
    import pyarrow.parquet

    row = end = 0
    try:
        with (
            path.open() as file,
            pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as parquet,
        ):
            ends = list(
                itertools.accumulate(
                    parquet.metadata.row_group(i).num_rows for i in range(piece.stop)
                )
            )
            row, end = [0, 0, *ends][-2:]
            for batch in parquet.iter_batches(
                batch_size=1024, row_groups=[piece.start], columns=list(take.columns)
            ):
                yield from rows_of_table(batch, take, where=str(path), first_row=row, log=log)
                row += batch.num_rows
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        where = f"row group {piece.start}, rows {row} to {end - 1}" if end else "as a whole"
        log.bad(
            f"{path}, {where}: {first_line(error)}",
            expected="a complete file",
            fix=AGAIN,
            count=max(1, end - row),
        )


def _parsed(line: bytes) -> Any:
    """The value of a line of JSON, or (problem, what was expected)."""
    try:
        return _decoded(line.decode().strip())
    except (ValueError, RecursionError) as error:
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg} at character {error.pos}"
        return f"not JSON: {what}", "one JSON object per line"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """ValueError for a key that occurs twice: readers differ in which of its values they take."""
    if len(mapping := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two values for the key {max(names, key=names.count)!r} in an object")
    return mapping


# A decoder that is kept takes half the time of json.loads, which makes one for each line.
_decoded = json.JSONDecoder(object_pairs_hook=_object).decode


def _texts(
    rows: Iterable[tuple[int, Any]],
    place: Callable[[int], str],
    path: SourceFile,
    *,
    take: Labeller,
    log: ReadLog,
) -> Iterator[Document]:
    """The documents of numbered rows; in place of a row there may be (problem, what was expected, fix)."""
    for number, row in rows:
        documents = row if isinstance(row, tuple) else take.documents(row, log)
        if not isinstance(documents, tuple):
            yield from documents
            continue
        field = (
            take.name
            if isinstance(take, TextField) and isinstance(row, dict) and take.name in row
            else ""
        )
        # The place of a row that is only counted is never read.
        what = f"{path}, {'' if log.skip_bad else place(number)}: {documents[0]}"
        # Its own fix, if it has one.
        log.bad(what, expected=documents[1], fix=[*documents, chat_or(field, _CORRECT)][2])
        if log.num_bad >= _ENOUGH_ROWS:
            return


def _newlines_before(path: SourceFile, offset: int) -> int:
    with path.open() as file:
        return sum(
            file.read(min(1 << 20, offset - at)).count(b"\n")
            for at in range(0, offset, 1 << 20)
        )
