"""The small files of a token store at an address, on this machine: all but its tokens.

They are compared with the store's list of hashes, and with its listing, each time it is opened: damaged, truncated,
swapped or missing files are named by key, and a file that is already here is not fetched again.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import xxhash

from threefold.errors import DataError, ThreefoldError
from threefold.places.block_cache import open_cache, writing
from threefold.places.faults import WHO_WRITES, MissingObject
from threefold.places.known_file import KnownFile
from threefold.places.object_store import ObjectStore, open_store
from threefold.places.place import StoredObject
from threefold.places.upload import CLAIM

_TOKENS, _INDEX, _LIST = ".bin", ".idx", ".blocks"
_RANGE_BYTES = 16 * 2**20
_PREPARE = (
    "threefold data prepare --data.source FILES --data.tokenizer TOKENIZER --to {address}"
)


class HashedBlocks(Protocol):
    """The contents of a list of hashes: (bytes, time, hashes of the blocks) of each file, by its suffix."""

    @property
    def files(self) -> Mapping[str, tuple[int, int, bytes]]: ...

    @property
    def block_bytes(self) -> int: ...


def fetched(
    address: str,
    environ: Mapping[str, str],
    cache: Path,
    parse: Callable[[bytes, Path], HashedBlocks],
) -> Path | None:
    """The prefix of the files on this machine; None if the address has no token store.

    Args:
        cache: the folder for all stores.
        parse: reads a list of hashes, given its name.

    Raises:
        DataError: no store is whole, or there are several. MissingObject: an object does not match its hash.
            ConfigError, PlaceError: the store cannot be used, or does not answer.
    """
    place = open_store(address, environ)
    objects = {each.key: each for each in place.list() if "/" not in each.key}
    if (name := _name(place, objects)) is None:
        return None
    if (content := place.get(name + _LIST)) is None:
        raise _damaged(place, name + _LIST, "is gone")
    try:
        blocks = parse(content[0], Path(name + _LIST))
    except ThreefoldError as error:
        raise DataError(
            f"{place.url}: {error.problems[0].what}",
            expected=error.problems[0].expected,
            fix=WHO_WRITES,
        ) from None
    for suffix, (size, _, _) in blocks.files.items():
        _check_size(place, objects.get(name + suffix), name + suffix, size)
    folder = cache / xxhash.xxh3_128_hexdigest(str(place.url).encode() + content[0])
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, (size, _, hashes) in blocks.files.items():
            if suffix != _TOKENS:
                _fetch(place, name + suffix, size, hashes, blocks.block_bytes, folder)
        _write(folder / (name + _LIST), content[0])
        _write(folder / f"{name}.stored", json.dumps({"address": str(place.url)}).encode())
    return folder / name


def tokens_at(prefix: Path, blocks: HashedBlocks, environ: Mapping[str, str]) -> KnownFile:
    """The tokens of a store whose other files `fetched` has put at a prefix."""
    where = json.loads(prefix.with_name(f"{prefix.name}.stored").read_bytes())
    folder, (size, _, hashes) = (
        prefix.with_name(f"{prefix.name}.blocks.d"),
        blocks.files[_TOKENS],
    )
    cache = partial(open_cache, folder, block_bytes=blocks.block_bytes)
    return KnownFile(
        where["address"],
        prefix.name + _TOKENS,
        size,
        blocks.block_bytes,
        hashes,
        environ,
        cache,
    )


def _name(place: ObjectStore, objects: Mapping[str, StoredObject]) -> str | None:
    endings = (_TOKENS, _INDEX, _LIST)
    names = sorted(
        {
            key.removesuffix(ending)
            for key in objects
            for ending in endings
            if key.endswith(ending)
        }
    )
    fix = _PREPARE.format(address=place.url)
    if CLAIM in objects:
        what = f"{place.url} is being written, or its writer was killed"
        raise DataError(
            what,
            expected="a complete store",
            fix=f"{fix}   (continues if it was killed; wait if it still writes)",
        )
    if not names:
        return None
    if len(names) > 1:
        what = f"{place.url} holds {len(names)} token stores"
        raise DataError(
            what,
            expected=f"one: NAME{_TOKENS}, NAME{_INDEX}, NAME.json and NAME{_LIST}",
            fix=fix + "-2",
        )
    if names[0] + _LIST not in objects:
        what = f"{place.url}/{names[0]}{_LIST} is not there"
        expected = "the hashes of the store's blocks, with which each one is compared before it is used"
        raise MissingObject(
            what, expected=expected, fix=f"{fix}-2   (or copy it there, if the store has one)"
        )
    return names[0]


def _check_size(place: ObjectStore, stored: StoredObject | None, key: str, size: int) -> None:
    if stored is None:
        raise _damaged(place, key, "is gone")
    if stored.size != size:
        how = "was cut" if stored.size < size else "is longer than it was"
        raise _damaged(place, key, f"{how}, to {stored.size:,} bytes instead of {size:,}")


def _damaged(place: ObjectStore, key: str, how: str) -> MissingObject:
    return MissingObject(
        f"{place.url}/{key} {how}", expected="the object as it was written", fix=WHO_WRITES
    )


def _fetch(
    place: ObjectStore, key: str, size: int, hashes: bytes, block_bytes: int, folder: Path
) -> None:
    """Fetches a file, unless it is here as it was hashed."""
    if (to := folder / key).exists() and _wrong_block(
        to.read_bytes(), hashes, block_bytes
    ) is None:
        return
    ranges = (
        (start, min(_RANGE_BYTES, size - start)) for start in range(0, size, _RANGE_BYTES)
    )
    data = b"".join(place.read(key, start=start, length=length) for start, length in ranges)
    if (wrong := _wrong_block(data, hashes, block_bytes)) is not None:
        raise _damaged(place, key, f"has changed since it was hashed: block {wrong:,}")
    _write(to, data)


def _wrong_block(data: bytes, hashes: bytes, block_bytes: int) -> int | None:
    digests = [
        xxhash.xxh3_128_digest(data[at : at + block_bytes])
        for at in range(0, len(data), block_bytes)
    ]
    expected = [hashes[at : at + 16] for at in range(0, len(hashes), 16)]
    number = max(len(digests), len(expected))
    pairs = zip(digests, expected, strict=False)
    return next(
        (i for i, (one, other) in enumerate(pairs) if one != other),
        None if digests == expected else number,
    )


def _write(to: Path, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    part = to.with_name(f".{to.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        part.write_bytes(data)
        os.replace(part, to)
    finally:
        part.unlink(missing_ok=True)
