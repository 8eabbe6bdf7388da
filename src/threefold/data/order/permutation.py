"""A shuffled order without a table: position -> index, a keyed bijection of [0, n), and its inverse.

In: n, a seed and an epoch. Out: any part of that epoch's order, in any sequence, in O(1) time and memory per index, so
the first index of 10^12 rows costs as much as the first of 1,000, and resuming is only arithmetic. Invariants:
`at` is a bijection for every n, `inverse` undoes it, and one (version, n, seed, epoch) gives one order on every
machine, every numpy release and every world size: only integer arithmetic and SHAKE-128 (for the keys) take part.

Two constructions, by n:

- n > 8,192: position p is split into (p // b, p % b) on Z_a x Z_b with a = ceil(sqrt(n)) and b = ceil(n / a), then
  eight rounds add a keyed hash of one half to the other half, modulo a and b in turn (a Feistel network with modular
  additions). a * b exceeds n by less than sqrt(n); the few results outside [0, n) walk their cycle until inside.
- n <= 8,192, too few for the halves to hide the rounds' structure: a table sorted by keyed hash, made at first use (at
  most 16 KiB and a third of a millisecond).

`ORDER_VERSION` names the algorithms of an order. States and records hold it, and another number is refused: it would
read other rows.
"""

import math
import operator
from functools import cached_property
from hashlib import shake_128
from typing import Any, TypeVar

import numpy as np

from threefold.arrays import Array, Int64, UInt16, UInt64
from threefold.errors import ConfigError, DataError

ORDER_VERSION = 2
_KEYED_AS = 1
MAX_ROWS = 2**62

IntOrArray = TypeVar("IntOrArray", int, Array)
_Words = Array  # uint32 or uint64

_TABLE_ROWS = 2**13
_ROUNDS = 8
# Size of one pass: the four buffers of a chunk (512 KiB at 32 bits) stay in a core's own cache.
_CHUNK_BYTES = 2**17

# Multipliers and shifts of the round functions: lowbias32 (Wellons) and splitmix64's finaliser (Steele, Lea, Flood).
_MIX_32 = (np.uint32(0x7FEB352D), np.uint32(15), np.uint32(0x846CA68B), np.uint32(16))
_MIX_64 = (
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(27),
    np.uint64(0x94D049BB133111EB),
    np.uint64(31),
)
_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)


class Permutation:
    """The order of n rows in one epoch: a bijection of [0, n), computed on demand."""

    def __init__(self, n: int, *, seed: int = 0, epoch: int = 0) -> None:
        """Derive the keys (some microseconds, no table).

        Args:
            n: number of rows, 1 to 2^62.
            seed, epoch: integers >= 0 of any size; every pair has its own order.

        Raises:
            ConfigError: n, seed or epoch is out of range.
        """
        self.n = _checked(n, "the number of rows", low=1, high=MAX_ROWS)
        self.seed = _checked(seed, "the seed of the order", low=0)
        self.epoch = _checked(epoch, "the epoch of the order", low=0)

        self._word: type[np.uint32] | type[np.uint64] = (
            np.uint32 if self.n <= 2**32 else np.uint64
        )
        rows = math.isqrt(self.n - 1) + 1
        self._sides = (self._word(rows), self._word(-(-self.n // rows)))
        keys = key_words("permutation", _KEYED_AS, self.n, self.seed, self.epoch, count=_ROUNDS)
        self._table_key = keys[0]
        self._round_keys = (keys >> np.uint64(64 - 8 * self._word().itemsize)).astype(
            self._word
        )

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Permutation({self.n}, seed={self.seed}, epoch={self.epoch})"

    def at(self, positions: IntOrArray) -> IntOrArray:
        """Indices of the rows at `positions`.

        Args:
            positions: an int, or an integer array of any shape; each in [0, n).

        Returns:
            an int for an int, else int64 of the same shape; at least 30 million a second in blocks of 64k.

        Raises:
            IndexError: a position is outside [0, n).
            TypeError: positions are not integers.
        """
        return self._map(positions, inverse=False)

    def inverse(self, indices: IntOrArray) -> IntOrArray:
        """Positions at which the rows `indices` are read: `inverse(at(p)) == p`. Shapes and errors as for `at`."""
        return self._map(indices, inverse=True)

    def _map(self, values: IntOrArray, *, inverse: bool) -> IntOrArray:
        if not isinstance(values, np.ndarray):
            return int(self._map_flat(np.array([operator.index(values)]), inverse=inverse)[0])
        if values.dtype.kind not in "iu":
            raise TypeError(f"positions and indices are integers, not {values.dtype}")
        return self._map_flat(values.reshape(-1), inverse=inverse).reshape(values.shape)

    def _map_flat(self, flat: Array, *, inverse: bool) -> Int64:
        if flat.size:
            lowest, highest = int(flat.min()), int(flat.max())
            if lowest < 0 or highest >= self.n:
                raise IndexError(
                    f"{lowest if lowest < 0 else highest} is outside [0, {self.n})"
                )
        if self.n > _TABLE_ROWS:
            return self._walk(flat, inverse=inverse)
        return (self._inverse_table if inverse else self._table)[flat].astype(np.int64)

    @cached_property
    def _table(self) -> UInt16:
        """index by position: rows sorted by 48 bits of their hash, the row in the 16 bits below so that no two tie."""
        rows = np.arange(self.n, dtype=np.uint64)
        hashed = hash_counters(rows, key=self._table_key)
        hashed &= np.uint64(2**64 - 2**16)
        hashed |= rows
        hashed.sort()
        return hashed.astype(np.uint16)

    @cached_property
    def _inverse_table(self) -> UInt16:
        return np.argsort(self._table).astype(np.uint16)

    def _walk(self, flat: Array, *, inverse: bool) -> Int64:
        """Apply the rounds chunk by chunk; results outside [0, n) are mapped again until they are inside."""
        mapped = np.empty(flat.size, dtype=np.int64)
        last = self._word(self.n - 1)
        chunk = _CHUNK_BYTES // self._word().itemsize
        for start in range(0, flat.size, chunk):
            values = flat[start : start + chunk].astype(self._word)
            self._rounds(values, inverse=inverse)
            # A reduction is cheaper than a mask, and most chunks have nothing outside.
            while values.max() > last:
                outside = np.flatnonzero(values > last)
                again = values[outside]
                self._rounds(again, inverse=inverse)
                values[outside] = again
            mapped[start : start + chunk] = values
        return mapped

    def _rounds(self, values: _Words, *, inverse: bool) -> None:
        """Replace `values`, each in [0, a * b), with their images under the Feistel network (or its inverse)."""
        scratch, hashed = np.empty_like(values), np.empty_like(values)
        width = self._sides[1]
        high = np.floor_divide(values, width)
        np.multiply(high, width, out=scratch)
        low = np.subtract(values, scratch, out=values)

        halves = (high, low)
        for number in reversed(range(_ROUNDS)) if inverse else range(_ROUNDS):
            target, source = halves[number % 2], halves[1 - number % 2]
            side = self._sides[number % 2]
            _hash_modulo(
                source, side, key=self._round_keys[number], out=hashed, scratch=scratch
            )
            # Unsigned: the wrong one of (sum, sum - side) or (difference, difference + side) is the larger.
            forth, back = (np.subtract, np.add) if inverse else (np.add, np.subtract)
            forth(target, hashed, out=target)
            back(target, side, out=scratch)
            np.minimum(target, scratch, out=target)

        np.multiply(high, width, out=high)
        np.add(high, low, out=values)


def check_order_version(version: int) -> None:
    """Refuse an order version that this release cannot reproduce (DataError)."""
    if version != ORDER_VERSION:
        raise DataError(
            f"this release does not support order version {version}",
            expected=f"version {ORDER_VERSION}; another algorithm reads different samples",
            fix="install the release of threefold that began the run, or start a new run",
        )


def key_words(purpose: str, *parts: int | str, count: int) -> UInt64:
    """`count` 64-bit keys for a purpose and its parts (any integers and texts), the same on every machine.

    SHAKE-128 of the parts' repr: no two lists of parts share a text, so no two (seed, epoch) share keys.
    """
    text = repr((purpose, *parts)).encode()
    return np.frombuffer(shake_128(text).digest(8 * count), dtype="<u8").astype(np.uint64)


def seed_of(purpose: str, *parts: int | str) -> int:
    """A seed of 63 bits for a purpose and its parts, the same on every machine and in every Python."""
    return int(key_words(purpose, *parts, count=1)[0] >> np.uint64(1))


def hash_counters(counters: UInt64, *, key: np.uint64) -> UInt64:
    """A new array of 64 random bits per counter: splitmix64 started at `key`, read at any place."""
    hashed = np.multiply(counters, _GOLDEN_64)
    hashed += key
    scratch = np.right_shift(hashed, np.uint64(30))
    hashed ^= scratch
    _mix(hashed, _MIX_64, scratch=scratch)
    return hashed


def _hash_modulo(
    source: _Words, modulus: Any, *, key: Any, out: _Words, scratch: _Words
) -> None:
    """out = hash(source, key) modulo `modulus`, which is far below the word's range: its bias is negligible."""
    np.add(source, key, out=out)
    _mix(out, _MIX_32 if out.dtype == np.uint32 else _MIX_64, scratch=scratch)
    # numpy divides by a scalar with vector instructions; its remainder does not.
    np.floor_divide(out, modulus, out=scratch)
    np.multiply(scratch, modulus, out=scratch)
    np.subtract(out, scratch, out=out)


def _mix(words: _Words, constants: tuple[Any, Any, Any, Any], *, scratch: _Words) -> None:
    """Two multiplications, each followed by a shift that brings the well-mixed high bits down; in place."""
    first, first_shift, second, second_shift = constants
    np.multiply(words, first, out=words)
    np.right_shift(words, first_shift, out=scratch)
    np.bitwise_xor(words, scratch, out=words)
    np.multiply(words, second, out=words)
    np.right_shift(words, second_shift, out=scratch)
    np.bitwise_xor(words, scratch, out=words)


def _checked(value: int, what: str, *, low: int, high: int | None = None) -> int:
    value = operator.index(value)
    if value < low or (high is not None and value > high):
        limits = (
            f"an integer from {low} to {high}" if high is not None else f"an integer >= {low}"
        )
        raise ConfigError(f"{what} is {value}", expected=limits, fix=f"pass {limits}")
    return value
