"""Which positions of an epoch a step reads, and which of them one dp rank takes: pure arithmetic.

In: where a step begins (a global position in its epoch), the global batch and the dp axis. Out: positions, which a
permutation or a mixture turns into rows. Invariants: a step owns consecutive positions for any number of dp ranks,
which take turns in it, so every mesh reads the same set of samples in a step; all dp ranks make the same number of
steps; each position is read by exactly one dp rank.

If the global batch does not divide an epoch, there are four ways to end it (`Tail`):

- `carry`: a step takes the rest and continues in the next epoch; only `Order` knows such steps, samplers do not.
- `drop`: the incomplete step is left out.
- `pad`: the last step is filled up with the epoch's head, as torch's sampler does.
- `exact`: nothing is left out, nothing repeated; a dp rank with fewer samples adds rows whose labels are all ignored,
  so that it takes part in every collective.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from threefold.arrays import Int64
from threefold.errors import ConfigError
from threefold.mesh.divisibility import check_global_batch as check_global_batch

Tail = Literal["drop", "pad", "exact", "carry"]
TAILS: tuple[Tail, ...] = ("drop", "pad", "exact")
"""Those of samplers, whose epochs end."""


class StepRows(NamedTuple):
    """The rows of one dp rank in one step: `len(positions) + num_ignored` rows, the same number on every dp rank.

    `positions` are [rows] in [0, num_rows), in reading order; ignored rows occur only with the tail `exact`.
    """

    positions: Int64
    num_ignored: int


@dataclass(frozen=True)
class Steps:
    """The steps of epochs of `num_rows` positions, each read in global batches.

    A step is named by where it begins, not by its number, so that a run may resume with another global batch.
    """

    num_rows: int
    global_batch: int
    tail: Tail = "drop"

    def of_rank(self, position: int, *, dp_rank: int, dp_size: int) -> StepRows:
        """The rows of one dp rank in the step that begins at `position` of its epoch.

        Raises:
            ConfigError: global_batch is not a multiple of dp_size.
            IndexError: the epoch has no step that begins there.
        """
        check_global_batch(self.global_batch, dp_size=dp_size)
        if position < 0 or self.left(position) == 0:
            raise IndexError(
                f"no step begins at position {position} of {self.num_rows} rows with {self.global_batch} rows a step"
            )
        wanted = np.arange(
            position + dp_rank, position + self.global_batch, dp_size, dtype=np.int64
        )
        if self.tail == "exact":
            wanted = wanted[wanted < self.num_rows]
        return StepRows(
            wanted % self.num_rows, num_ignored=self.global_batch // dp_size - len(wanted)
        )

    def left(self, position: int) -> int:
        """Steps that an epoch still has from `position` on, also one that `carry` ends later; 0 at its end."""
        rows = max(self.num_rows - position, 0)
        return (
            rows // self.global_batch if self.tail == "drop" else -(-rows // self.global_batch)
        )

    @property
    def per_epoch(self) -> int:
        """Steps of an entire epoch; a ConfigError if there is none: no rows, or with `drop` no full global batch."""
        if steps := self.left(0):
            return steps
        expected = "at least one row"
        fix = "check data.source, or shorten data.seq_len: a row needs data.seq_len + 1 tokens"
        if self.num_rows:
            expected = "at least one full global batch, because the incomplete one at an epoch's end is dropped"
            fix = f"--train.global_batch {self.num_rows} or less, a shorter data.seq_len, or more data"
        raise ConfigError(
            f"the data has {self.num_rows} rows and train.global_batch is {self.global_batch}: an epoch has no step",
            expected=expected,
            fix=fix,
        )

    def begin(self, epoch: int, position: int) -> tuple[int, int]:
        """(epoch, position) where the next step begins: here, or at the next epoch's head if this one is over."""
        if self.tail == "carry" and self.per_epoch:
            return epoch + position // self.num_rows, position % self.num_rows
        # per_epoch refuses an epoch without a step.
        return (
            (epoch, position) if self.left(position) or not self.per_epoch else (epoch + 1, 0)
        )

    def after(self, epoch: int, position: int, steps: int) -> tuple[int, int]:
        """(epoch, position) of the step that follows `steps` steps from (epoch, position), without walking them."""
        if self.tail == "carry":
            return self.begin(epoch, position + steps * self.global_batch)
        epoch, position = self.begin(epoch, position)
        left = self.left(position)
        if steps < left:
            return epoch, position + steps * self.global_batch
        epochs, steps_in_epoch = divmod(steps - left, self.per_epoch)
        return epoch + 1 + epochs, steps_in_epoch * self.global_batch


def share(
    start: int,
    *,
    num_rows: int,
    dp_rank: int,
    dp_size: int,
    tail: Tail,
    multiple: int | None = None,
) -> range:
    """Positions that one dp rank reads from `start` to the end of the epoch, independent of steps.

    For a sampler: the tail is that of full rounds (one sample per dp rank); `drop` leaves out samples that do not fill
    `multiple` (a multiple of the round; default: one round). From 0 it is torch's partition. With `pad` a position
    p >= num_rows wraps to the head: p % num_rows. With `exact` the lengths differ by at most 1.
    """
    left = max(num_rows - start, 0)
    if tail == "exact":
        return range(start + dp_rank, start + left, dp_size)
    multiple = multiple or dp_size
    kept = left // multiple * multiple if tail == "drop" else -(-left // dp_size) * dp_size
    return range(start + dp_rank, start + dp_rank + kept, dp_size)


def tail_of_sampler(tail: str | None, *, drop_last: bool) -> Tail:
    """`tail`, by default torch's for `drop_last`; a ConfigError if it is unknown or contradicts drop_last."""
    if tail is None:
        return "drop" if drop_last else "pad"
    if tail not in TAILS:
        raise ConfigError(f"tail = {tail!r}", expected="drop, pad or exact", fix="tail='exact'")
    if drop_last and tail != "drop":
        raise ConfigError(
            f"drop_last = True contradicts tail = {tail!r}",
            expected="drop_last=True only with tail='drop' or without tail",
            fix=f"leave out drop_last to keep tail={tail!r}",
        )
    return tail
