"""Which block of a cache has the farthest next use, and the hit rate: Belady's rule, by arithmetic.

The order of a run determines which blocks each step reads, long in advance. So nothing is guessed from the past: the
blocks needed soonest are kept, which no other rule beats. No store and no disk: numbers only.
"""

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

Block = tuple[int, int]
"""The number of a file, and that of a block in it."""


class NextUses:
    """The blocks of the steps ahead. `steps` gives those of each step, in order; it may end.

    Attributes:
        num_uses: blocks of the steps that were looked at, summed.
    """

    def __init__(self, steps: Iterator[Collection[Block]]) -> None:
        self._steps = steps
        self._ahead = deque[set[Block]]()
        self._uses: dict[Block, deque[int]] = {}
        self._done = self.num_uses = 0

    def look_on(self) -> bool:
        """Looks one step farther ahead; False if there is none."""
        if (blocks := next(self._steps, None)) is None:
            return False
        for block in set(blocks):
            self._uses.setdefault(block, deque()).append(self._done + len(self._ahead))
        self._ahead.append(set(blocks))
        self.num_uses += len(self._ahead[-1])
        return True

    def advance(self) -> None:
        """The step that was read is done."""
        for block in self._ahead.popleft() if self._ahead else ():
            self.num_uses -= 1
            uses = self._uses[block]
            uses.popleft()
            if not uses:
                del self._uses[block]
        self._done += 1

    def steps_until(self, block: Block) -> float:
        """Steps until a block is read: 0 in the one that is read now, infinite in none that was looked at."""
        uses = self._uses.get(block)
        return uses[0] - self._done if uses else math.inf

    @property
    def num_steps(self) -> int:
        """Steps that were looked at, the one that is read now among them."""
        return len(self._ahead)

    @property
    def num_blocks(self) -> int:
        """Different blocks in the steps that were looked at."""
        return len(self._uses)


@dataclass(frozen=True)
class Forecast:
    """The reads of some coming steps: blocks of each step, summed, and those that have to be fetched."""

    num_steps: int
    uses: int
    fetched: int

    @property
    def hit_rate(self) -> float:
        """The share of blocks that are in the cache when a step comes to them."""
        return 1 - self.fetched / self.uses if self.uses else 1.0


def forecast(
    steps: Sequence[Collection[Block]], cached: Iterable[Block], *, capacity: int
) -> Forecast:
    """What a cache of `capacity` blocks, which holds `cached`, will have to fetch for some steps."""
    uses: dict[Block, deque[float]] = {}
    for number, blocks in enumerate(steps):
        for block in set(blocks):
            uses.setdefault(block, deque()).append(number)

    def next_use(block: Block) -> float:
        return uses[block][0] if uses.get(block) else math.inf

    held = set(cached)
    # The block that is used last comes first. An entry is old if the block was used since.
    last = [(-next_use(block), block) for block in held]
    heapq.heapify(last)
    num_uses = fetched = 0
    for blocks in steps:
        for block in sorted(set(blocks)):
            num_uses += 1
            fetched += block not in held
            while block not in held and len(held) >= capacity:
                when, farthest = heapq.heappop(last)
                if farthest in held and -when == next_use(farthest):
                    held.remove(farthest)
            held.add(block)
            uses[block].popleft()
            heapq.heappush(last, (-next_use(block), block))
    return Forecast(len(steps), num_uses, fetched)
