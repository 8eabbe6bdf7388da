"""Several sources read as one: position -> (source, position in source), and draws by weight. Pure functions.

In: weights, and the number of rows of each source. Out: for any positions, in any sequence, where to read, at a price
that does not depend on how far along they are. What stays true of a `Mixture`:

- The sources take turns by a table of one period. Every window of `period` consecutive positions, wherever it begins,
  holds each source exactly `quotas[source]` times.
- Within a period the turns are spread out: after any number r of positions, each source has been read less than 1
  time more or less often than r * quota / period.
- Each source is read in epochs of its own, every row once in each, shuffled by a key of (seed, source, epoch).

So the proportion is kept by construction and not on average, and a small source begins its next epoch when it is
through, whatever the others do. `WeightedDraws` are the other thing that people call weighting: each position draws a
row with replacement, independently of all others, with probability proportional to the row's weight.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from threefold.data.permutation import MAX_ROWS, IntArray, Permutation, hash_counters, key_words
from threefold.errors import ConfigError

MAX_PERIOD = 10_000

Weight = float | str | Fraction

_HALF = np.uint64(32)
_LOW_HALF = np.uint64(2**32 - 1)


@dataclass(frozen=True, eq=False)
class Turns:
    """Where to read: int64 arrays of one shape."""

    source: IntArray
    """number of the source, in the order in which the sources were given."""
    epoch: IntArray
    """epoch of that source."""
    position: IntArray
    """position in that epoch's order; [0, number of rows of the source)."""


class Mixture:
    """An endless order over several sources with exact proportions."""

    def __init__(self, sizes: Mapping[str, int], weights: Mapping[str, Weight], *, seed: int = 0) -> None:
        """Work out the turns of one period (some microseconds a turn).

        Args:
            sizes: rows of each source, by name; the names and their order are part of the order.
            weights: of the same sources, > 0, in any unit. Decimals count as they are written: 0.7 is 7/10.
            seed: of the order of rows; each source gets its own key from it and its name.

        Raises:
            ConfigError: names differ, a weight is not a positive number or a source has no rows.
        """
        _check_sources(sizes, weights)
        self.names = tuple(sizes)
        self.sizes = tuple(sizes.values())
        self.seed = seed
        self.quotas = quotas([Fraction(str(weights[name])) for name in self.names])
        self.period = sum(self.quotas)
        self._source_at = _turns_of_one_period(self.quotas)
        self._read_before = _earlier_turns(self._source_at, len(self.names))
        self._first_row = np.concatenate(([0], np.cumsum(self.sizes)[:-1])).astype(np.int64)
        self._seeds = [int(key_words("source of a mixture", seed, name, count=1)[0]) for name in self.names]

    def locate(self, positions: npt.NDArray[Any]) -> Turns:
        """Source, epoch and position in that epoch for each of `positions` (integers >= 0, any shape)."""
        if positions.size and int(positions.min()) < 0:
            raise IndexError(f"{int(positions.min())} is no position")
        period, turn = np.divmod(positions.astype(np.int64), self.period)
        source = self._source_at[turn]
        nth = period * np.array(self.quotas)[source] + self._read_before[turn]
        epoch, position = np.divmod(nth, np.array(self.sizes)[source])
        return Turns(source, epoch, position)

    def at(self, positions: npt.NDArray[Any], *, shuffle: bool = True) -> tuple[IntArray, IntArray]:
        """(source, index of the row in it) for each of `positions`; with shuffle off each source is read in order."""
        turns = self.locate(positions)
        if not shuffle:
            return turns.source, turns.position
        indices = np.empty(positions.shape, dtype=np.int64)
        for source in np.unique(turns.source):
            mine = np.nonzero(turns.source == source)
            epochs, places = turns.epoch[mine], turns.position[mine]
            of_source = np.empty_like(places)
            for epoch in np.unique(epochs):
                of_epoch = epochs == epoch
                of_source[of_epoch] = self.order_of(int(source), int(epoch)).at(places[of_epoch])
            indices[mine] = of_source
        return turns.source, indices

    def rows_at(self, positions: npt.NDArray[Any], *, shuffle: bool = True) -> IntArray:
        """Row of each of `positions`, numbered over all sources: those of the first source, then of the second, ..."""
        source, index = self.at(positions, shuffle=shuffle)
        return self._first_row[source] + index

    def order_of(self, source: int, epoch: int) -> Permutation:
        """The order of one source's rows in one of its epochs."""
        return Permutation(self.sizes[source], seed=self._seeds[source], epoch=epoch)

    def fingerprint(self) -> dict[str, int | str]:
        """What the order is made from, as plain values for a `Cursor`."""
        parts = zip(self.names, self.sizes, self.quotas, strict=True)
        described = ", ".join(f"{name} ({size} rows) x {quota}" for name, size, quota in parts)
        return {"seed": self.seed, "mixture": described}


class WeightedDraws:
    """Rows drawn with replacement, each with probability weight / sum of weights; any draw in O(1).

    An alias table (Walker 1977; 16 bytes a row) and a counter-based generator: draw p of (seed, epoch) depends on
    nothing but p, so resuming and dividing the draws among ranks is only arithmetic.
    """

    def __init__(self, weights: Sequence[float] | npt.NDArray[Any], *, seed: int = 0, epoch: int = 0) -> None:
        """Build the table in O(n log n).

        Raises:
            ConfigError: no weights, one that is negative or not finite, or only zeros.
        """
        self.weights = _checked_weights(weights)
        self._keep, self._alias = _alias_table(self.weights)
        self.seed, self.epoch = seed, epoch
        self._keys = key_words("weighted draws", seed, epoch, count=2)

    def in_epoch(self, epoch: int) -> WeightedDraws:
        """The same weights in another epoch; the table is shared, not built again."""
        other = object.__new__(WeightedDraws)
        other.weights, other._keep, other._alias = self.weights, self._keep, self._alias
        other.seed, other.epoch = self.seed, epoch
        other._keys = key_words("weighted draws", self.seed, epoch, count=2)
        return other

    def at(self, positions: npt.NDArray[Any]) -> IntArray:
        """Index of the row drawn at each of `positions` (integers >= 0, any shape)."""
        if positions.size and int(positions.min()) < 0:
            raise IndexError(f"{int(positions.min())} is no position")
        counters = positions.astype(np.uint64)
        bucket = _scaled(hash_counters(counters, key=self._keys[0]), len(self.weights))
        # 53 bits: what a float64 in [0, 1) holds.
        chance = (hash_counters(counters, key=self._keys[1]) >> np.uint64(11)) * 2.0**-53
        return np.where(chance < self._keep[bucket], bucket, self._alias[bucket])

    def fingerprint(self) -> str:
        """Digest of the weights."""
        return blake2b(self.weights.astype("<f8").tobytes(), digest_size=8).hexdigest()


def quotas(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Turns of each source in one period: the weights' exact ratio where its period is at most 10,000.

    Else the nearest ratio with a period of 10,000 (largest remainders, at least 1 turn each).

    Raises:
        ConfigError: more than 10,000 sources.
    """
    if len(weights) > MAX_PERIOD:
        raise ConfigError(
            f"the mixture has {len(weights)} sources",
            expected=f"at most {MAX_PERIOD}, the turns of one period",
            fix="join sources that have the same weight into one",
        )
    unit = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * unit) for weight in weights]
    total, common = sum(whole), math.gcd(*whole)
    if total // common <= MAX_PERIOD:
        return tuple(weight // common for weight in whole)

    turns = [max(weight * MAX_PERIOD // total, 1) for weight in whole]
    by_remainder = sorted(range(len(turns)), key=lambda number: turns[number] * total - whole[number] * MAX_PERIOD)
    missing = MAX_PERIOD - sum(turns)
    for number in by_remainder[: max(missing, 0)]:
        turns[number] += 1
    # The turns given to sources that would have had none come from the sources with the most.
    richest = [(-count, number) for number, count in enumerate(turns)]
    heapq.heapify(richest)
    for _ in range(-missing):
        count, number = richest[0]
        heapq.heapreplace(richest, (count + 1, number))
        turns[number] -= 1
    return tuple(turns)


def _turns_of_one_period(quotas: Sequence[int]) -> IntArray:
    """source of each turn, [period]: turn j of a source lies in [floor(j P / q), ceil((j + 1) P / q)).

    Earliest deadline first meets all of these windows, and they keep every source's count within less than 1 of its
    share (Baruah, Cohen, Plaxton, Varvel 1996, with one processor).
    """
    period = sum(quotas)
    released: list[list[tuple[int, int]]] = [[] for _ in range(period)]
    for source, quota in enumerate(quotas):
        for turn in range(quota):
            released[turn * period // quota].append((-(-(turn + 1) * period // quota), source))
    waiting: list[tuple[int, int]] = []
    source_at = np.empty(period, dtype=np.int64)
    for turn, new in enumerate(released):
        for deadline_and_source in new:
            heapq.heappush(waiting, deadline_and_source)
        source_at[turn] = heapq.heappop(waiting)[1]
    return source_at


def _earlier_turns(source_at: IntArray, num_sources: int) -> IntArray:
    """For each turn, how often its source was read earlier in the period, [period]."""
    earlier = np.empty_like(source_at)
    for source in range(num_sources):
        mine = np.flatnonzero(source_at == source)
        earlier[mine] = np.arange(len(mine))
    return earlier


def _alias_table(weights: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], IntArray]:
    """(probability to keep a bucket, the row that it gives otherwise), [n] each.

    Light rows (p n <= 1) are filled up by heavy ones in order; a heavy row whose surplus is used up is itself filled
    up by the next. Prefix sums of what is missing and of what is left over tell who fills whom, without a loop.
    """
    n = len(weights)
    # fsum: the same bits on every machine, whatever its vector width.
    expected = weights * (n / math.fsum(weights))
    light, heavy = np.flatnonzero(expected <= 1), np.flatnonzero(expected > 1)
    keep, alias = np.ones(n), np.arange(n)
    if len(heavy) == 0:
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


def _scaled(words: npt.NDArray[np.uint64], n: int) -> IntArray:
    """floor(word * n / 2^64) for n < 2^32, in two halves so that it stays within 64 bits."""
    size = np.uint64(n)
    high, low = words >> _HALF, words & _LOW_HALF
    return ((high * size + (low * size >> _HALF)) >> _HALF).astype(np.int64)


def _check_sources(sizes: Mapping[str, int], weights: Mapping[str, Any]) -> None:
    if set(sizes) != set(weights) or not sizes:
        raise ConfigError(
            f"the mixture weighs {', '.join(weights) or '(none)'}, "
            f"and there are the sources {', '.join(sizes) or '(none)'}",
            expected="one weight for each source",
            fix="data.mixture: {" + ", ".join(f"{name}: {weights.get(name, 1)}" for name in sizes or ["NAME"]) + "}",
        )
    for name, weight in weights.items():
        if not _is_positive(weight):
            raise ConfigError(
                f"the mixture's weight of {name} is {weight}",
                expected="a positive number; a source that is not to be read is left out",
                fix=f"data.mixture: {{{name}: 1, ...}}, or remove {name}",
            )
    for name, size in sizes.items():
        if not 0 < size <= MAX_ROWS:
            raise ConfigError(
                f"the source {name} of the mixture has {size} rows",
                expected="at least one row in each source",
                fix=f"check its path and data.seq_len, or remove {name} from data.mixture",
            )


def _is_positive(weight: Any) -> bool:
    try:
        return Fraction(str(weight)) > 0
    except (ValueError, ZeroDivisionError):
        return False


def _checked_weights(weights: Sequence[float] | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
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
        fix="pass one weight for each row, 0 for rows that are never to be drawn",
    )
