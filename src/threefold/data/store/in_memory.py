"""Rows passed by a program, written once as a source like any other: by their content, in the cache.

Rows of text, conversations or preferences become a .jsonl file; rows of tokens (`input_ids`, and `labels` as in
transformers: unshifted, -100 where nothing is trained on) a token store. Its name is a digest of its content, so the
same rows are the same source in every process and in every run, and other rows are another one.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from threefold.arrays import Bool, Int64
from threefold.data.store.prepare import STORE_NAME
from threefold.data.store.store import dtype_for
from threefold.data.store.writer import StoreWriter
from threefold.data.text.known_bytes import content_digest
from threefold.data.text.source import LossMask
from threefold.data.tokens import Tokenizer
from threefold.errors import DataError, first_line
from threefold.jsonl import Values

# As in transformers.
_MASKED = -100
_TOKENS = ("input_ids", "labels", "attention_mask")


def written(rows: Any, *, name: str, cache: Path, tokenizer: Callable[[], Tokenizer]) -> Path:
    """The path of a source with these rows, which is written if it does not exist.

    Args:
        rows: anything with a length whose items 0 to length - 1 are mappings: a datasets.Dataset, a list of dicts.
        name: name of the argument, for errors.
        tokenizer: for rows of tokens.

    Raises:
        DataError: the rows are of another kind, or a row (named by number) cannot be written.
    """
    fix = f"{name}=list(rows)   (of a stream: write it to .jsonl files, and name these in data.source)"
    if isinstance(rows, str | bytes):
        fix = "its path in data.source of the config"
    elif isinstance(rows, Mapping):
        fix = f"{name}=rows[{next(iter(rows), 'train')!r}]"
    elif hasattr(rows, "iloc"):
        fix = f"{name}=rows.to_dict('records')"
    elif hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
        fix = ""
    if fix:
        raise DataError(
            f"{name} is a {type(rows).__name__}",
            expected="rows with a length and an index, a datasets.Dataset or a list of dicts: any row may be needed",
            fix=fix,
        )
    if not len(rows):
        raise DataError(f"{name} has no rows", expected="at least one row", fix=f"{name}=None")
    folder = cache / "handed"
    folder.mkdir(parents=True, exist_ok=True)
    if "input_ids" in _row(rows, 0, name):
        return _store(rows, name, folder, tokenizer())
    return _lines(rows, name, folder)


def _row(rows: Any, number: int, name: str) -> Values:
    row = rows[number]
    if isinstance(row, Mapping):
        return row
    raise DataError(
        f"row {number} of {name} is a {type(row).__name__}",
        expected="a mapping of columns: {'text': ...}, {'messages': [...]}, {'input_ids': [...]}",
        fix=f"{name}=[{{'text': row}} for row in rows]",
    )


def _lines(rows: Any, name: str, folder: Path) -> Path:
    digest, partial = hashlib.blake2b(digest_size=16), folder / f".{uuid.uuid4().hex}.partial"
    try:
        with partial.open("wb") as file:
            for number in range(len(rows)):
                line = _encoded(_row(rows, number, name), number, name) + b"\n"
                digest.update(line)
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, place := folder / f"{digest.hexdigest()}.jsonl")
    finally:
        partial.unlink(missing_ok=True)
    return place


def _encoded(row: Values, number: int, name: str) -> bytes:
    try:
        return json.dumps(
            dict(row), default=_plain, allow_nan=False, ensure_ascii=False
        ).encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"row {number} of {name} cannot be written: {first_line(error)}",
            expected="texts, numbers, true or false, lists and mappings of these",
            fix=f"{name}=dataset.remove_columns([...])   (columns that are not read)",
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def _store(rows: Any, name: str, folder: Path, tokenizer: Tokenizer) -> Path:
    with_labels = "labels" in _row(rows, 0, name)
    loss_mask = LossMask("tokens", _TOKENS[:2], "labels") if with_labels else None
    partial = folder / f".{uuid.uuid4().hex}.partial"
    try:
        with StoreWriter(partial / STORE_NAME, dtype=dtype_for(tokenizer.vocab_size)) as writer:
            for ids, trained_on in _documents(rows, name, tokenizer, with_labels=with_labels):
                writer.add_block(
                    ids, np.array([len(ids)], np.int32), trained_on if with_labels else None
                )
            content = content_digest(f"{writer.content_hash()} {loss_mask}")
            if with_labels and not writer.num_loss_tokens:
                raise DataError(
                    f"{name} has only labels of -100: nothing would be trained on",
                    expected="labels that are the input_ids where a token is trained on",
                    fix="labels=...",
                )
            origin = {"source": name, "source_fingerprint": content, "num_skipped": 0}
            request = f"handed {content}"
            writer.finish(
                lambda made: made.info(tokenizer, loss_mask, request=request, **origin)
            )
        place = folder / f"{content}-{tokenizer.fingerprint[:8]}"
        # It exists: another process or run was first.
        with contextlib.suppress(OSError):
            os.replace(partial, place)
    finally:
        for left in partial.glob("*") if partial.exists() else ():
            left.unlink()
        if partial.exists():
            partial.rmdir()
    return place


def _documents(
    rows: Any, name: str, tokenizer: Tokenizer, *, with_labels: bool
) -> Iterator[tuple[Int64, Bool]]:
    """(ids, whether each is trained on) of each row."""
    for number in range(len(rows)):
        row = _row(rows, number, name)
        try:
            ids = np.asarray(row["input_ids"], np.int64)
            labels = np.asarray(row["labels"], np.int64) if with_labels else ids
            mask = np.asarray(row.get("attention_mask", np.ones_like(ids)))
        except (KeyError, TypeError, ValueError) as error:
            raise _wrong(number, name, f"cannot be read as tokens: {error}") from error
        if unknown := sorted(row.keys() - set(_TOKENS)):
            raise _wrong(
                number,
                name,
                f"has a column {unknown[0]!r} beside input_ids, which would be left out",
            )
        if (
            with_labels != ("labels" in row)
            or ids.ndim != 1
            or not len(ids)
            or labels.shape != ids.shape
        ):
            raise _wrong(
                number, name, f"has input_ids {list(ids.shape)} and labels {list(labels.shape)}"
            )
        if not mask.all():
            raise _wrong(number, name, "has padding: its attention_mask is not all ones")
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            what = f"has ids from {ids.min()} to {ids.max()}; {tokenizer.name} has {tokenizer.vocab_size:,}"
            raise _wrong(number, name, what)
        trained_on = labels != _MASKED
        if not np.array_equal(labels[trained_on], ids[trained_on]):
            raise _wrong(
                number, name, "has labels that are not its input_ids where they are not -100"
            )
        yield ids, trained_on


def _wrong(number: int, name: str, what: str) -> DataError:
    return DataError(
        f"row {number} of {name} {what}",
        expected="input_ids, a list of ids without padding; and labels, if any, the same ids at the same places "
        "(unshifted), -100 where nothing is trained on",
        fix="tokenizer(text)['input_ids'], without padding   (or pass the texts or messages themselves)",
    )
