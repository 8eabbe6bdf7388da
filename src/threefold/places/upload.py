"""A folder that is made here and then sent to a store, where its last object says that it is whole.

The prefix is held by a claim from before the first file is made to after the last one is sent, so that two writers
never mix theirs. Files go first, configs and indexes after them, and the mark last: who finds it finds them all.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from threefold.errors import ConfigError, ThreefoldError
from threefold.places.admission import require_create
from threefold.places.faults import PlaceError
from threefold.places.object_store import ObjectStore, open_store
from threefold.progress_bars import Bars

CLAIM = ".threefold-export"
MARK = ".threefold-complete.json"
# Parts of a token store, which many hosts have made, and one has joined and sends.
_PARTS = ".parts-"
# Read before all others by what loads a folder.
_LAST = ("config.json", ".index.json")
_EMPTY = "a prefix that holds nothing, so that no other model's files are mixed in"


@contextmanager
def sent_to(address: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """A temporary folder, whose files are sent to an empty prefix once the caller has filled it.

    Raises:
        ConfigError: the prefix holds something, or the store cannot be used. PlaceError: it failed meanwhile; what was
            sent is then removed.
    """
    place = open_store(address, environ)
    _claim(place)
    sent = [CLAIM]
    try:
        with tempfile.TemporaryDirectory(prefix="threefold-export-") as folder:
            yield Path(folder)
            _send(place, Path(folder), sent)
    except BaseException:
        with suppress(ThreefoldError):  # it would hide the first one
            place.delete(sent)
        raise
    place.delete([CLAIM])


def send_files(prefix: Path, address: str, environ: Mapping[str, str]) -> None:
    """Sends the files PREFIX.* as `sent_to` does those of its folder."""
    with sent_to(address, environ) as folder:
        for path in prefix.parent.glob(f"{prefix.name}.*"):
            (folder / path.name).symlink_to(path.absolute())


def refuse_filled(place: ObjectStore) -> None:
    """Raises ConfigError if a prefix holds something else than parts of a store."""
    others = (each for each in place.list() if not each.key.startswith(_PARTS))
    there = next(others, None) or (place.stat("") if place.url.prefix else None)
    if there is not None:
        holds = there.key or "an object of its own name"
        if place.stat(CLAIM) is not None:
            holds = "an export that is being written, or was killed"
        fix = "--to ANOTHER_PREFIX   (or empty this one first, if nobody needs it)"
        raise ConfigError(f"{place.url} holds {holds}", expected=_EMPTY, fix=fix)


def _claim(place: ObjectStore) -> None:
    for _ in range(2):
        refuse_filled(place)
        if require_create(place, CLAIM):
            return
    raise ConfigError(f"another export is writing to {place.url}", expected=_EMPTY, fix="--to ANOTHER_PREFIX")


def _send(place: ObjectStore, folder: Path, sent: list[str]) -> None:
    paths = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda p: (p.name.endswith(_LAST), p))
    files: dict[str, dict[str, str | int]] = {}
    with Bars().show(f"sending to {place.url}", total=sum(path.stat().st_size for path in paths)) as bar:
        for path in paths:
            key = path.relative_to(folder).as_posix()
            sent.append(key)
            place.write(key, path)
            files[key] = {"bytes": path.stat().st_size, "xxh3_128": _digest(path)}
            bar.advance(path.stat().st_size)
    there = {each.key: each.size for each in place.list()}
    if wrong := [key for key, file in files.items() if there.get(key) != file["bytes"]]:
        what = f"{place.url}/{wrong[0]} has not the size that was sent"
        raise PlaceError(what, expected="the bytes that were sent", fix=f"threefold doctor {place.url}")
    sent.append(MARK)
    if place.create(MARK, json.dumps({"files": files}, indent=1).encode()) is None:
        sent.remove(MARK)
        what = f"{place.url}/{MARK} is there, of another writer"
        raise PlaceError(what, expected="one writer for each prefix", fix="--to ANOTHER_PREFIX")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
