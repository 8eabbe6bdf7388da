"""Documents from the rows of .jsonl and .parquet files: pieces of a few megabytes, and errors by line or row.

A .jsonl is cut by bytes: a piece holds the lines that begin inside it, so that pieces can be made without reading the
file. A .parquet is cut by row groups; only the text column is read. A row whose text is missing, null or not a string
is treated like a line that does not parse: it is refused by file and line, or counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threefold.data.text.source import Piece, ReadLog, missing_field
from threefold.errors import DataError

SKIP = "--data.skip_bad_lines true (data prepare: --skip-bad-lines) to count it instead"

_PIECE_BYTES = 4 << 20
_ENOUGH_ROWS = 1000
_BOM = b"\xef\xbb\xbf"


def jsonl_pieces(path: Path, *, file: int) -> list[Piece]:
    """Stretches of about 4 MiB of a .jsonl file."""
    size = path.stat().st_size
    return [
        Piece(file, start, min(start + _PIECE_BYTES, size), min(_PIECE_BYTES, size - start))
        for start in range(0, size, _PIECE_BYTES)
    ]


def read_jsonl(path: Path, piece: Piece, *, text_field: str, log: ReadLog) -> Iterator[str]:
    """The texts of the lines that begin inside `piece`; empty lines count for nothing."""
    lines_before: int | None = None
    with path.open("rb") as file:
        at = piece.start
        if at:
            # Skip the line that began before this piece; one that begins right here is kept.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        line = 0
        while at < piece.stop and (raw := file.readline()):
            start, at, line = at, at + len(raw), line + 1
            if start == 0 and raw.startswith(_BOM):
                raw = raw[len(_BOM) :]
            if not raw.strip():
                continue
            text = _text_of_line(raw, text_field=text_field, log=log)
            if isinstance(text, str):
                yield text
                continue
            if lines_before is None:
                lines_before = _newlines_before(path, start) - line + 1
            what, expected = text
            log.bad(
                f"{path}, line {lines_before + line}: {what}", expected=expected, fix=f"correct the line, or {SKIP}"
            )
            if log.num_bad >= _ENOUGH_ROWS:
                return


def parquet_pieces(path: Path, *, file: int, text_field: str) -> list[Piece]:
    """A piece for each row group; a DataError if it is not a .parquet with a text field of that name."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is not readable as .parquet: {str(error).splitlines()[0]}",
            expected="a complete .parquet file",
            fix="copy or make the file again",
        ) from error
    if text_field not in schema.names:
        raise missing_field(str(path), field=text_field, fields=schema.names)
    kind = schema.field(text_field).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or str(kind) == "string_view"):
        raise not_text(str(path), field=text_field, kind=str(kind))
    return [Piece(file, i, i + 1, size) for i, size in enumerate(sizes)]


def read_parquet(path: Path, piece: Piece, *, text_field: str, log: ReadLog) -> Iterator[str]:
    """The texts of some row groups."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as parquet:
        row = sum(parquet.metadata.row_group(i).num_rows for i in range(piece.start))
        groups = list(range(piece.start, piece.stop))
        for batch in parquet.iter_batches(batch_size=1024, row_groups=groups, columns=[text_field]):
            yield from rows_of_texts(batch.column(0).to_pylist(), where=str(path), first_row=row, log=log)
            row += batch.num_rows


def rows_of_texts(texts: list[Any], *, where: str, first_row: int, log: ReadLog) -> Iterator[str]:
    """The texts of rows that are known to have the field; null is bad. Rows count from 0."""
    log.num_rows += len(texts)
    log.num_with_field += len(texts)
    for i, text in enumerate(texts):
        if isinstance(text, str):
            yield text
        else:
            log.bad(f"{where}, row {first_row + i}: the text is null", expected="a text in every row", fix=SKIP)


def not_text(where: str, *, field: str, kind: str) -> DataError:
    """The error for a column that holds no text."""
    return DataError(
        f"data.text_field = {field!r}: {where}: the field is {kind}, not text",
        expected="a field of text; tokens made by other programs are read as a .bin/.idx store",
        fix="--data.text_field NAME   (a field that holds text)",
    )


def _text_of_line(raw: bytes, *, text_field: str, log: ReadLog) -> str | tuple[str, str]:
    """The text of one line, or (what is wrong, what was expected)."""
    try:
        row = json.loads(raw.strip())
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg} at character {error.pos}", "one JSON object per line"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}", "one JSON object per line"
    if not isinstance(row, dict):
        return (
            f"a JSON {type(row).__name__}, not an object",
            f'one JSON object per line: {{"{text_field}": "..."}}',
        )
    log.num_rows += 1
    if text_field not in row:
        log.saw_fields(list(row))
        return f"no field {text_field!r}; it has {', '.join(row) or 'none'}", "the text's field in every row"
    log.num_with_field += 1
    text = row[text_field]
    if not isinstance(text, str):
        return f"field {text_field!r} is {_json_kind(text)}, not text", "a text in every row"
    # JSON can escape half of a surrogate pair, which no UTF-8 can hold.
    if b"\\ud" in raw.lower() and any("\ud800" <= character <= "\udfff" for character in text):
        return "half of a surrogate pair (\\ud8xx) in the text", "text that can be written as UTF-8"
    return text


def _json_kind(value: Any) -> str:
    kinds = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return kinds.get(type(value), "an object")


def _newlines_before(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return sum(file.read(min(1 << 20, offset - at)).count(b"\n") for at in range(0, offset, 1 << 20))
