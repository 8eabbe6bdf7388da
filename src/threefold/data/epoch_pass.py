"""One iteration of a sampler over an epoch, which counts the samples that the loop received."""

from __future__ import annotations

from collections.abc import Iterator


class Pass:
    """One iteration over an epoch: where it begins, this rank's positions, and how many the loop received.

    Without a loop that counts its rows, indices handed out are counted, without a step of Python for each index.
    """

    def __init__(self, epoch: int, begin: int, positions: range, *, seed: int, by_loop: bool = False) -> None:
        self.epoch, self.begin, self.positions, self.seed = epoch, begin, positions, seed
        self._by_loop = by_loop
        self._counted = 0
        self._block: Iterator[int] = iter(())

    @property
    def had(self) -> int:
        """Positions whose samples the loop received, or whose indices were handed out."""
        # A list's iterator knows how many items are left.
        ahead = 0 if self._by_loop else self._block.__length_hint__()  # type: ignore[attr-defined]
        return self._counted - ahead

    def count(self, rows: int) -> None:
        """The loop received `rows` more."""
        self._counted += rows

    def hand_out(self, indices: list[int]) -> Iterator[int]:
        """An iterator over the next block of indices."""
        if self._by_loop:
            return iter(indices)
        self._counted += len(indices)
        self._block = iter(indices)
        return self._block
