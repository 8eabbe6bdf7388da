"""DistributedSampler: torch's signature and partition, an order that needs no table, and a place to go on from.

In: a map-style dataset (only its length is used). Out: the indices that one dp rank reads, one by one, for a
`torch.utils.data.DataLoader`. What stays true: the ranks of the dp axis take turns along one global order, so the set
of samples of every global batch is the same for any number of them; cp and tp ranks of one dp rank read the same; the
state is (epoch, global position), the same on every rank after the same number of global batches, and another number
of replicas or another batch size goes on from it without a repeated or a lost sample.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from threefold.data.mixture import WeightedDraws
from threefold.data.order import Cursor, Plain
from threefold.data.partition import Tail, share, tail_of_sampler
from threefold.data.permutation import ORDER_VERSION, IntArray, Permutation
from threefold.errors import ConfigError

OrderName = Literal["threefold", "torch"]

_Indices = Callable[[IntArray], IntArray]

# Indices are computed and handed to Python in blocks: small first, so that the first index is there at once, then as
# large as a core's own cache holds.
_FIRST_BLOCK = 64
_LARGEST_BLOCK = 2**14
_MOST_INT32 = 2**31 - 1
_DP_DIMS = ("dp", "dp_replicate", "dp_shard")


class DataAxis(Protocol):
    """What the sampler wants to know of a mesh; threefold's `Mesh` has it."""

    @property
    def dp_size(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...


class DistributedSampler(Sampler[int]):
    """The indices that one dp rank reads, epoch after epoch; a drop-in for torch's sampler of the same name."""

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        order: OrderName = "threefold",
        tail: Tail | None = None,
        weights: Sequence[float] | npt.NDArray[Any] | None = None,
        num_samples: int | None = None,
        mesh: DataAxis | Any | None = None,
    ) -> None:
        """Fix the order; no index is computed yet.

        Args:
            dataset: anything with a length; where it has a `fingerprint` (a string), the state remembers it.
            num_replicas, rank: number of dp ranks and this one's place; default: the mesh's dp axis where a mesh is
                given or active, else the process group's world.
            shuffle: another order in every epoch, or 0, 1, 2, ...
            seed: of the shuffle; the same on every rank.
            drop_last: leave out the last samples that the replicas cannot share equally.
            order: `threefold`: computed where it is read, O(1) memory; `torch`: the very indices of torch's sampler, at
                4 bytes a sample on every rank.
            tail: `drop`, `pad` (repeat the head, as torch does) or `exact` (every sample once; the replicas' counts
                differ by at most 1). Default: `drop` if drop_last, else `pad`.
            weights: one for each sample: draw with replacement, in proportion to them.
            num_samples: draws in an epoch over all replicas, only with weights; default: the dataset's length.
            mesh: threefold's mesh, or a torch DeviceMesh with dims among dp, dp_replicate, dp_shard.

        Raises:
            ConfigError: settings that contradict one another, or no way to know the rank.
        """
        super().__init__()
        self.num_replicas, self.rank = _place(num_replicas, rank, mesh)
        self.dataset = dataset
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        if order not in get_args(OrderName):
            raise ConfigError(f"order = {order!r}", expected="threefold or torch", fix="order='threefold'")
        self.order, self.tail = order, tail_of_sampler(tail, drop_last=drop_last)
        self._num_rows = _length(dataset)
        self._draws = _checked_draws(weights, seed=seed, num_rows=self._num_rows, shuffle=shuffle, order=order)
        self.epoch_size = _checked_num_samples(num_samples, self._draws, num_rows=self._num_rows)
        self.num_samples = len(self._share(0))
        self.total_size = self.epoch_size if self.tail == "exact" else self.num_samples * self.num_replicas
        if order == "torch" and shuffle and self._num_rows > _MOST_INT32:
            warnings.warn(
                f"order='torch' keeps 8 bytes for each of {self._num_rows} samples on every rank "
                f"({self._num_rows / 2**27:.0f} GiB), 4 up to {_MOST_INT32}; order='threefold' keeps none",
                stacklevel=2,
            )

        self.epoch = 0
        self._order_version = ORDER_VERSION
        self._begin = 0
        self._reading: Reading | None = None

    def __len__(self) -> int:
        """Indices of this rank in a whole epoch."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch after `load_state_dict`, else the epoch from its head.

        When it is exhausted, the epoch advances by itself (not with order="torch", as torch's does not).
        """
        begin, self._begin = self._begin, 0
        reading = Reading(self.epoch, begin, self._share(begin))
        self._reading = reading
        return itertools.chain.from_iterable(self._blocks(reading))

    def set_epoch(self, epoch: int) -> None:
        """Go to the head of `epoch`; in the epoch of a state just loaded, the place stays."""
        if epoch != self.epoch:
            self.epoch, self._begin, self._reading = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the epoch, the global position after the last index handed out, what the order is made from.

        Valid while an iterator is open; it counts the newest one. A DataLoader with workers asks for indices ahead of
        the loop, so there it counts what was handed to the workers.
        """
        epoch, position = self.epoch, self._begin
        if self._reading is not None:
            epoch = self._reading.epoch
            position = self._reading.begin + self._reading.handed_out() * self.num_replicas
            position = min(position, self.epoch_size) if self.tail == "exact" else position
        return Cursor(epoch, position, self._made_from, self._order_version).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with any number of replicas and any batch size.

        Raises:
            DataError: no state of a sampler, or one of another seed, data, size or order.
        """
        cursor = Cursor.from_state_dict(state)
        cursor.check(self._made_from)
        self._order_version = cursor.order_version
        self.epoch, self._begin, self._reading = cursor.epoch, cursor.position, None

    @cached_property
    def _made_from(self) -> dict[str, Plain]:
        """The cursor's fingerprint; equal for every number of replicas, rank, batch size and tail."""
        made_from: dict[str, Plain] = {"order": self.order, "seed": self.seed, "shuffle": self.shuffle}
        made_from["num_rows"] = self._num_rows
        if self._draws is not None:
            made_from |= {"weights": self._draws.fingerprint(), "num_samples": self.epoch_size}
        data = getattr(self.dataset, "fingerprint", None)
        return made_from | {"data": data} if isinstance(data, str) else made_from

    def _share(self, begin: int) -> range:
        return share(begin, num_rows=self.epoch_size, dp_rank=self.rank, dp_size=self.num_replicas, tail=self.tail)

    def _blocks(self, reading: Reading) -> Iterator[Iterator[int]]:
        """The share of an epoch in blocks of Python ints; after the last, the epoch advances."""
        positions, done, size = reading.positions, 0, _FIRST_BLOCK
        indices_at = self._indices_at(reading.epoch) if positions else None
        while indices_at is not None and done < len(positions):
            block = positions[done : done + size]
            wanted = np.arange(block.start, block.stop, block.step, dtype=np.int64)
            if block[-1] >= self.epoch_size:  # padded: the head again
                wanted %= self.epoch_size
            yield reading.open_block(indices_at(wanted).tolist())
            done, size = done + len(block), min(4 * size, _LARGEST_BLOCK)
        if self._reading is reading and self.order != "torch":
            self.epoch, self._reading = reading.epoch + 1, None

    def _indices_at(self, epoch: int) -> _Indices:
        """positions in an epoch -> indices of the dataset."""
        if self._draws is not None:
            return self._draws.in_epoch(epoch).at
        if not self.shuffle:
            return lambda positions: positions
        if self.order == "torch":
            table = _torch_order(self._num_rows, seed=self.seed + epoch)
            return lambda positions: table[positions]
        return Permutation(self._num_rows, seed=self.seed, epoch=epoch, version=self._order_version).at


class Reading:
    """One pass over an epoch, and how far it has got, without a step of Python for each index."""

    def __init__(self, epoch: int, begin: int, positions: range) -> None:
        self.epoch, self.begin, self.positions = epoch, begin, positions
        self._opened = 0
        self._block: Iterator[int] = iter(())

    def open_block(self, indices: list[int]) -> Iterator[int]:
        self._opened += len(indices)
        self._block = iter(indices)
        return self._block

    def handed_out(self) -> int:
        """A list's iterator knows how many items it still has."""
        return self._opened - self._block.__length_hint__()  # type: ignore[attr-defined]


def _torch_order(num_rows: int, *, seed: int) -> npt.NDArray[Any]:
    """torch's own shuffle; int32 draws the same permutation as torch's int64 at half the bytes."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    dtype = torch.int32 if num_rows <= _MOST_INT32 else torch.int64
    return cast("npt.NDArray[Any]", torch.randperm(num_rows, generator=generator, dtype=dtype).numpy())


def _place(num_replicas: int | None, rank: int | None, mesh: Any) -> tuple[int, int]:
    """(number of dp ranks, this one), from what is given, the mesh or the world, in this order."""
    if mesh is not None and (num_replicas is not None or rank is not None):
        raise ConfigError(
            "DistributedSampler got mesh= together with num_replicas= or rank=",
            expected="one of them: the mesh's dp axis already says how many replicas there are and which this one is",
            fix="leave out num_replicas and rank",
        )
    if num_replicas is None or rank is None:
        size, place = data_axis(mesh)
        num_replicas = size if num_replicas is None else num_replicas
        rank = place if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise ConfigError(
            f"DistributedSampler got rank = {rank} with num_replicas = {num_replicas}",
            expected=f"a rank from 0 to {max(num_replicas - 1, 0)}",
            fix="pass this process's place on the dp axis as rank, or leave out both",
        )
    return num_replicas, rank


def data_axis(mesh: DataAxis | Any | None = None) -> tuple[int, int]:
    """(number of dp ranks, this one) of the given mesh, else of the active one, else of the process group's world.

    Raises:
        ConfigError: a mesh whose dims do not say which ranks read different samples, or neither mesh nor group.
    """
    return _axis_of_mesh(mesh) or _world()


def _axis_of_mesh(mesh: Any) -> tuple[int, int] | None:
    mesh = _active_mesh() if mesh is None else mesh
    if mesh is None:
        return None
    if hasattr(mesh, "dp_size"):
        return mesh.dp_size, mesh.dp_rank
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    dims = [name for name in names if name in _DP_DIMS]
    if not dims or "fsdp" in names:
        raise ConfigError(
            f"the mesh given to DistributedSampler has the dims ({', '.join(names)})",
            expected=f"dims among {', '.join(_DP_DIMS)}: only these say which ranks read different samples",
            fix="pass the mesh that threefold.init_mesh returned, or num_replicas= and rank=",
        )
    size, rank = 1, 0
    for name in dims:
        along = mesh.size(names.index(name))
        size, rank = size * along, rank * along + mesh.get_local_rank(name)
    return size, rank


def _active_mesh() -> DataAxis | None:
    from threefold.mesh.mesh import active_mesh

    return active_mesh()


def _world() -> tuple[int, int]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ConfigError(
            "DistributedSampler does not know its rank: there is no mesh and no process group",
            expected="a mesh or a process group first; without one every rank would read every sample",
            fix="call threefold.init_mesh() before, or pass num_replicas=1, rank=0 for a single process",
        )
    return torch.distributed.get_world_size(), torch.distributed.get_rank()


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"the dataset ({type(dataset).__name__}) has no length",
            expected="a map-style dataset, with __len__ and __getitem__: an order is made of its indices",
            fix="pass a map-style dataset, or give a stream to the DataLoader without a sampler",
        ) from None


def _checked_draws(weights: Any, *, seed: int, num_rows: int, shuffle: bool, order: str) -> WeightedDraws | None:
    if weights is None:
        return None
    if not shuffle or order == "torch":
        contrary = "shuffle = False" if not shuffle else "order = 'torch'"
        raise ConfigError(
            f"weights contradict {contrary}",
            expected="draws with replacement, which are random and have no counterpart in torch's sampler",
            fix=f"leave out {contrary.split(' ')[0]}, or weights",
        )
    draws = WeightedDraws(weights, seed=seed)
    if len(draws.weights) != num_rows:
        raise ConfigError(
            f"there are {len(draws.weights)} weights for {num_rows} samples",
            expected="one weight for each sample of the dataset",
            fix=f"pass {num_rows} weights, 0 for samples that are never to be drawn",
        )
    return draws


def _checked_num_samples(num_samples: int | None, draws: WeightedDraws | None, *, num_rows: int) -> int:
    if num_samples is None or (draws is not None and num_samples > 0):
        return num_rows if num_samples is None else num_samples
    raise ConfigError(
        f"num_samples = {num_samples}" + ("" if draws is not None else " without weights"),
        expected="a number of draws >= 1, only with weights: without them an epoch is every sample once",
        fix="leave out num_samples, or pass weights" if draws is None else f"num_samples={num_rows}",
    )
