"""A file in a store whose blocks are known by their hashes: read by ranges, through a cache on this machine's disk.

Nothing of a block is used before its bytes were compared with its hash: those that come from the store, and those that
are in the cache, once in each process. So an object that was damaged, swapped, cut, removed or rewritten is named by
its key, and a block of the cache that is damaged is fetched again.
"""

import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import xxhash

from threefold.places.block_cache import BlockCache, StepsUntil
from threefold.places.faults import MissingObject, PlaceError
from threefold.places.object_store import ObjectStore, open_store
from threefold.places.snapshot import PATIENCE_S

_HASH_BYTES = 16


def _unknown(number: int) -> float:
    return math.inf


@dataclass
class KnownFile:
    """The object `key` below an address, `size` bytes, with the XXH3 of each of its blocks (128 bits).

    Belongs to the process that made it, as its connections do.
    """

    address: str
    key: str
    size: int
    block_bytes: int
    hashes: bytes
    environ: Mapping[str, str]
    open_cache: Callable[[int], BlockCache]
    """makes the cache, given the number of blocks."""

    def __post_init__(self) -> None:
        self._checked: dict[int, tuple[int, int]] = {}

    @cached_property
    def place(self) -> ObjectStore:
        """The store, which is opened when a block is fetched."""
        return open_store(self.address, self.environ)

    @cached_property
    def cache(self) -> BlockCache:
        """Its blocks on this machine."""
        return self.open_cache(self.num_blocks)

    @property
    def named(self) -> str:
        """Its address without the ending."""
        return f"{self.address}/{self.key}".removesuffix(".bin")

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) // _HASH_BYTES

    def read(self, start: int, length: int) -> bytes:
        """The bytes [start, start + length).

        Raises:
            MissingObject: the object is not what was hashed. PlaceError: the store has failed for PATIENCE_S.
        """
        stop, parts = start + length, list[bytes]()
        while start < stop:
            number, inside = divmod(start, self.block_bytes)
            take = min(stop - start, self.block_bytes - inside)
            parts.append(self._part(number, inside, take))
            start += take
        return b"".join(parts)

    def _part(self, number: int, inside: int, length: int) -> bytes:
        try:
            with self.cache.path(number).open("rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                if self._checked.get(number) == (stat.st_ino, stat.st_mtime_ns):
                    return os.pread(file.fileno(), length, inside)
                data = os.pread(file.fileno(), self.block_bytes, 0)
            if self._is_right(number, data):
                self._checked[number] = stat.st_ino, stat.st_mtime_ns
                return data[inside : inside + length]
            self.cache.drop(number)
        except OSError:  # it is not there, or its disk fails
            pass
        return self.fetch(number)[inside : inside + length]

    def has(self, number: int) -> bool:
        """Whether a block is in the cache."""
        return self.cache.path(number).exists()

    def fetch(self, number: int, steps_until: StepsUntil = _unknown) -> bytes:
        """A block, from the store if it is not in the cache; arguments and errors as there, and as for `read`."""
        data = self.cache.fetch(number, lambda: self.from_store(number), steps_until)
        # What another process has put there meanwhile was not compared yet.
        return data if self._is_right(number, data) else self.from_store(number)

    def from_store(self, number: int) -> bytes:
        """A block as it is in the store now; errors as for `read`."""
        start = number * self.block_bytes
        length = min(self.block_bytes, self.size - start)
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                data = self.place.read(self.key, start=start, length=length)
                break
            except MissingObject:
                raise
            except PlaceError:
                if time.monotonic() > until:
                    raise
                time.sleep(random.uniform(0.2, 1.0))
        if not self._is_right(number, data):
            raise MissingObject(
                f"{self.address}/{self.key} has changed since it was hashed: block {number:,} of "
                f"{self.num_blocks:,} (bytes {start:,} to {start + length - 1:,})",
                expected="the bytes as they were prepared: a hash of each block was sent with them",
                fix="restore the object, or prepare the text again: threefold data prepare --data.source SOURCE "
                "--data.tokenizer TOKENIZER --to ANOTHER_PREFIX",
            )
        return data

    def read_again(self, sampled: int) -> int | None:
        """The first of these blocks that differs from its hash, as they are in the store now."""
        for number in sorted(
            random.sample(range(self.num_blocks), min(sampled, self.num_blocks))
        ):
            try:
                self.from_store(number)
            except MissingObject:
                return number
        return None

    def _is_right(self, number: int, data: bytes) -> bool:
        at = number * _HASH_BYTES
        return xxhash.xxh3_128_digest(data) == self.hashes[at : at + _HASH_BYTES]
