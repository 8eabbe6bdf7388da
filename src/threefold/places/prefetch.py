"""Fetches the blocks of the next steps in advance, in threads that no step waits for.

In: the files, and the blocks of each step to come: those of this rank, and those of all ranks, by which each process
decides alike what the cache keeps. A step whose blocks are not there yet waits in `wait`, where it can be seen.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from typing import Generic, NamedTuple, TypeVar

from threefold.places.known_file import KnownFile
from threefold.places.next_use import Block, NextUses, forecast

# Steps whose blocks are fetched ahead, if they fit into half of the cache. More are looked at to know what the cache
# has to keep: until it is known of every block, or that many blocks were counted.
AHEAD_STEPS, LOOK_USES = 16, 1 << 16
FORECAST_STEPS = 128
_NUM_FETCHES = 8
_REPORTED_AFTER_S = 1.0
P = TypeVar("P")


class StepBlocks(NamedTuple):
    """The blocks that a step reads: on this rank, and on all."""

    here: Collection[Block]
    all: Collection[Block]


@dataclass(frozen=True)
class FetchCounts:
    """Blocks that steps have read: all, those that were there in time, and how long steps have waited for others."""

    uses: int = 0
    in_time: int = 0
    waited_s: float = 0.0

    def __str__(self) -> str:
        share = self.in_time / self.uses if self.uses else 1.0
        return (
            f"data blocks: {self.uses:,} read, {share:.1%} there in time; steps waited "
            f"{self.waited_s:.2f} s for others"
        )


class Prefetch:
    """Runs ahead of the steps until it is closed.

    Attributes:
        counts: what the steps so far have read.
    """

    def __init__(
        self,
        files: Mapping[int, KnownFile],
        steps: Iterator[StepBlocks],
        *,
        waiting: Callable[[str], None],
    ) -> None:
        """Args: `steps`: those to come. `waiting`: receives the address that a step waits for, and "" after that."""
        self._files, self._waiting = files, waiting
        mine, everyones = tee(steps)
        self._here = (step.here for step in mine)
        self._ahead = deque[Collection[Block]]()
        self._uses = NextUses(step.all for step in everyones)
        self._capacity = sum(file.cache.num_blocks for file in files.values())
        total = sum(file.num_blocks for file in files.values())
        # If all blocks fit, none is removed.
        self._num_unkept = total if total > self._capacity else 0
        self._changed = threading.Condition()
        self._asked: set[Block] = set()
        self._kept: set[Block] = set()
        self._pending = deque[Block]()
        self._errors: dict[Block, BaseException] = {}
        self._closed = False
        self.counts = FetchCounts()
        for _ in range(_NUM_FETCHES):
            threading.Thread(target=self._fetch, name="threefold-fetch", daemon=True).start()

    def wait(self) -> None:
        """Returns when all blocks of the next step are there, and moves on to the step after it.

        Raises:
            ThreefoldError: fetching one of them has failed.
        """
        with self._changed:
            self._look_ahead()
            here = set(self._ahead.popleft()) if self._ahead else set()
            late = {block for block in here if block in self._asked}
            begun, reported = time.monotonic(), False
            while not self._errors.keys() & here and (left := late & self._asked):
                self._changed.wait(_REPORTED_AFTER_S)
                if not reported and time.monotonic() - begun >= _REPORTED_AFTER_S:
                    reported = True
                    self._waiting(self._files[min(left)[0]].address)
            if reported:
                self._waiting("")
            for block in sorted(self._errors.keys() & here):
                raise self._errors[block]
            waited_s = time.monotonic() - begun if late else 0.0
            before = self.counts
            in_time = before.in_time + len(here) - len(late)
            self.counts = FetchCounts(
                before.uses + len(here), in_time, before.waited_s + waited_s
            )
            self._uses.advance()

    def _look_ahead(self) -> None:
        """Asks for the blocks of the next steps that are not there."""
        uses = self._uses
        # Steps are counted too: those after the last epoch read nothing, without an end.
        while uses.num_steps < AHEAD_STEPS or (
            uses.num_blocks < self._num_unkept and uses.num_uses + uses.num_steps < LOOK_USES
        ):
            if not uses.look_on():
                break
        # If none is removed, the blocks of steps that were seen before are there or requested.
        begin = 0 if self._num_unkept else len(self._ahead)
        self._ahead.extend(islice(self._here, max(0, AHEAD_STEPS - len(self._ahead))))
        wanted = set[Block]()
        for number, blocks in enumerate(islice(self._ahead, begin, None)):
            wanted.update(blocks)
            if self._num_unkept and number and len(wanted) > self._capacity // 2:
                break
            for block in sorted(blocks):
                if block in self._asked or block in self._errors or block in self._kept:
                    continue
                if not self._files[block[0]].has(block[1]):
                    self._asked.add(block)
                    self._pending.append(block)
                elif not self._num_unkept:
                    self._kept.add(block)
        if self._pending:
            self._changed.notify_all()

    def _fetch(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                block = self._pending.popleft()
            try:
                self._files[block[0]].fetch(block[1], partial(self._steps_until, block[0]))
            except BaseException as error:
                self._errors[block] = error  # of the step that reads it, if there will be one
            with self._changed:
                self._asked.discard(block)
                self._changed.notify_all()

    def _steps_until(self, file: int, number: int) -> float:
        with self._changed:
            return self._uses.steps_until((file, number))

    def close(self) -> None:
        """Fetches nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Ahead(Generic[P]):
    """What steps to come read of files in stores, by the places in the order at which they begin.

    Attributes:
        counts: what the steps so far have read.
        enter: receives the phase of a step that waits.
    """

    def __init__(
        self,
        files: Mapping[int, KnownFile],
        rows_of: Callable[[P], tuple[Iterable[int], Iterable[int]]],
        blocks_of: Callable[[int], tuple[int, Iterable[int]]],
    ) -> None:
        """Takes the files.

        Args:
            files: by the numbers of the sources.
            rows_of: the rows of a step: of this rank, and of all; negative ones are none.
            blocks_of: the source of a row, and its blocks there.
        """
        self.files, self._rows_of, self._blocks_of = files, rows_of, blocks_of
        self.enter: Callable[[str], None] = lambda phase: None
        self._prefetch: Prefetch | None = None

    @property
    def counts(self) -> FetchCounts:
        return self._prefetch.counts if self._prefetch is not None else FetchCounts()

    def there(self, places: Callable[[], Iterator[P]]) -> Iterator[P]:
        """The places of the steps, each as soon as what it reads is on this machine.

        Args:
            places: makes them, as often as it is called.
        """
        self.close()
        self._prefetch = prefetch = Prefetch(
            self.files, self._steps(places()), waiting=self._say
        )
        for place in places():
            prefetch.wait()
            yield place

    def close(self) -> None:
        """Fetches nothing more."""
        if self._prefetch is not None:
            self._prefetch.close()

    def facts(self, places: Iterator[P]) -> dict[str, str | int | float]:
        """What the next steps will read on all ranks, and fetch, with what the cache of this machine has now."""
        caches = {number: file.cache for number, file in self.files.items()}
        cached = {
            (number, block) for number, cache in caches.items() for block in cache.numbers()
        }
        capacity = sum(cache.num_blocks for cache in caches.values())
        coming = forecast(
            [each.all for each in islice(self._steps(places), FORECAST_STEPS)],
            cached,
            capacity=capacity,
        )
        block_bytes = max(file.block_bytes for file in self.files.values())
        a_step = block_bytes / max(1, coming.num_steps)
        return {
            "address": ", ".join(file.address for file in self.files.values()),
            "cache_bytes": capacity * block_bytes,
            "steps": coming.num_steps,
            "bytes_a_step": round(coming.uses * a_step),
            "fetched_bytes_a_step": round(coming.fetched * a_step),
            "hit_rate": coming.hit_rate,
        }

    def _steps(self, places: Iterator[P]) -> Iterator[StepBlocks]:
        for here, everywhere in map(self._rows_of, places):
            yield StepBlocks(self._blocks(here), self._blocks(everywhere))

    def _blocks(self, rows: Iterable[int]) -> set[Block]:
        read = (self._blocks_of(row) for row in set(rows) if row >= 0)
        return {
            (number, block)
            for number, blocks in read
            if number in self.files
            for block in blocks
        }

    def _say(self, address: str) -> None:
        self.enter(f"data: waiting for {address}" if address else "data")
