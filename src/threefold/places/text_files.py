"""Text in a store, on this machine: the objects at an address as the files of a folder, as one listing shows them.

The folder has the name of the listing (keys, sizes, etags), so changed, added or removed objects give another folder,
with another content. An object that changes while it is fetched is named. One process of a machine fetches, while
the others wait for its lock, which ends with its holder; the next one keeps what is whole.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import xxhash

from threefold.errors import DataError, RunError, size_text
from threefold.places.block_cache import writing
from threefold.places.faults import WHO_WRITES, MissingObject
from threefold.places.object_store import open_store, server_of
from threefold.places.place import ObjectPlace, StoredObject
from threefold.places.url import without_pattern

_NUM_FETCHES = 8
_RANGE_BYTES = 16 * 2**20
_NO_NAMES = {"", ".", ".."}


def parted(address: str, is_text: Callable[[str], object]) -> tuple[str, str]:
    """The part of an address before a pattern or the name of an object, and that; empty: all that is below it."""
    folder, pattern = without_pattern(address)
    above, _, last = folder.rpartition("/")
    if not pattern and is_text(last) and "://" in above:
        return above, last
    return folder.rstrip("/") if "://" in above else folder, pattern


def text_files(
    address: str,
    environ: Mapping[str, str],
    cache: Path,
    is_text: Callable[[str], object],
    *,
    kinds: str,
) -> Path:
    """The local counterpart of the address: a folder, a file, or a file pattern.

    Args:
        cache: the folder for all addresses.
        is_text: whether an object of this name is fetched.
        kinds: the accepted names, in words.

    Raises:
        DataError: there is no such object, or one whose key is no path. RunError: the disk is too small.
            MissingObject: an object changes while it is fetched. ConfigError, PlaceError: as for `open_store`.
    """
    folder, pattern = parted(address, is_text)
    place = open_store(folder, environ)
    # A listing that is made while somebody writes may name an object twice.
    objects = [each for _, each in sorted({each.key: each for each in place.list()}.items())]
    # Those who open the files know what a pattern means here: more may be fetched than they choose.
    loose = pattern.partition("{")[0] + "*" if "{" in pattern else pattern or "*"
    wanted = [each for each in objects if is_text(each.key) and fnmatchcase(each.key, loose)]
    if not wanted:
        what = f"{address} is neither a token store nor text: it holds {len(objects):,} objects of other kinds"
        what = what if objects else f"{address} holds nothing"
        raise DataError(
            what,
            expected=f"{kinds}; or what `threefold data prepare --to` has written",
            fix=f"--data.source {folder}   (or another prefix of the bucket)",
        )
    for each in wanted:
        if _NO_NAMES & {*each.key.split("/")} or "\0" in each.key:
            what = f"{folder}: the key {each.key!r} is not a file path"
            raise DataError(
                what, expected="keys of names separated by single slashes", fix=WHO_WRITES
            )
    listing = "\n".join(f"{each.key}\0{each.size}\0{each.etag}" for each in wanted)
    to = cache / xxhash.xxh3_128_hexdigest(
        f"{server_of(folder, environ)}\n{folder}\n{listing}".encode()
    )
    with writing(cache), locked(cache, to.name):
        if not all(_is_whole(to / each.key, each) for each in wanted):
            shutil.rmtree(to, ignore_errors=True)
            _fetch_all(place, wanted, to)
    return to / pattern


@contextmanager
def locked(cache: Path, name: str) -> Iterator[None]:
    """Holds a lock by name below a folder: of two processes, only one fetches."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".lock-{name}").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_all(place: ObjectPlace, objects: Sequence[StoredObject], to: Path) -> None:
    """Fetches objects into a folder that appears when all are there."""
    partial = to.with_name(f".{to.name}.partial")
    partial.mkdir(exist_ok=True)
    missing = [each for each in objects if not _is_whole(partial / each.key, each)]
    needed, free = sum(each.size for each in missing), shutil.disk_usage(partial).free
    if needed > free:
        raise RunError(
            f"the disk of {to.parent} has {size_text(free)} left",
            expected=f"{size_text(needed)} for the text at the address",
            fix="XDG_CACHE_HOME=FOLDER threefold ...   (a folder on a larger disk; or `threefold data prepare --to` an "
            "address: a token store is read by ranges)",
        )
    with ThreadPoolExecutor(_NUM_FETCHES) as fetches:
        try:
            for done in [
                fetches.submit(_fetch, place, each, partial / each.key) for each in missing
            ]:
                done.result()
        finally:
            # Of the others, if one has failed.
            fetches.shutdown(wait=False, cancel_futures=True)
    os.replace(partial, to)


def _is_whole(path: Path, listed: StoredObject) -> bool:
    # A file has its name when it is whole.
    return path.is_file() and path.stat().st_size == listed.size


def _fetch(place: ObjectPlace, listed: StoredObject, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.part")
    with part.open("wb") as file:
        for start in range(0, listed.size, _RANGE_BYTES):
            file.write(
                place.read(
                    listed.key, start=start, length=min(_RANGE_BYTES, listed.size - start)
                )
            )
    # Ranges of two versions would make a third one.
    if (now := place.stat(listed.key)) is None or now.etag != listed.etag:
        what = f"{listed.key} has changed while it was fetched"
        raise MissingObject(
            what, expected="objects that do not change after they are listed", fix=WHO_WRITES
        )
    os.replace(part, to)
