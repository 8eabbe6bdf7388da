"""The loaders of the Trainer: this dp rank's share, counted, numbered, and known to accelerate's bookkeeping.

In: a map-style dataset, a collate function and the dp axis. Out: DataLoaders whose batches are what the collate
function made and nothing else. The number of every sample travels with it through the workers and is taken off again
before the batch is given out, so the audit knows what was read and the user's code never sees a number. What stays
true: every sample once an epoch; a rank that lacks a sample in the last round reads one as a stand-in only where it
would have no row at all (a model that is sharded needs every rank), and then `rows` says 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import Dataset

from threefold.data.distribute import DistributedLoader
from threefold.data.sampler import DistributedSampler
from threefold.mesh.topology import Topology

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Axis:
    """This process on the dp axis; `sharers` neighbouring ranks (tensor parallelism) read the same rows."""

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


class NumberedRows(Dataset[Any]):
    """A dataset that gives (number, sample). The number ~i (negative) asks for sample i as a stand-in."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, self.rows[_index(number)]

    def __getitems__(self, numbers: list[int]) -> list[tuple[int, Any]]:
        indices = [_index(number) for number in numbers]
        many = getattr(self.rows, "__getitems__", None)
        return list(zip(numbers, many(indices) if many else [self.rows[index] for index in indices], strict=True))

    def __getattr__(self, name: str) -> Any:
        # What users and callbacks ask of a loader's dataset is answered by theirs.
        if name == "rows":
            raise AttributeError(name)
        return getattr(self.rows, name)


def _index(number: int) -> int:
    return number if number >= 0 else ~number


class NumberedCollate:
    """Collates samples without their numbers, and without stand-ins wherever a true sample is there."""

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, samples: list[tuple[int, Any]]) -> Numbered:
        numbers = [number for number, _ in samples if number >= 0]
        rows = [row for number, row in samples if number >= 0] or [samples[0][1]]
        return Numbered(torch.tensor(numbers, dtype=torch.int64), self._collate(rows))


class Taken(NamedTuple):
    """A batch that was given out: the numbers of its samples, and a digest of its tensors (0: none was asked for)."""

    numbers: tuple[int, ...]
    contents: int


class TrainLoader(DistributedLoader):
    """The training loader: `distribute`'s, with the numbers of what it gave out and accelerate's end of the loader.

    `rows` holds for each batch given out how many true rows it has, oldest first, until it is taken; `taken`, where
    somebody watches, what was in it.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: DistributedSampler,
        *,
        accelerator: Accelerator,
        axis: Axis,
        collate_fn: Collate,
        **kept: Any,
    ) -> None:
        super().__init__(
            NumberedRows(dataset), sampler, _as_it_is, collate_fn=NumberedCollate(collate_fn), drop_last=False, **kept
        )
        self.axis = axis
        self.rows: deque[int] = deque()
        self.taken: deque[Taken] | None = None
        self.end_of_dataloader, self.remainder = False, -1
        self._accelerator = accelerator

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """As of DistributedLoader, the batches on the accelerator's device."""
        return self._given_out(super().__iter__())

    def watch(self) -> deque[Taken]:
        """From now on everything given out is told here."""
        self.taken = deque()
        return self.taken

    @property
    def total_batch_size(self) -> int:
        """Rows of a batch over all dp ranks, as accelerate's loaders name it."""
        return cast(int, self.batch_size) * self.axis.dp_size

    def batches_left(self) -> int:
        """Batches from where the loop is to the end of the epoch."""
        return -(-self.rows_left() // cast(int, self.batch_size))

    def _given_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        left = self.batches_left()
        self.rows.clear()
        if self.taken is not None:
            self.taken.clear()
        with_end = Tracked(self, self._accelerator)
        for number, (numbers, batch) in enumerate(with_end.over(batches), start=1):
            self.end_of_dataloader = number == left
            self.rows.append(len(numbers))
            if self.taken is not None:
                # Ranks that share their rows must have the same tensors too; others have nobody to compare with.
                contents = digest_of(batch) if self.axis.sharers > 1 else 0
                self.taken.append(Taken(tuple(numbers.tolist()), contents))
            yield with_end.placed(batch)


def digest_of(batch: Any) -> int:
    """64 bits of all tensors of a dict batch, in the order of their names."""
    digest = 0
    for name in sorted(batch) if isinstance(batch, Mapping) else ():
        if isinstance(value := batch[name], Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest = xxhash.xxh3_64_intdigest(content.data, seed=digest)
    return digest


def _as_it_is(batch: Any) -> Any:
    return batch


class Tracked:
    """What accelerate's own loaders do besides reading: tell its gradient state, and bring batches to the device."""

    def __init__(self, loader: Any, accelerator: Accelerator) -> None:
        self._loader, self._accelerator = loader, accelerator

    def over(self, batches: Iterator[Any]) -> Iterator[Any]:
        state = self._accelerator.gradient_state
        self._loader.end_of_dataloader = False
        state._add_dataloader(self._loader)
        try:
            yield from batches
        finally:
            state._remove_dataloader(self._loader)

    def placed(self, batch: Any) -> Any:
        return send_to_device(batch, self._accelerator.device, non_blocking=self._accelerator.non_blocking)
