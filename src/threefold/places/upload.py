"""A folder that is made here and then sent to a store, where its last object marks it as complete.

A claim holds the prefix from the first file to the mark, and lists the files with their hashes. So two writers never
mix their files, and any sender with the same bytes can continue for one that was killed or failed. Files are sent
first, configs and indexes after them, and the mark last: if it is there, so are all the others.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from threefold.errors import ConfigError
from threefold.places.admission import PROBE, require_create
from threefold.places.faults import PlaceError
from threefold.places.object_store import ObjectStore, open_store
from threefold.places.snapshot import digest
from threefold.progress_bars import Bars

CLAIM = ".threefold-export"
MARK = ".threefold-complete.json"
# Parts of a token store, which many hosts have made, and one has joined and sends.
_PARTS = ".parts-"
# Read before all others by what loads a folder.
_LAST = ("config.json", ".index.json")
_EMPTY = "an empty prefix, so that no other model's files are mixed in"


@contextmanager
def sent_to(address: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """A temporary folder, whose files are sent to a prefix once the caller has filled it.

    Raises:
        ConfigError: the prefix holds something else than some of these very files, or the store cannot be used.
        PlaceError: it failed meanwhile; what was sent stays.
    """
    place = open_store(address, environ)
    refuse_filled(place)
    require_create(place)
    with tempfile.TemporaryDirectory(prefix="threefold-export-") as folder:
        yield Path(folder)
        _send(place, _files_of(Path(folder)))


def send_files(files: Mapping[str, Path], address: str, environ: Mapping[str, str]) -> None:
    """Sends files by their keys as `sent_to` does those of its folder, if they are not all there already."""
    place = open_store(address, environ)
    require_create(place)
    _send(place, files)


def refuse_filled(place: ObjectStore) -> None:
    """Raises ConfigError if a prefix holds anything other than parts of a store and files that a claim lists."""
    claim = place.get(CLAIM)
    listed = _listed(claim[0]) if claim else set()
    others = (
        each
        for each in place.list()
        if not each.key.startswith((_PARTS, PROBE)) and each.key not in listed
    )
    other = next(others, None) or (place.stat("") if place.url.prefix else None)
    if other is not None:
        raise _filled(f"{place.url} holds {other.key or 'an object of its own name'}")


def _filled(what: str) -> ConfigError:
    return ConfigError(
        what,
        expected=_EMPTY,
        fix="--to ANOTHER_PREFIX   (or empty this one first, if nobody needs it)",
    )


def _listed(claim: bytes) -> set[str]:
    """What somebody sends, or has sent until it was killed."""
    try:
        return {CLAIM, MARK, *json.loads(claim)["files"]}
    except (ValueError, KeyError, TypeError):
        return set()


def _claim(place: ObjectStore, mark: bytes) -> None:
    for _ in range(2):
        refuse_filled(place)
        if place.create(CLAIM, mark) or ((claim := place.get(CLAIM)) and claim[0] == mark):
            return
    raise _filled(f"something else is being written to {place.url}, or its writer was killed")


def _files_of(folder: Path) -> dict[str, Path]:
    """The files of a folder by their keys, in the order in which they are sent."""
    paths = sorted(
        (path for path in folder.rglob("*") if path.is_file()),
        key=lambda p: (p.name.endswith(_LAST), p),
    )
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _mark_of(files: Mapping[str, Path]) -> bytes:
    described = {
        key: {"bytes": path.stat().st_size, "xxh3_128": digest(path)}
        for key, path in files.items()
    }
    return json.dumps({"files": described}, indent=1).encode()


def _send(place: ObjectStore, files: Mapping[str, Path]) -> None:
    mark, sizes = _mark_of(files), {key: path.stat().st_size for key, path in files.items()}
    if stored := place.get(MARK):
        if stored[0] != mark:  # a listing may lag behind
            raise _filled(f"{place.url} holds the {MARK} of other files")
        if place.stat(CLAIM) is None:
            return
    _claim(place, mark)
    with Bars().show(f"sending to {place.url}", total=sum(sizes.values())) as bar:
        for key, path in files.items():
            place.write(key, path)
            bar.advance(sizes[key])
    listed = {each.key: each.size for each in place.list()}
    if wrong := [key for key in files if listed.get(key) != sizes[key]]:
        what = f"{place.url}/{wrong[0]} does not have the size that was sent"
        raise PlaceError(
            what, expected="the bytes that were sent", fix=f"threefold doctor {place.url}"
        )
    if place.create(MARK, mark) is None and (stored := place.get(MARK)) and stored[0] != mark:
        what = f"{place.url}/{MARK} exists, from another writer"
        raise PlaceError(what, expected="one writer for each prefix", fix="--to ANOTHER_PREFIX")
    place.delete([CLAIM])
