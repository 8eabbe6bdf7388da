"""The Trainer's training loader: this dp rank's share, counted, numbered, and registered with accelerate.

In: a map-style dataset, a collate function and the dp axis. Out: a DataLoader whose batches are what the collate
function made and nothing else. The number of every sample travels with it through the workers and is removed before
the batch is returned, so the audit knows what was read and the user's code never sees a number. What stays true: every
sample once per epoch; a rank without a sample in the last round reads a stand-in only if it would otherwise have no row
at all (a sharded model needs every rank), and then `rows` has a 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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


class NumberedRows(Dataset[Any]):
    """A dataset that gives (number, sample). The number ~i (negative) asks for sample i as a stand-in."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return number, self.rows[max(number, ~number)]

    def __getitems__(self, numbers: list[int]) -> list[tuple[int, Any]]:
        indices = [max(number, ~number) for number in numbers]
        many = getattr(self.rows, "__getitems__", None)
        return list(zip(numbers, many(indices) if many else [self.rows[index] for index in indices], strict=True))

    def __getattr__(self, name: str) -> Any:
        # Users and callbacks find the attributes of their own dataset.
        if name == "rows":
            raise AttributeError(name)
        return getattr(self.rows, name)


def collate_numbered(collate: Collate, samples: list[tuple[int, Any]], *, keep_stand_ins: bool = False) -> Numbered:
    """The collated samples and their numbers; stand-ins only if asked for, or one if there is no real sample."""
    kept = [sample for sample in samples if keep_stand_ins or sample[0] >= 0]
    numbers = torch.tensor([number for number, _ in kept], dtype=torch.int64)
    return Numbered(numbers, collate([row for _, row in kept or samples[:1]]))


class Taken(NamedTuple):
    """A batch that the loop got: the numbers of its samples, and a digest of its tensors (0: not computed)."""

    numbers: tuple[int, ...]
    contents: int


class TrainLoader(DistributedLoader):
    """The training loader: `distribute`'s, with the numbers of what it returned and accelerate's end of the loader.

    Attributes:
        rows: the number of real rows of each returned batch, oldest first, until somebody takes it.
        taken: what was in these batches, once `watch` was called.
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
        collate = partial(collate_numbered, collate_fn)
        # Nothing to ignore: a stand-in has no number, and the loss leaves it out.
        super().__init__(NumberedRows(dataset), sampler, lambda batch: batch, collate_fn=collate, **kept)
        self.axis = axis
        self.rows: deque[int] = deque()
        self.taken: deque[Taken] | None = None
        self.end_of_dataloader, self.remainder = False, -1
        self._accelerator = accelerator

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """As DistributedLoader's, with the batches on the accelerator's device."""
        return self._on_device(super().__iter__())

    def watch(self) -> deque[Taken]:
        """A queue of every batch that is returned from now on."""
        self.taken = deque()
        return self.taken

    @property
    def total_batch_size(self) -> int:
        """Rows of a batch over all dp ranks, as accelerate's loaders name it."""
        return cast(int, self.batch_size) * self.axis.dp_size

    def batches_left(self) -> int:
        """Batches from the loop's place to the end of the epoch."""
        return -(-self.rows_left() // cast(int, self.batch_size))

    def _on_device(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.rows.clear()
        if self.taken is not None:
            self.taken.clear()
        for numbers, batch in tracked(self, self._accelerator, batches, num_batches=self.batches_left()):
            self.rows.append(len(numbers))
            if self.taken is not None:
                # Ranks that share their rows must have the same tensors too; others have nobody to compare with.
                contents = digest_of(batch) if self.axis.sharers > 1 else 0
                self.taken.append(Taken(tuple(numbers.tolist()), contents))
            yield on_device(batch, self._accelerator)


def digest_of(batch: Any) -> int:
    """64 bits of all tensors of a dict batch, in the order of their names."""
    digest = 0
    for name in sorted(batch) if isinstance(batch, Mapping) else ():
        if isinstance(value := batch[name], Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest = xxhash.xxh3_64_intdigest(content.data, seed=digest)
    return digest


def tracked(loader: Any, accelerator: Accelerator, batches: Iterator[Any], *, num_batches: int) -> Iterator[Any]:
    """The batches; meanwhile accelerate's gradient state has the loader, which knows when its last batch is out."""
    state = accelerator.gradient_state
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
