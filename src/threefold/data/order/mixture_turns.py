"""The turns of a mixture's sources: position -> (source, how often it was read before), and back. Pure functions.

In: how many turns each source has in a period. Out: the turns of any positions, in any sequence, at a cost that does
not depend on the positions. Invariants: every window of one period, wherever it begins, holds each source exactly
as often as it has turns; and the turns are spread out.

- `TurnTable`, for a short period: one entry per turn. After any number of positions, each source was read less than 1
  time more or less often than its share of them.
- `SplitTurns`, for a period of up to 2^50: a binary tree of sources. Of P = a + b turns, the a turns of one side are
  those at which floor(t a / P) grows, computed in integers; the turns of a side are divided in the same way. As the
  tree is Huffman's, a source is at most 3.36 turns (the sum of the inverse Fibonacci numbers) from its share: a side is
  less than 1 from its share of a split, and weights grow at least like these numbers towards the root.
"""

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from threefold.arrays import Array, Int64

LONGEST_TABLE = 10_000
LONGEST_PERIOD = 2**50


class SourceTurns(Protocol):
    """Which source each position reads."""

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """(the source of each of `positions`, how often it was read before), of the same shape."""

    def before(self, position: int) -> Int64:
        """How often each source is read before a position, [sources]."""

    def position_of(self, source: int, nth: int) -> int:
        """The position at which a source is read for the nth time (from 0)."""


def turns_of(quotas: Sequence[int]) -> SourceTurns:
    """The turns of sources that have these numbers of turns in a period."""
    return TurnTable(quotas) if sum(quotas) <= LONGEST_TABLE else SplitTurns(quotas)


class TurnTable:
    """One period, turn by turn."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = np.array(quotas, np.int64)
        self._source_at = _turns_of_one_period(quotas)
        self._earlier = np.empty_like(self._source_at)
        """of each turn, how often its source was read earlier in the period."""
        for source in range(len(quotas)):
            mine = np.flatnonzero(self._source_at == source)
            self._earlier[mine] = np.arange(len(mine))

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        period, turn = np.divmod(positions, len(self._source_at))
        source = self._source_at[turn]
        return source, period * self._quotas[source] + self._earlier[turn]

    def before(self, position: int) -> Int64:
        periods, rest = divmod(position, len(self._source_at))
        return periods * self._quotas + np.bincount(
            self._source_at[:rest], minlength=len(self._quotas)
        )

    def position_of(self, source: int, nth: int) -> int:
        period, turn = divmod(nth, int(self._quotas[source]))
        return period * len(self._source_at) + int(
            np.flatnonzero(self._source_at == source)[turn]
        )


class SplitTurns:
    """A tree of splits; nodes are numbers: first the sources, then the splits, the root last."""

    def __init__(self, quotas: Sequence[int]) -> None:
        self._num_sources = len(quotas)
        self._turns = list(quotas)
        self._sides: dict[int, tuple[int, int]] = {}
        self._parent: dict[int, int] = {}
        waiting = [(turns, source) for source, turns in enumerate(quotas)]
        heapq.heapify(waiting)
        while len(waiting) > 1:
            (a, first), (b, second) = heapq.heappop(waiting), heapq.heappop(waiting)
            split = len(self._turns)
            self._sides[split], self._parent[first], self._parent[second] = (
                (first, second),
                split,
                split,
            )
            self._turns.append(a + b)
            heapq.heappush(waiting, (a + b, split))
        self._root = waiting[0][1]

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        flat = positions.reshape(-1)
        source, nth = np.empty_like(flat), np.empty_like(flat)
        nodes = [(self._root, np.arange(flat.size), flat)]
        while nodes:
            node, places, turns = nodes.pop()
            if node < self._num_sources:
                source[places], nth[places] = node, turns
            elif places.size:
                (first, second), (a, period) = self._sides[node], self._split(node)
                before = _of_first(turns, a, period)
                taken = _of_first(turns + 1, a, period) > before
                nodes.append((first, places[taken], before[taken]))
                nodes.append((second, places[~taken], (turns - before)[~taken]))
        return source.reshape(positions.shape), nth.reshape(positions.shape)

    def before(self, position: int) -> Int64:
        counts = {self._root: position}
        for node in reversed(self._sides):
            (first, second), (a, period) = self._sides[node], self._split(node)
            counts[first] = counts[node] * a // period
            counts[second] = counts[node] - counts[first]
        return np.array([counts[source] for source in range(self._num_sources)], np.int64)

    def position_of(self, source: int, nth: int) -> int:
        node, turn = source, nth
        while node != self._root:
            side, node = node, self._parent[node]
            a, period = self._split(node)
            # The first turn after which the first side has one more; the last before which the second has none more.
            first = side == self._sides[node][0]
            turn = -(-(turn + 1) * period // a) - 1 if first else turn * period // (period - a)
        return turn

    def _split(self, node: int) -> tuple[int, int]:
        """(turns of the first side, of both) in a period of a split."""
        return self._turns[self._sides[node][0]], self._turns[node]


def _of_first(turns: Int64, a: int, period: int) -> Int64:
    """floor(turns * a / period): the first side's turns among so many."""
    periods, rest = np.divmod(turns, period)
    # rest and a are below 2^50: the float is less than 1 off, and the low 64 bits of the products show which way.
    quotient = (rest * (a / period)).astype(np.int64)
    over = _low_bits(rest, a) - _low_bits(quotient, period)
    remainder = over.view(np.int64)
    return periods * a + quotient + (remainder >= period) - (remainder < 0)


def _low_bits(values: Int64, factor: int) -> Array:
    return values.astype(np.uint64) * np.uint64(factor)


def _turns_of_one_period(quotas: Sequence[int]) -> Int64:
    """source of each turn, [period]: turn j of a source is in [floor(j P / q), ceil((j + 1) P / q)).

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
