"""Draws by weight: each position draws a row with replacement, independently of all others. Pure functions.

In: a weight for each row. Out: the row of any position, in O(1). Invariants: a draw depends only on (seed, epoch,
position) and the weights, so resuming and dividing the draws among ranks is only arithmetic.
"""

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b

import numpy as np

from threefold.arrays import Array, Float64, Int64, UInt64
from threefold.data.order.permutation import hash_counters, key_words
from threefold.errors import ConfigError

_HALF = np.uint64(32)
_LOW_HALF = np.uint64(2**32 - 1)


class WeightedDraws:
    """Rows drawn with replacement, each with probability weight / sum of weights; any draw in O(1).

    An alias table (Walker 1977; 16 bytes per row) and a counter-based generator.
    """

    def __init__(
        self, weights: Sequence[float] | Array, *, seed: int = 0, epoch: int = 0
    ) -> None:
        """Build the table in O(n log n); a ConfigError without one, for only zeros, or one not finite or negative."""
        self.weights = _checked_weights(weights)
        self._keep, self._alias = _alias_table(self.weights)
        self.seed, self.epoch = seed, epoch
        self._keys = key_words("weighted draws", seed, epoch, count=2)

    def in_epoch(self, epoch: int, *, seed: int | None = None) -> "WeightedDraws":
        """The same weights in another epoch, and with another seed; the table is shared, not built again."""
        other = copy.copy(self)
        other.seed, other.epoch = self.seed if seed is None else seed, epoch
        other._keys = key_words("weighted draws", other.seed, epoch, count=2)
        return other

    def at(self, positions: Array) -> Int64:
        """Index of the row drawn at each of `positions` (integers >= 0, any shape)."""
        if positions.size and int(positions.min()) < 0:
            raise IndexError(f"{int(positions.min())} is not a position")
        counters = positions.astype(np.uint64)
        bucket = _scaled(hash_counters(counters, key=self._keys[0]), len(self.weights))
        # 53 bits: what a float64 in [0, 1) holds.
        chance = (hash_counters(counters, key=self._keys[1]) >> np.uint64(11)) * 2.0**-53
        return np.where(chance < self._keep[bucket], bucket, self._alias[bucket])

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the weights."""
        return blake2b(self.weights.astype("<f8").tobytes(), digest_size=8).hexdigest()


def _alias_table(weights: Float64) -> tuple[Float64, Int64]:
    """(probability to keep a bucket, the row that it gives otherwise), [n] each.

    Light rows (p n <= 1) are filled up by heavy ones in order; a heavy row whose surplus is used up is itself filled
    up by the next. Prefix sums of the deficits and of the surpluses give the filler of each row, without a loop.
    """
    n = len(weights)
    # fsum: the same bits on every machine, whatever its vector width.
    expected = weights * (n / math.fsum(weights))
    light, heavy = np.flatnonzero(expected <= 1), np.flatnonzero(expected > 1)
    keep, alias = np.ones(n), np.arange(n)
    # Equal weights, which rounding may take to one side of 1.
    if not (len(light) and len(heavy)):
        return keep, alias
    missing = np.cumsum(1 - expected[light])
    surplus = np.cumsum(expected[heavy] - 1)

    missing_before = np.concatenate(([0.0], missing[:-1]))[: len(light)]
    filler = np.searchsorted(surplus, missing_before, side="right")
    keep[light], alias[light] = expected[light], heavy[np.minimum(filler, len(heavy) - 1)]

    last = np.minimum(np.searchsorted(missing, surplus[:-1], side="left"), len(light) - 1)
    keep[heavy[:-1]] = np.clip(1 + surplus[:-1] - missing[last], 0, 1)
    alias[heavy[:-1]] = heavy[1:]
    return keep, alias


def _scaled(words: UInt64, n: int) -> Int64:
    """floor(word * n / 2^64) for n < 2^32, in two halves so that it stays within 64 bits."""
    size = np.uint64(n)
    high, low = words >> _HALF, words & _LOW_HALF
    return ((high * size + (low * size >> _HALF)) >> _HALF).astype(np.int64)


def _checked_weights(weights: Sequence[float] | Array) -> Float64:
    checked = np.array(weights, dtype=np.float64)
    wrong = np.argwhere(~(np.isfinite(checked) & (checked >= 0)))
    if checked.ndim == 1 and len(wrong) == 0 and checked.any():
        return checked
    if checked.ndim != 1:
        what = f"weights has the shape {checked.shape}"
    elif len(wrong):
        what = f"weights[{wrong[0, 0]}] is {checked[wrong[0, 0]]}"
    else:
        what = "all weights are 0" if checked.size else "there are no weights"
    raise ConfigError(
        what,
        expected="one finite number >= 0 for each row, and at least one above 0",
        fix="pass one weight for each row, 0 for rows that must never be drawn",
    )
