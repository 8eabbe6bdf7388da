"""Groups rows of similar length, so that little of a batch is padding: the place read at each position of an epoch.

In: the lengths of rows, and where an epoch's whole batches begin. Out: for each position, the place in the epoch's own
order (shuffled, without lengths) whose row is read there. Invariants: places are only exchanged inside windows of
WINDOW global batches of that order, so every row is still read exactly once in an epoch, near to where it would have
been; any position costs the work of its window only. Inside a window places are sorted by length and cut
into global batches, which are shuffled by their own key, so short and long ones alternate by the seed.

Rows that fill no whole batch inside the epoch (`head` of them, which a step of the epoch before takes first, and those
at its end) keep their places: which rows these are does not depend on their lengths.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from threefold.arrays import Int64
from threefold.data.order.permutation import Permutation

# Batches in a window. Places to compute for each token, of lengths spread as those of chats (log-normal, sigma 0.8), in
# batches of 16 rows and of 64: 3.3 and 5.0 with 1 batch, 1.4 and 1.7 with 10, 1.11 and 1.13 with 50, 1.03 and 1.03 with
# 200. More batches gain little, and move rows further from their place.
WINDOW = 50

LengthsOf = Callable[[Int64], Int64]
"""Tokens of rows, by their indices, [rows]."""


@dataclass(eq=False)
class Windows:
    """One epoch of `num_rows` positions.

    Attributes:
        batch: rows of a global batch.
        head: positions before the first whole batch of the epoch.
        seed: of the order of the batches inside each window.
        lengths_at: lengths of the rows at some places of the epoch's own order.
    """

    num_rows: int
    batch: int
    head: int
    seed: int
    lengths_at: LengthsOf
    _known: dict[int, Int64] = field(default_factory=dict)

    @property
    def _end(self) -> int:
        """One past the last position in a whole batch."""
        return self.head + max(0, self.num_rows - self.head) // self.batch * self.batch

    def _start(self, window: int) -> int:
        return self.head + window * WINDOW * self.batch

    def places(self, positions: Int64) -> Int64:
        """The place in the epoch's own order of each of `positions`, [n]."""
        places = positions.copy()
        inside = np.flatnonzero((positions >= self.head) & (positions < self._end))
        of = (positions[inside] - self.head) // (WINDOW * self.batch)
        for window in np.unique(of).tolist():
            mine = inside[of == window]
            places[mine] = self._places_of(window)[positions[mine] - self._start(window)]
        return places

    def position(self, place: int) -> int:
        """The position at which the row at a place of the epoch's own order is read: the inverse of `places`."""
        if not self.head <= place < self._end:
            return place
        window = (place - self.head) // (WINDOW * self.batch)
        return self._start(window) + int(np.flatnonzero(self._places_of(window) == place)[0])

    def _places_of(self, window: int) -> Int64:
        """The places of a window's positions, [positions]."""
        if window not in self._known:
            self._known.clear()  # steps come one after the other
            start = self._start(window)
            places = np.arange(
                start, min(self._end, start + WINDOW * self.batch), dtype=np.int64
            )
            by_length = places[np.argsort(self.lengths_at(places), kind="stable")].reshape(
                -1, self.batch
            )
            turns = Permutation(len(by_length), seed=self.seed, epoch=window)
            self._known[window] = by_length[turns.at(np.arange(len(by_length)))].ravel()
        return self._known[window]
