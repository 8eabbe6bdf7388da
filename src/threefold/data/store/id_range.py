"""The smallest and the largest id of a token store, and whether a model has an embedding for each.

Under tensor parallelism an id that no rank has would be trained in silence: its embedding is zero and its target is
never hit. So the range is found before a run: a store that is written here records it in PREFIX.ids.json; any other is
read once, and its range is remembered there, or in the cache if its folder cannot be written. A record counts only for
a .bin of the size that it names, which has not changed since.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from threefold.data.store.store import TokenStore, with_suffix
from threefold.errors import DataError

FORMAT = "threefold-ids-1"
SUFFIX = ".ids.json"

_CHUNK = 1 << 24


@dataclass(frozen=True)
class IdRange:
    """Of a .bin of `size_bytes`; an empty one has min_id 0 and max_id -1."""

    min_id: int
    max_id: int
    size_bytes: int


def check_ids(store: TokenStore, *, vocab_size: int, cache: Path) -> None:
    """DataError if a store has an id below 0, or one that a model of `vocab_size` has no embedding for."""
    if store.dtype.kind == "f":
        raise DataError(
            f"{_bin(store)} holds numbers of type {store.dtype.name}",
            expected="token ids, which are whole numbers; these would be cut off to such",
            fix="threefold data prepare --source TEXT --tokenizer TOKENIZER --to DIR   (makes a new store)",
        )
    found = id_range(store, cache=cache)
    if found.min_id >= 0 and found.max_id < vocab_size:
        return
    place = _first_outside(store.tokens, vocab_size)
    document = int(np.searchsorted(store.document_ends, place, "right"))
    raise DataError(
        f"{_bin(store)} has the id {int(store.tokens[place])} as token {place:,}, in document {document:,} "
        f"(both counted from 0); its ids are {found.min_id} to {found.max_id}",
        expected=f"ids from 0 to {vocab_size - 1}: the model has {vocab_size} of them in its vocabulary",
        fix="prepare the text again with the model's tokenizer, or use the model that the store was made for",
    )


def id_range(store: TokenStore, *, cache: Path) -> IdRange:
    """The range of a store's ids: as recorded, else read once and remembered beside the store or in `cache`."""
    own = with_suffix(store.prefix, SUFFIX)
    name = hashlib.blake2b(str(_bin(store).resolve()).encode(), digest_size=16).hexdigest()
    places = (own, cache / "ids" / f"{name}.json")
    for place in places:
        if (found := _recorded(place, store)) is not None:
            return found
    made = IdRange(*_scanned(store.tokens), _bin(store).stat().st_size)
    for place in places:
        with contextlib.suppress(OSError):
            _write(place, made)
            break
    return made


def _bin(store: TokenStore) -> Path:
    return with_suffix(store.prefix, ".bin")


def _recorded(place: Path, store: TokenStore) -> IdRange | None:
    try:
        record = json.loads(place.read_bytes())
        if record.pop("format") != FORMAT:
            return None
        found, made, changed = IdRange(**record), place.stat(), _bin(store).stat()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return found if found.size_bytes == changed.st_size and made.st_mtime_ns >= changed.st_mtime_ns else None


def _write(place: Path, found: IdRange) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps({"format": FORMAT, **asdict(found)}) + "\n")
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def _scanned(tokens: npt.NDArray[Any]) -> tuple[int, int]:
    low, high = 0, -1
    for start in range(0, len(tokens), _CHUNK):
        part = tokens[start : start + _CHUNK]
        first = start == 0
        low = int(part.min()) if first else min(low, int(part.min()))
        high = int(part.max()) if first else max(high, int(part.max()))
    return low, high


def _first_outside(tokens: npt.NDArray[Any], vocab_size: int) -> int:
    for start in range(0, len(tokens), _CHUNK):
        part = tokens[start : start + _CHUNK].astype(np.int64)
        if len(outside := np.flatnonzero((part < 0) | (part >= vocab_size))):
            return start + int(outside[0])
    raise AssertionError("no id is outside")
