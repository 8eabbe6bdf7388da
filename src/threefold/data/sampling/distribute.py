"""An ordinary DataLoader that reads this dp rank's share.

In: a map-style `torch.utils.data.DataLoader`. Out: a DataLoader with threefold's sampler instead of its own and every
other argument unchanged; `batch_size` is rows per dp rank, as with torch's DistributedSampler. Invariants: all dp
ranks make the same number of steps; the state is the place of the loop, independent of what workers prefetched; it is
the same on every rank and can be resumed with another number of ranks or workers, or another batch size.

The end of an epoch is the sampler's `drop` or `pad`, or `exact`: nothing dropped, nothing repeated. With `exact` a rank
without a sample in the last round repeats one as the last row of its last batch, and that row is marked as ignored: in
a dict batch its labels become -100; for other batches the caller passes a function.
"""

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from threefold.data.order.partition import Tail
from threefold.data.rows.concat import IGNORED
from threefold.data.sampling.sampler import (
    DistributedSampler,
    OrderName,
    Pass,
    data_axis,
    opening,
)
from threefold.errors import ConfigError, DataError
from threefold.jsonl import Values
from threefold.mesh.mesh import Mesh, active_mesh

IgnoreLastRow = Callable[[Any], Any]

# Settings that a distributed loader takes from the plain one.
KEPT = (
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def distribute(
    loader: DataLoader[Any],
    mesh: Any | None = None,
    *,
    seed: int = 0,
    tail: Tail | None = None,
    order: OrderName = "threefold",
    ignore_last_row: IgnoreLastRow | None = None,
) -> "DistributedLoader":
    """The same loader, restricted to the share of this dp rank.

    The loader decides whether to shuffle: `shuffle=True` gives a new order in every epoch, from `seed` and not from the
    loader's generator; a WeightedRandomSampler gives the sampler's `weights`.

    Args:
        loader: a map-style DataLoader with torch's own sampler; it is not changed.
        mesh: threefold's mesh or a torch DeviceMesh; default: the active mesh, else the process group's world.
        seed: seed of the order; the same on every rank.
        tail: `drop`, `pad` or `exact`, as for the sampler; default: `drop` if the loader has drop_last, else `pad`.
        order: `threefold`, or `torch` for exactly the indices of torch's DistributedSampler.
        ignore_last_row: with `exact` and batches that are not a dict with integer `labels`: a function that returns
            the batch with its last row ignored.

    Raises:
        ConfigError: a loader that cannot be distributed, or an unknown rank.
    """
    check_loader(loader)
    if ignore_last_row is not None and tail != "exact":
        raise ConfigError(
            f"ignore_last_row has no effect with tail = {tail!r}",
            expected="tail='exact': only it adds a row that must be ignored",
            fix="distribute(loader, tail='exact', ignore_last_row=...), or leave ignore_last_row out",
        )
    batches = _batches_of(loader)
    sampler = DistributedSampler.for_loop(
        loader.dataset,
        seed=seed,
        drop_last=batches.drop_last,
        tail=tail,
        order=order,
        mesh=mesh,
        **draw_of(batches.sampler, len(loader.dataset)),
    )
    kept = {name: getattr(loader, name) for name in KEPT}
    kept |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    return DistributedLoader(loader.dataset, sampler, ignore_last_row, **kept)


def _batches_of(loader: DataLoader[Any]) -> Any:
    """What determines batch size and drawing: the loader, or the torch BatchSampler that it was given."""
    return (
        loader.batch_sampler
        if loader.batch_size is None and type(loader.batch_sampler) is BatchSampler
        else loader
    )


class DistributedLoader(DataLoader[Any]):
    """A DataLoader over one dp rank's share that counts what the loop received; made by `distribute`.

    `len` is the number of batches of an entire epoch, the same on every dp rank.
    """

    sampler: DistributedSampler

    def __init__(
        self,
        dataset: Any,
        sampler: DistributedSampler,
        ignore_last_row: IgnoreLastRow | None = None,
        **kept: Any,
    ) -> None:
        super().__init__(dataset, sampler=sampler, **kept)
        self._ignore_last_row = ignore_last_row
        self.indices: list[int] = []
        """The rows of the batch that the loop received last, by their indices in the dataset; a stand-in has none."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The rest of the epoch after `load_state_dict`, else the epoch from its head; at the end the epoch advances.

        Raises:
            ConfigError: tail = exact, and a batch has no integer labels, one row per sample, to mark as ignored.
        """
        now = self.sampler.open_pass()
        with opening(now.seed, now.epoch, self.sampler.rank):
            return self._counting(super().__iter__(), now)

    def set_epoch(self, epoch: int) -> None:
        """Go to the head of `epoch`; that of a state just loaded keeps its place, an earlier one is refused."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank: the epoch, and the global position after the newest batch."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with any number of ranks and workers and any batch size; errors as for the sampler."""
        self.sampler.load_state_dict(state)

    def refuse_other_dataset(self, mesh: Mesh) -> None:
        """DataError if ranks read rows of other datasets; every rank calls it."""
        refuse_other_dataset(self.sampler.dataset, mesh)

    def _counting(self, batches: Iterator[Any], now: Pass) -> Iterator[Any]:
        sampler = self.sampler
        uneven = sampler.is_uneven(now)
        lacks_one = uneven and now.positions and now.positions[-1] >= sampler.epoch_size
        for batch in batches:
            rows = min(self.batch_size or 1, len(now.positions) - now.had)
            if uneven and now.had == 0 and self._ignore_last_row is None:
                # On the first batch all ranks find the same problem; on the last, only one would.
                _check_labels(batch, rows)
            sampler.begin_reading(now)
            now.count(rows)
            last = lacks_one and now.had == len(now.positions)
            indices = [now.asked.popleft() for _ in range(min(rows, len(now.asked)))]
            self.indices = indices[:-1] if last else indices
            yield (self._ignore_last_row or ignore_last_labels)(batch) if last else batch
        sampler.close_pass(now)


def ignore_last_labels(batch: Any) -> Any:
    """A copy of a dict batch with `labels` [rows, ...] in which the last row's labels are all -100.

    For a step with a routers' loss the row is `padding` too: that loss counts tokens whatever their labels.
    """
    marked = copy.copy(batch)
    marked["labels"] = labels = batch["labels"].clone()
    labels[-1] = IGNORED
    if (mesh := active_mesh()) and mesh.routers and "input_ids" in batch:
        marked["padding"] = batch.get("padding", torch.zeros_like(labels).bool()).clone()
        marked["padding"][-1] = True
    return marked


def refuse_other_dataset(dataset: Any, mesh: Mesh) -> None:
    """DataError if ranks have other rows under the same indices; every rank calls it.

    Of a program's own dataset the length alone is compared: to read a row could draw random numbers, or open files that
    worker processes must not share.
    """
    rows: Any = ()
    if hasattr(dataset, "with_format"):  # of the `datasets` library: as they are stored
        rows = dataset.with_format(None)
    elif type(dataset) in (list, TensorDataset):
        rows = dataset
    size = len(dataset)
    known = [rows[at : at + 1] for at in (0, size // 2, size - 1)]
    refuse_other_rows(
        # A Subset, such as a random split, has indices.
        (size, getattr(dataset, "indices", ()), known),
        mesh,
        what="the dataset does not have the same rows",
        fix="give every rank the whole dataset, split at random with the same seed: its loader takes the share",
    )


def refuse_other_rows(rows: Any, mesh: Mesh, *, what: str, fix: str) -> None:
    """DataError, which says `what` is wrong, if ranks have other `rows`; every rank calls it."""
    digests = mesh.decide("rows", _digest_of(rows), list)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise DataError(
            f"{what} on ranks 0 and {other}",
            expected="the same rows in the same order on every rank: each dp rank is given its share of them",
            fix=fix,
        )


def _digest_of(row: Any) -> int:
    """A digest of the tensors, arrays, numbers and texts in a row; anything else counts by its type alone."""
    digest = 0
    for leaf in tree_leaves(row):
        value = leaf.numpy(force=True) if isinstance(leaf, Tensor) else leaf
        content = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
        plain = hasattr(value, "dtype") or isinstance(value, (str, bytes, int, float))
        digest = zlib.crc32(content if plain else type(value).__name__.encode(), digest)
    return digest


def require_distributed(loader: Any, mesh: Any | None = None) -> None:
    """Refuses a user's loader that would give a dp rank data other than its share (ConfigError).

    With one process there is nothing to share. Otherwise the loader (or its sampler) must have `num_replicas` and
    `rank`, as distributed samplers do, equal to those of the dp axis.
    """
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if world == 1:
        return
    size, rank = data_axis(mesh)
    replica = _replica_of(loader)
    if replica is None:
        raise ConfigError(
            f"the training loader ({type(loader).__name__}) has no distributed sampler, and there are {world} ranks",
            expected=f"a loader that reads the share of dp rank {rank} of {size}: with this one the ranks would train "
            "on the same rows, or on unrelated orders",
            fix="loader = threefold.distribute(loader)",
        )
    if replica != (size, rank):
        raise ConfigError(
            f"the training loader reads as replica {replica[1]} of {replica[0]}, but this process is dp rank {rank} of "
            f"{size}",
            expected="the dp axis: cp and tp ranks of one dp rank read the same rows",
            fix="threefold.distribute(loader) with a plain loader, or num_replicas=mesh.dp_size, rank=mesh.dp_rank",
        )


def _replica_of(loader: Any) -> tuple[int, int] | None:
    """(number of replicas, this one) of a loader; None if it does not expose them."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for holder in (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ):
        # torch's distributed samplers, and the batch sampler of accelerate's loaders
        for names in (("num_replicas", "rank"), ("num_processes", "process_index")):
            size, rank = (getattr(holder, name, None) for name in names)
            if isinstance(size, int) and isinstance(rank, int):
                return size, rank
    # A stream of the `datasets` library that split_dataset_by_node has split.
    split = getattr(getattr(loader, "dataset", None), "_distributed", None)
    return (split.world_size, split.rank) if split is not None else None


def known_draw(sampler: Any, num_rows: int) -> Values | None:
    """As `draw_of`, but None for a sampler of which it is not known how it draws."""
    # accelerate's SeedableRandomSampler draws as RandomSampler does, from its own seed.
    shuffles = (
        type(sampler) is RandomSampler or type(sampler).__name__ == "SeedableRandomSampler"
    )
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if shuffles and not sampler.replacement and sampler.num_samples == num_rows:
        return {"shuffle": True}
    if type(sampler) is WeightedRandomSampler and sampler.replacement:
        return {"weights": sampler.weights.tolist(), "num_samples": sampler.num_samples}
    return None


def draw_of(sampler: Any, num_rows: int) -> Values:
    """The arguments that make our sampler equivalent to torch's sampler."""
    if (draw := known_draw(sampler, num_rows)) is not None:
        return draw
    name = type(sampler).__name__
    if hasattr(sampler, "num_replicas"):
        raise ConfigError(
            f"the loader already has a distributed sampler ({name})",
            expected="a loader with torch's own sampler, which distribute replaces with a distributed one",
            fix="build it with shuffle=True or False and no sampler, or use it without distribute",
        )
    if type(sampler) in (RandomSampler, WeightedRandomSampler):
        name += f" with replacement={sampler.replacement}, num_samples={sampler.num_samples}"
    raise ConfigError(
        f"the loader has a sampler that cannot be distributed: {name}",
        expected="shuffle=True or False over all samples, or a WeightedRandomSampler with replacement: only these "
        "draw in a known way",
        fix="shuffle=True instead of the sampler, or sampler=threefold.DistributedSampler(dataset, ...) without "
        "distribute",
    )


def check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"distribute got a {type(loader).__name__}",
            expected="a torch.utils.data.DataLoader over a map-style dataset",
            fix="threefold.distribute(DataLoader(dataset, batch_size=8, shuffle=True))",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"the loader's dataset ({type(loader.dataset).__name__}) is a stream: it has no indices to distribute",
            expected="a map-style dataset, with __len__ and __getitem__",
            fix="threefold.data.sampling.streaming.StreamingLoader(dataset, batch_size=...); or load the data without "
            "streaming=True",
        )
    if (
        isinstance(loader, DistributedLoader)
        or type(loader).__iter__ is not DataLoader.__iter__
    ):
        raise ConfigError(
            f"distribute got a {type(loader).__name__}, which has its own iteration",
            expected="a plain torch.utils.data.DataLoader, which can be rebuilt with another sampler",
            fix="pass the DataLoader that it was made from, or build one with the same arguments",
        )
    if (
        _batches_of(loader) is loader
        and loader.batch_size is None
        and loader.batch_sampler is not None
    ):
        raise ConfigError(
            f"the loader has a batch_sampler ({type(loader.batch_sampler).__name__})",
            expected="batch_size, or torch's own BatchSampler: a dp rank's samples of any other are not known",
            fix="DataLoader(dataset, batch_size=8, shuffle=True) without batch_sampler; or, if it gives the same on "
            "every rank, without threefold.distribute: own = list(batch_sampler)[mesh.dp_rank :: mesh.dp_size]; "
            "DataLoader(dataset, batch_sampler=own[: len(batch_sampler) // mesh.dp_size])",
        )
    if not loader.in_order and loader.num_workers:
        raise ConfigError(
            "the loader has in_order = False",
            expected="batches in the order of the sampler: in the order in which workers finish, a step would read "
            "different samples in every run, and no state could record them",
            fix="leave in_order out",
        )


def _check_labels(batch: Any, rows: int) -> None:
    """Refuses a batch whose labels cannot mark a row as ignored (ConfigError)."""
    if not isinstance(batch, Mapping):
        kind = f"a {type(batch).__name__}"
    elif not isinstance(labels := batch.get("labels"), Tensor):
        kind = f"a dict of {', '.join(map(str, batch)) or 'nothing'}" + (
            f" whose labels are a {type(labels).__name__}" if labels is not None else ""
        )
    elif labels.is_floating_point():
        kind = (
            f"a dict whose labels are {labels.dtype}, for which {IGNORED} is an ordinary value"
        )
    elif labels.ndim == 0 or len(labels) != rows:
        kind = f"a dict whose labels have the shape {list(labels.shape)} for {rows} samples"
    else:
        return
    raise ConfigError(
        f"tail = 'exact', and the loader's batch is {kind}",
        expected="a dict with integer `labels`, one row for each sample: a dp rank without a sample in the last round "
        f"reads an extra row, which labels of {IGNORED} mark as ignored",
        fix="distribute(loader, tail='exact', ignore_last_row=FUNCTION), which returns a batch whose last row is "
        "ignored; or tail='drop' or 'pad'",
    )
