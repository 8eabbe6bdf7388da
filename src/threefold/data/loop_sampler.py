"""The sampler of a loader: its state and its epoch are those of the loop, not of what the workers were handed.

A DataLoader asks for indices ahead of the loop. Here an iteration is a `Pass` that the loader opens, counts the loop's
rows in and closes; the indices themselves, the order and the partition are the DistributedSampler's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from threefold.data.partition import Tail, share
from threefold.data.sampler import DistributedSampler, Reading


@dataclass
class Pass:
    """One iteration over an epoch: where it begins, this rank's positions, and how many of them the loop has had."""

    epoch: int
    begin: int
    positions: range
    done: int = 0


class LoopSampler(DistributedSampler):
    """A DistributedSampler for one loader. With the tail `exact` every rank has as many positions as the others.

    There a rank without a sample in the last round has a position past the end of the epoch, which stands for the
    epoch's head; the loader marks that row as ignored.
    """

    _counted: Pass | None = None
    _opened: Pass | None = None

    def open_pass(self) -> Pass:
        """Begins an iteration: the rest of the epoch after `load_state_dict`, else the epoch from its head."""
        begin, self._begin = self._begin, 0
        self._counted = self._opened = Pass(self.epoch, begin, self._share(begin))
        return self._counted

    def close_pass(self, over: Pass) -> None:
        """The loop is through: the epoch advances (not with order="torch", as torch's does not)."""
        if self._counted is over and self.order != "torch":
            self.epoch, self._counted = over.epoch + 1, None

    def __iter__(self) -> Iterator[int]:
        """The indices of the pass just opened."""
        now = self._opened or Pass(self.epoch, self._begin, self._share(self._begin))
        self._opened = None
        return itertools.chain.from_iterable(self._blocks(Reading(now.epoch, now.begin, now.positions)))

    def set_epoch(self, epoch: int) -> None:
        """Go to the head of `epoch`; in the epoch of a state just loaded, the place stays."""
        if epoch != self.epoch:
            self._counted = None
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last row that the loop was given."""
        state = super().state_dict()
        if (now := self._counted) is not None:
            position = now.begin + now.done * self.num_replicas
            state["epoch"] = now.epoch
            state["position"] = min(position, self.epoch_size) if self.tail == "exact" else position
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._counted = None

    def share_from(self, position: int) -> range:
        """This rank's positions from a global one to the end of the epoch; of equal length on every rank."""
        return self._share(position)

    def _share(self, begin: int) -> range:
        tail: Tail = "pad" if self.tail == "exact" else self.tail
        return share(begin, num_rows=self.epoch_size, dp_rank=self.rank, dp_size=self.num_replicas, tail=tail)
