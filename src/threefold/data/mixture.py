"""Several sources read as one: position -> (source, position in source). Pure functions.

In: weights, and the number of rows of each source. Out: where to read for any positions, in any sequence, at a cost
that does not depend on the positions. What stays true of a `Mixture`:

- The sources take turns by a table of one period. Every window of `period` consecutive positions, wherever it begins,
  holds each source exactly `quotas[source]` times.
- Within a period the turns are spread out: after any number r of positions, each source has been read less than 1
  time more or less often than r * quota / period.
- Each source is read in epochs of its own, every row once in each, shuffled by a key of (seed, source, epoch).

So proportions hold by construction and not on average, and a small source begins its next epoch at its own end,
independent of the others. `draws` is the other meaning of weighting.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from threefold.data.permutation import MAX_ROWS, IntArray, Permutation, key_words
from threefold.errors import ConfigError

MAX_PERIOD = 10_000

Weight = float | str | Fraction


class Turns(NamedTuple):
    """Where to read, int64 arrays of one shape: the source's number, its epoch, and the position in that epoch."""

    source: IntArray
    epoch: IntArray
    position: IntArray


class Mixture:
    """An endless order over several sources with exact proportions."""

    def __init__(self, sizes: Mapping[str, int], weights: Mapping[str, Weight], *, seed: int = 0) -> None:
        """Compute the turns of one period (some microseconds per turn).

        Args:
            sizes: rows of each source, by name; the names and their order are part of the order.
            weights: of the same sources, > 0, in any unit. Decimals are exact: 0.7 is 7/10.
            seed: of the order of rows; each source's key is made of it and the source's name.

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
            raise IndexError(f"{int(positions.min())} is not a position")
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
        """The ingredients of the order, as plain values for a `Cursor`."""
        parts = zip(self.names, self.sizes, self.quotas, strict=True)
        described = ", ".join(f"{name} ({size} rows) x {quota}" for name, size, quota in parts)
        return {"seed": self.seed, "mixture": described}


def quotas(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Turns of each source in one period: the weights' exact ratio if its period is at most 10,000.

    Else the nearest ratio with a period of 10,000 (largest remainders, at least 1 turn each). A ConfigError for more
    than 10,000 sources.
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
    # Turns for sources that would have none are taken from the sources with the most.
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


def _check_sources(sizes: Mapping[str, int], weights: Mapping[str, Any]) -> None:
    if set(sizes) != set(weights) or not sizes:
        raise ConfigError(
            f"the mixture has weights for {', '.join(weights) or '(none)'}, "
            f"but the sources are {', '.join(sizes) or '(none)'}",
            expected="one weight for each source",
            fix="data.mixture: {" + ", ".join(f"{name}: {weights.get(name, 1)}" for name in sizes or ["NAME"]) + "}",
        )
    for name, weight in weights.items():
        if not _is_positive(weight):
            raise ConfigError(
                f"the mixture's weight of {name} is {weight}",
                expected="a positive number; to skip a source, remove it",
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
