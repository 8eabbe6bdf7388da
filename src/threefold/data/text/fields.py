"""The text of a row, from a parsed line or from a column of an Arrow table, and what is wrong with it."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.data.text.source import (
    MISSING,
    Document,
    Documents,
    Labeller,
    ReadLog,
    chat_or,
    kind_of,
    missing_field,
    names_in,
    value_of,
)
from threefold.errors import DataError, shell_word

SKIP = "--data.skip_bad_lines true to count it instead"
AGAIN = f"copy or make the file again, or {SKIP}"


def one_list(path: object) -> tuple[str, ...]:
    """Of a file of lines that begins as a list: (problem, what was expected, fix)."""
    to = re.sub(r"\.(jsonl|ndjson|jl)\b", ".json", str(path))
    fix = f"mv {shell_word(path)} {shell_word(to)}"
    return "a list, not an object", "one JSON object per line", fix


@dataclass(frozen=True)
class TextField:
    """Takes the text of one field of each row; all tokens of its documents are trained on."""

    name: str
    loss_mask = None

    @property
    def recipe(self) -> str:
        return repr(self.name)

    @property
    def columns(self) -> Sequence[str]:
        return [self.name]

    def documents(self, row: Any, log: ReadLog) -> Documents:
        """As `Labeller`."""
        if not isinstance(row, dict):
            return (
                f"{kind_of(row)}, not an object",
                f'one JSON object per line: {{"{self.name}": "..."}}',
            )
        log.num_rows += 1
        text = value_of(row, self.name)
        if text is MISSING:
            log.saw_row(row)
            return (
                f"no field {self.name!r}; it has {', '.join(names_in(row)) or 'none'}",
                "the text's field in every row",
            )
        log.num_with_field += 1
        if not isinstance(text, str):
            return f"field {self.name!r} is {kind_of(text)}, not text", "a text in every row"
        # JSON can escape half of a surrogate pair, which UTF-8 cannot hold; in a .csv it means a non-UTF-8 byte.
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if error.object[error.start] >= "\udc80":
                return "the text is not UTF-8", "text in UTF-8"
            return (
                "half of a surrogate pair (\\ud8xx) in the text",
                "text that can be written as UTF-8",
            )
        return [text]


def rows_of_table(
    table: Any, take: Labeller, *, where: str, first_row: int, log: ReadLog
) -> Iterator[Document]:
    """The documents of an Arrow table or batch, rows numbered from `first_row`; Arrow's errors if it is damaged."""
    if isinstance(take, TextField):
        texts = _texts_of(table, take.name)
        log.num_rows += len(texts)
        log.num_with_field += len(texts)
        for number, text in enumerate(texts, start=first_row):
            if isinstance(text, str):
                yield text
                continue
            what, expected, fix = (
                ("the text is null", "a text in every row", SKIP)
                if text is None
                else ("the text is not UTF-8", "text in UTF-8", AGAIN)
            )
            log.bad(f"{where}, row {number}: {what}", expected=expected, fix=fix)
        return
    table.validate(full=True)  # a text that is not UTF-8 is an error here, not halfway through
    decoded = _decoder(table.schema)
    for number, row in enumerate(table.to_pylist(), start=first_row):
        documents = take.documents(decoded(row), log)
        if isinstance(documents, tuple):
            log.bad(
                f"{where}, row {number}: {documents[0]}",
                expected=documents[1],
                fix=f"correct the row, or {SKIP}",
            )
        else:
            yield from documents


def _decoder(schema: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Makes the objects of a row that `datasets` has written as texts of JSON, as it does if they have unlike keys."""
    if b'"Json"' not in (schema.metadata or {}).get(b"huggingface", b""):
        return lambda row: row
    import datasets

    decoded: Callable[[dict[str, Any]], dict[str, Any]] = datasets.Features.from_arrow_schema(
        schema
    ).decode_example
    return decoded


def _texts_of(table: Any, text_field: str) -> list[Any]:
    """The values of a text column of an Arrow table or batch; bytes for values that are not UTF-8."""
    import pyarrow
    import pyarrow.compute

    name, _, inner = (
        (text_field, "", "") if text_field in table.schema.names else text_field.partition(".")
    )
    column = table.column(table.schema.get_field_index(name))
    if inner:
        column = pyarrow.compute.struct_field(column, inner.split("."))
    column.validate(full=(encoded := pyarrow.types.is_dictionary(column.type)))
    if encoded:
        column = column.cast(pyarrow.large_string())
    column = column.cast(pyarrow.large_binary())
    # As bytes, so that a text which is not UTF-8 is named by its row.
    column.validate(full=True)
    return [value if value is None else _decoded(value) for value in column.to_pylist()]


def refuse_repeated(where: str, names: Sequence[str], columns: Sequence[str]) -> None:
    """DataError if a column that is read occurs more than once: readers differ in which one they take."""
    if repeated := [name for name in columns if names.count(name) > 1]:
        raise DataError(
            f"{where} has {names.count(repeated[0])} columns named {repeated[0]!r}",
            expected="unique column names: otherwise which one is read would be a guess",
            fix="rename all but one of them",
        )


def require_text(where: str, schema: Any, field: str) -> None:
    """Refuses an Arrow schema without such a field of text."""
    import pyarrow

    def inner(name: str, kind: Any) -> Iterator[tuple[str, Any]]:
        if not pyarrow.types.is_struct(kind):
            yield name, kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        else:
            for each in kind:
                yield from inner(f"{name}.{each.name}", each.type)

    kinds = dict(pair for each in schema for pair in inner(each.name, each.type))
    texts = [
        name
        for name, kind in kinds.items()
        if str(kind) in ("string", "large_string", "string_view")
    ]
    if field not in kinds and field not in schema.names:
        raise missing_field(where, field, list(kinds), texts=texts)
    if field not in texts:
        raise DataError(
            f"data.fields.text = {field!r}: {where}: the field is {kinds.get(field, 'a struct')}, not text",
            expected="a field of text; tokens made by other programs are read as a .bin/.idx store",
            fix=chat_or(field, "--data.fields '{text: NAME}'   (a field that holds text)"),
        )


def _decoded(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
