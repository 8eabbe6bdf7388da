"""Several sources read as one: position -> (source, position in source). Pure functions.

In: weights, and the number of rows of each source. Out: where to read for any positions, in any sequence, at a cost
that does not depend on the positions. Invariants of a `Mixture`:

- The sources take turns (`mixture_turns`). Every window of `period` consecutive positions, wherever it begins, holds
  each source exactly `quotas[source]` times.
- The quotas are in the ratio of the weights, or in one that keeps each weight to 1 part in 10^9; weights that cannot be
  kept are refused.
- Each source has its own epochs, with every row once in each, shuffled by a key of (seed, source, epoch).

So proportions hold by construction and not on average, and a small source begins its next epoch at its own end,
independent of the others. `draws` implements the other meaning of weights.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from threefold.arrays import Array, Int64
from threefold.data.order.mixture_turns import LONGEST_PERIOD, LONGEST_TABLE, turns_of
from threefold.data.order.permutation import MAX_ROWS, Permutation, key_words
from threefold.errors import ConfigError

MAX_PERIOD = LONGEST_TABLE
_KEPT_TO = 10**9

Weight = float | str | Fraction


class Turns(NamedTuple):
    """Where to read, int64 arrays of one shape: the source's number, its epoch, and the position in that epoch."""

    source: Int64
    epoch: Int64
    position: Int64


class Mixture:
    """An endless order over several sources with exact proportions."""

    def __init__(
        self, sizes: Mapping[str, int], weights: Mapping[str, Weight], *, seed: int = 0
    ) -> None:
        """Compute the turns (some microseconds for each of a table's).

        Args:
            sizes: rows of each source, by name; the names and their order are part of the order.
            weights: of the same sources, > 0, in any unit. Decimals are exact: 0.7 is 7/10.
            seed: of the order of rows; each source's key is made of it and the source's name.

        Raises:
            ConfigError: names differ, a weight is not a positive number or cannot be kept, or a source has no rows.
        """
        _check_sources(sizes, weights)
        self.names = tuple(sizes)
        self.sizes = tuple(sizes.values())
        self.seed = seed
        self.weights = {name: Fraction(str(weights[name])) for name in self.names}
        self.quotas = quotas([*self.weights.values()])
        self.period = sum(self.quotas)
        _check_kept(self.weights, self.quotas)
        self._turns = turns_of(self.quotas)
        self._first_row = np.concatenate(([0], np.cumsum(self.sizes)[:-1])).astype(np.int64)
        self._seeds = [
            int(key_words("source of a mixture", seed, name, count=1)[0]) for name in self.names
        ]

    def locate(self, positions: Array) -> Turns:
        """Source, epoch and position in that epoch for each of `positions` (integers >= 0, any shape)."""
        if positions.size and int(positions.min()) < 0:
            raise IndexError(f"{int(positions.min())} is not a position")
        source, nth = self._turns.locate(positions.astype(np.int64))
        epoch, position = np.divmod(nth, np.array(self.sizes)[source])
        return Turns(source, epoch, position)

    def at(self, positions: Array, *, shuffle: bool = True) -> tuple[Int64, Int64]:
        """(source, index of the row in it) for each of `positions`; with shuffle off each source is read in order."""
        turns = self.locate(positions)
        if not shuffle:
            return turns.source, turns.position
        indices = np.empty(positions.shape, dtype=np.int64)
        for source in np.unique(turns.source):
            mine = np.nonzero(turns.source == source)
            epochs, places = turns.epoch[mine], turns.position[mine]
            of_source = np.empty_like(places)
            by_epoch = np.argsort(epochs, kind="stable")
            for of_epoch in np.split(by_epoch, np.flatnonzero(np.diff(epochs[by_epoch])) + 1):
                of_source[of_epoch] = self.order_of(int(source), int(epochs[of_epoch[0]])).at(
                    places[of_epoch]
                )
            indices[mine] = of_source
        return turns.source, indices

    def rows_at(self, positions: Array, *, shuffle: bool = True) -> Int64:
        """Row of each of `positions`, numbered over all sources: those of the first source, then of the second, ..."""
        source, index = self.at(positions, shuffle=shuffle)
        return self._first_row[source] + index

    def order_of(self, source: int, epoch: int) -> Permutation:
        """The order of one source's rows in one of its epochs."""
        return Permutation(self.sizes[source], seed=self._seeds[source], epoch=epoch)

    def read_before(self, position: int) -> Int64:
        """How often each source is read before a position, [sources]."""
        return self._turns.before(position)

    def position_of(self, source: int, epoch: int, place: int) -> int:
        """The position at which a source's row at `place` in one of its epochs is read."""
        return self._turns.position_of(source, epoch * self.sizes[source] + place)

    @property
    def keeps_exactly(self) -> bool:
        """The quotas are in the very ratio of the weights."""
        total = sum(self.weights.values())
        pairs = zip(self.weights.values(), self.quotas, strict=True)
        return all(weight * self.period == quota * total for weight, quota in pairs)

    @property
    def shares(self) -> str:
        """The shares of the rows that are asked for and kept, as text."""
        total = sum(self.weights.values())
        asked = {name: weight / total for name, weight in self.weights.items()}
        kept = {
            name: Fraction(quota, self.period)
            for name, quota in zip(self.names, self.quotas, strict=True)
        }
        return f"asked {_percent(asked)}; kept {'exactly' if self.keeps_exactly else _percent(kept)}"

    def fingerprint(self) -> dict[str, int | str]:
        """The ingredients of the order, as plain values for a `Cursor`."""
        parts = zip(self.names, self.sizes, self.quotas, strict=True)
        described = ", ".join(f"{name} ({size} rows) x {quota}" for name, size, quota in parts)
        return {"seed": self.seed, "mixture": described}


def quotas(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Turns of each source in one period: the weights' exact ratio if its period is at most 2^50, else a near one.

    A ConfigError for more than 10,000 sources.
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
    if total // common <= LONGEST_PERIOD:
        return tuple(weight // common for weight in whole)
    rounded = [
        (2 * weight * (LONGEST_PERIOD - len(whole)) + total) // (2 * total) for weight in whole
    ]
    common = math.gcd(*rounded)
    return tuple(turns // common for turns in rounded)


def _check_kept(weights: Mapping[str, Fraction], turns: Sequence[int]) -> None:
    """Refuse weights of which the turns keep less than 1 part in 10^9, by name (ConfigError)."""
    total, period = sum(weights.values()), sum(turns)
    lost = {
        name: weight / total
        for (name, weight), count in zip(weights.items(), turns, strict=True)
        if _KEPT_TO * abs(count * total - weight * period) > weight * period
    }
    if lost:
        near = ", ".join(
            f"{name}: {max(count, 1)}" for name, count in zip(weights, turns, strict=True)
        )
        raise ConfigError(
            f"the mixture cannot keep the weight of {', '.join(lost)}: {_percent(lost)} of the rows",
            expected="weights in a ratio of whole numbers whose sum is at most 2^50, or near enough to one that each "
            "is kept to 1 part in 10^9",
            fix=f"use the weights {near}, or leave out the smallest",
        )


def _percent(shares: Mapping[str, Fraction]) -> str:
    return ", ".join(f"{name} {float(100 * share):.9g} %" for name, share in shares.items())


def _check_sources(sizes: Mapping[str, int], weights: Mapping[str, Any]) -> None:
    if set(sizes) != set(weights) or not sizes:
        raise ConfigError(
            f"the mixture has weights for {', '.join(weights) or '(none)'}, "
            f"but the sources are {', '.join(sizes) or '(none)'}",
            expected="one weight for each source",
            fix="data.mixture: {"
            + ", ".join(f"{name}: {weights.get(name, 1)}" for name in sizes or ["NAME"])
            + "}",
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
