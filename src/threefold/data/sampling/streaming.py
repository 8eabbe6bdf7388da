"""Batches of one dp rank from a stream of the `datasets` library or of torch, for data without indices.

In: a `datasets.IterableDataset`. Out: a loader over this dp rank's part of it, split by datasets' own
`split_dataset_by_node`, and a state. A stream has no positions, so it has fewer guarantees than `threefold.distribute`:

- Kept: every sample is read once per epoch, by one dp rank, with any number of shards and workers: entire shards go to
  ranks if the number of shards is a multiple of the dp ranks, else each rank reads everything and keeps its share.
- Kept: a resume with the same ranks, workers and batch size begins at the next batch. `replay` reads the epoch's
  earlier batches again and discards them: exact for every stream that gives the same rows in each reading. `seek`
  (needs torchdata) asks the stream to begin there: immediate, exact without a shuffle buffer; with one, the rows that
  were in the buffer are lost, some may come twice, and datasets 5.2 cannot do it with several workers.
- Not kept: a resume with another number of ranks, workers or rows; it is refused. Nor is the global batch the same set
  of samples on another mesh.
- Not kept: equal counts. Ranks may differ by the rows of a shard, so a loop with collectives takes a number of steps
  from `endless`, where each rank begins its next epoch at its own end, and not an epoch.
- Not kept: the audit, which needs indices.

A torch `IterableDataset` (a WebDataset is one) cannot be split: every rank reads all of it, with one worker at most,
and keeps every n-th row. So all ranks have equally many batches and one state; rows that do not fill the last round of
the dp ranks are left out. The first row is compared over all ranks; of the others, by what they shuffle.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
import torch.utils.data
from datasets import IterableDataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from threefold.data.order.order import Cursor, Plain
from threefold.data.sampling.distribute import refuse_other_rows
from threefold.data.sampling.sampler import checked_epoch, data_axis, opening
from threefold.errors import ConfigError, DataError
from threefold.mesh.mesh import Mesh, active_mesh

Resume = Literal["replay", "seek"]


class StreamingLoader:
    """Batches of this dp rank's part of a stream. Iterating gives the rest of an epoch; `endless` never ends."""

    def __init__(
        self,
        dataset: IterableDataset | torch.utils.data.IterableDataset[Any],
        mesh: Any | None = None,
        *,
        batch_size: int,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        resume: Resume = "replay",
        **loader_settings: Any,
    ) -> None:
        """Split the stream; nothing is read yet.

        Args:
            dataset: a stream that is not split yet; if it shuffles, with the same seed on every rank.
            mesh: threefold's mesh or a torch DeviceMesh; default: the active mesh, else the process group's world.
            batch_size: rows per dp rank.
            resume: how to return to a state: `replay` or `seek`.
            loader_settings: further arguments of torch's DataLoader.

        Raises:
            ConfigError: not a stream, one that is split already, `seek` without torchdata, or a setting that a stream
                of torch cannot have.
        """
        self.num_replicas, self.rank = data_axis(mesh)
        shared = isinstance(dataset, torch.utils.data.IterableDataset) and not isinstance(
            dataset, IterableDataset
        )
        if shared:
            _check_shared(dataset, num_workers, resume)
        else:
            _check_stream(dataset)
        if resume not in get_args(Resume):
            raise ConfigError(
                f"resume = {resume!r}", expected="replay or seek", fix="resume='replay'"
            )
        self.epoch = 0
        self._dataset = dataset
        self._loader_class = _stateful_loader() if resume == "seek" else DataLoader
        sizes: dict[str, Plain] = {"num_workers": num_workers, "batch_size": batch_size}
        self._settings = {**sizes, "collate_fn": collate_fn, **loader_settings}
        self._resume = resume
        self._loader: Any = None
        self._made_from = {
            **sizes,
            "num_replicas": self.num_replicas,
            "resume": resume,
            "num_shards": getattr(dataset, "num_shards", 1),
            "shuffles": zlib.crc32(repr(_shuffles(None if shared else dataset)).encode()),
        }
        self._mesh = mesh if isinstance(mesh, Mesh) else active_mesh()
        self._shared, self._compared = shared, False
        if not shared:
            self._made_from["rank"] = self.rank
        self._begin = self._loaded = self._done = 0
        self._seek_to: Any = None

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch after `load_state_dict`, else the epoch from its head; then the epoch advances."""
        epoch, self._done = self.epoch, self._begin
        self._begin = self._loaded = 0
        self._loader, self._seek_to = self._open(epoch), None
        with opening(epoch, self.rank):
            batches = iter(self._loader)
            if self._resume == "replay":
                for _ in islice(batches, self._done):
                    pass
        for batch in batches:
            self._done += 1
            yield batch
        if self.epoch == epoch:
            self.epoch, self._done = epoch + 1, 0

    def _open(self, epoch: int) -> Any:
        # A new one for each pass: a stream keeps the state that it was given, even when it should begin at its head.
        part: Any = self._dataset
        if not self._shared:
            part = split_dataset_by_node(part, rank=self.rank, world_size=self.num_replicas)
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        self._compare_first()
        if self._shared:
            part = _EveryNth(part, self.rank, self.num_replicas)
        loader = self._loader_class(part, **self._settings)
        if self._seek_to is not None:
            loader.load_state_dict(self._seek_to)
        return loader

    def _compare_first(self) -> None:
        """DataError on every rank unless the stream is shuffled, and begins, in the same way on all of them."""
        if not self._compared and self._mesh is not None:
            first = next(iter(self._dataset), None) if self._shared else None
            refuse_other_rows(
                (first, self._made_from["shuffles"]),
                self._mesh,
                what="the stream does not begin with the same row",
                fix="leave out what splits it by rank (for a WebDataset: nodesplitter=lambda urls: urls), and shuffle "
                "it with one seed on every rank",
            )
        self._compared = True

    def endless(self) -> Iterator[Any]:
        """Epoch after epoch, for a loop that counts steps; a DataError if one has no batch on this rank."""
        while True:
            resumed = self._begin > 0
            empty = True
            for batch in self:
                empty = False
                yield batch
            if empty and not resumed:
                raise DataError(
                    f"an epoch of the stream has no batch on dp rank {self.rank} of {self.num_replicas}",
                    expected="at least one batch per dp rank and epoch",
                    fix="fewer dp ranks, a smaller batch_size, or no drop_last",
                )

    def set_epoch(self, epoch: int) -> None:
        """Go to the head of `epoch`; in that of a state just loaded the place stays, an earlier one is refused."""
        if (epoch := checked_epoch(epoch, self._loaded)) != self.epoch:
            self.epoch = epoch
            self._begin = self._done = 0
            self._seek_to = None

    def state_dict(self) -> dict[str, Any]:
        """The place of this rank's loop in its stream; each rank keeps its own.

        Plain values with `replay`; with `seek` also the state of torchdata and datasets, under `stream`.
        """
        state = Cursor(self.epoch, self._begin or self._done, self._made_from).state_dict()
        if self._resume == "replay":
            return state
        return {**state, "stream": self._loader.state_dict() if self._done else self._seek_to}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume; a DataError for a state of another rank, number of ranks or workers, or batch size."""
        cursor = Cursor.from_state_dict(state)
        cursor.check(self._made_from)
        self.epoch = self._loaded = cursor.epoch
        self._begin = cursor.position
        self._done = 0
        self._seek_to = state["stream"] if self._resume == "seek" else None


class _EveryNth(torch.utils.data.IterableDataset[Any]):
    """One of each round of `size` rows."""

    def __init__(self, stream: Any, rank: int, size: int) -> None:
        self._stream, self._rank, self._size = stream, rank, size

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self._stream)
        while len(of_ranks := list(islice(rows, self._size))) == self._size:
            yield of_ranks[self._rank]


def _shuffles(stream: Any) -> list[Any]:
    """The states of the generators by which a stream of datasets shuffles, in all that it is made of."""
    states: list[Any] = []
    for value in getattr(stream, "__dict__", {}).values():
        if isinstance(value, np.random.Generator):
            states.append(value.bit_generator.state)
        for part in value if isinstance(value, list) else [value]:
            if hasattr(part, "shuffle_data_sources"):
                states += _shuffles(part)
    return states


def _check_shared(dataset: Any, num_workers: int, resume: str) -> None:
    kind = type(dataset).__name__
    if num_workers > 1:
        raise ConfigError(
            f"num_workers = {num_workers}, and a {kind} is a torch stream",
            expected="one worker at most: each would repeat the whole stream",
            fix="num_workers=1",
        )
    if resume == "seek":
        raise ConfigError(
            f"resume = 'seek', and a {kind} is a torch stream",
            expected="a stream of the datasets library, which can start anywhere",
            fix="resume='replay'",
        )


def _check_stream(dataset: Any) -> None:
    if not isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"StreamingLoader got a {type(dataset).__name__}",
            expected="an IterableDataset of datasets or of torch",
            fix="threefold.distribute(DataLoader(dataset, ...)) for data with indices, or "
            "datasets.load_dataset(..., streaming=True)",
        )
    if getattr(dataset, "_distributed", None) is not None:
        raise ConfigError(
            "the stream is already split by split_dataset_by_node",
            expected="an unsplit stream: split twice, ranks would read only a part of their part",
            fix="leave split_dataset_by_node out",
        )


def _stateful_loader() -> Any:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise ConfigError(
            "resume = 'seek' without torchdata",
            expected="torchdata's StatefulDataLoader, which asks the stream and its workers for their position",
            fix="pip install 'threefold[streaming]'   (or resume='replay')",
        ) from None
    return StatefulDataLoader
