"""The Trainer's training loader: this dp rank's share, counted, numbered, and registered with accelerate.

In: a map-style dataset, a collate function and the dp axis. Out: a DataLoader whose batches are what the collate
function made and nothing else. The number of every sample travels with it through the workers and is removed before
the batch is returned, so the audit knows what was read and the user's code never sees a number. Invariants: every
sample once per epoch, and batches of the same number of rows on every rank, so that a loss may gather its rows. If the
ranks do not divide an epoch, the row of its last round is collated alone, as the `rest` of the last batch; a rank
without a sample in that round has a stand-in there, which the loss leaves out.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import Dataset

from threefold.data.sampling.distribute import DistributedLoader
from threefold.data.sampling.sampler import DistributedSampler
from threefold.mesh.topology import Topology

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Axis:
    """This process on the dp axis; `sharers` neighbouring ranks (of tp or cp) read the same rows."""

    rank: int
    world_size: int
    sharers: int = 1

    @property
    def dp_size(self) -> int:
        return self.world_size // self.sharers

    @property
    def dp_rank(self) -> int:
        return self.rank // self.sharers

    @property
    def topology(self) -> Topology:
        return Topology(dp_replicate=self.dp_size, tp=self.sharers)


class Numbered(NamedTuple):
    """A batch and the numbers of its samples, int64 [rows]; none for a stand-in."""

    numbers: Tensor
    batch: Any
    rest: Any = None
    """the row of an epoch's last, incomplete round, as a separate batch"""
    real_rest: bool = False
    """`rest` is no stand-in: the last of `numbers` is its"""
    alone: bool = False
    """`batch` is of that round itself"""


class Sample(NamedTuple):
    """A sample, its number (~i, negative, for sample i as a stand-in), and whether other ranks have none with it."""

    number: int
    row: Any
    alone: bool


class NumberedRows(Dataset[Any]):
    """A dataset that gives a `Sample` for i, for ~i (a stand-in) and for i + the number of rows (alone)."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Sample:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Sample]:
        size = len(self.rows)
        indices = [max(number, ~number) % size for number in numbers]
        many = getattr(self.rows, "__getitems__", None)
        rows = many(indices) if many else [self.rows[index] for index in indices]
        return [
            Sample(index if number >= 0 else number, row, not 0 <= number < size)
            for number, index, row in zip(numbers, indices, rows, strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        # Users and callbacks find the attributes of their own dataset.
        if name == "rows":
            raise AttributeError(name)
        return getattr(self.rows, name)


def collate_numbered(
    collate: Collate, samples: list[Sample], *, keep_stand_ins: bool = False, split: bool = True
) -> Numbered:
    """The collated samples and their numbers; the one that is alone, if there are others, as the rest.

    Args:
        keep_stand_ins: their numbers too.
        split: whether there may be a rest; if not, a stand-in is left out where there are other samples.
    """
    if not split:
        samples = [
            sample._replace(alone=False) for sample in samples if sample.number >= 0
        ] or samples[:1]
    kept = [sample.number for sample in samples if keep_stand_ins or sample.number >= 0]
    numbers = torch.tensor(kept, dtype=torch.int64)
    rows = [sample.row for sample in samples]
    if len(samples) == 1 or not samples[-1].alone:
        return Numbered(numbers, collate(rows), alone=samples[-1].alone)
    return Numbered(numbers, collate(rows[:-1]), collate(rows[-1:]), samples[-1].number >= 0)


class Returned(NamedTuple):
    """A batch that the loop got: its number of real rows, the rest that belongs to it (None: no rest), see Numbered."""

    rows: int
    rest: Any
    rest_rows: int
    alone: bool


class TrainLoader(DistributedLoader):
    """The training loader: `distribute`'s, with the numbers of what it returned and accelerate's end of the loader.

    Attributes:
        returned: of each returned batch, oldest first, until it is taken.
        taken: the numbers of the samples of these batches, once `watch` was called.
        continues: the audit's record, if there is one, is of the same order.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: DistributedSampler,
        *,
        accelerator: Accelerator,
        axis: Axis,
        collate_fn: Collate,
        split: bool = True,
        **kept: Any,
    ) -> None:
        collate = partial(collate_numbered, collate_fn, split=split)
        # Nothing to ignore: a stand-in has no number, and the loss leaves it out.
        super().__init__(
            NumberedRows(dataset), sampler, lambda batch: batch, collate_fn=collate, **kept
        )
        self.axis = axis
        self.returned: deque[Returned] = deque()
        self.continues = True
        self.taken: deque[tuple[int, ...]] | None = None
        self.end_of_dataloader, self.remainder = False, -1
        self._accelerator = accelerator

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """As DistributedLoader's, with the batches on the accelerator's device."""
        return self._on_device(super().__iter__())

    def watch(self) -> deque[tuple[int, ...]]:
        """A queue of every batch that is returned from now on."""
        self.taken = deque()
        return self.taken

    @property
    def total_batch_size(self) -> int:
        """Rows of a batch over all dp ranks, as accelerate's loaders name it."""
        return cast(int, self.batch_size) * self.axis.dp_size

    def batches_left(self) -> int:
        """Batches from the loop's place to the end of the epoch."""
        return -(-self.sampler.rows_left() // cast(int, self.batch_size))

    def _on_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.returned.clear()
        if self.taken is not None:
            self.taken.clear()
        for read in tracked(self, batches, num_batches=self.batches_left()):
            numbers, rest = read.numbers, read.rest
            if rest is not None:
                rest = on_device(rest, self._accelerator)
            self.returned.append(
                Returned(len(numbers) - read.real_rest, rest, int(read.real_rest), read.alone)
            )
            if self.taken is not None:
                self.taken.append(tuple(numbers.tolist()))
            yield on_device(read.batch, self._accelerator)


def tracked(loader: Any, batches: Iterator[Any], *, num_batches: int) -> Iterator[Any]:
    """The batches; meanwhile accelerate's gradient state has the loader, which knows when its last batch is out."""
    state = loader._accelerator.gradient_state
    loader.end_of_dataloader = False
    state._add_dataloader(loader)
    try:
        for number, batch in enumerate(batches, start=1):
            loader.end_of_dataloader = number == num_batches
            yield batch
    finally:
        state._remove_dataloader(loader)


def on_device(batch: Any, accelerator: Accelerator) -> Any:
    return send_to_device(batch, accelerator.device, non_blocking=accelerator.non_blocking)
