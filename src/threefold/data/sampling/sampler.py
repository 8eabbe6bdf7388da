"""DistributedSampler: torch's signature and partition, an order that needs no table, and a resumable position.

In: a map-style dataset (only its length is used). Out: the indices that one dp rank reads, one by one, for a
`torch.utils.data.DataLoader`. Invariants: the ranks of the dp axis take turns along one global order, so the set
of samples of every global batch is the same for any number of them; cp and tp ranks of one dp rank read the same; the
state is (epoch, global position), the same on every rank after the same number of global batches, and a run with
another number of replicas or batch size resumes from it without a repeated or lost sample.

An iteration is a `Pass`. A bare sampler counts the indices that it yields. A DataLoader requests indices ahead of
the loop, so the loader of a `for_loop` sampler opens the pass, counts the loop's rows and closes it.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, Self, get_args

import numpy as np
import torch

from threefold.arrays import Array, Int64
from threefold.data.order.draws import WeightedDraws
from threefold.data.order.order import Cursor, Plain
from threefold.data.order.partition import Tail, share, tail_of_sampler
from threefold.data.order.permutation import Permutation, seed_of
from threefold.errors import ConfigError, check_argument

OrderName = Literal["threefold", "torch"]

# Indices are computed and passed to Python in blocks: small ones first, so that the first index comes at once, then as
# large as a core's own cache holds.
_FIRST_BLOCK = 64
_LARGEST_BLOCK = 2**14
_MOST_INT32 = 2**31 - 1


class DistributedSampler(torch.utils.data.DistributedSampler[int]):
    """The indices that one dp rank reads, epoch after epoch; a drop-in for torch's sampler of the same name.

    It subclasses torch's sampler, so that libraries do not divide its share among the ranks once more.
    """

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
        weights: Sequence[float] | Array | None = None,
        num_samples: int | None = None,
        mesh: Any | None = None,
    ) -> None:
        """Fix the order; no index is computed yet.

        Args:
            dataset: anything with a length; its `fingerprint` (a string), if it has one, is kept in the state.
            num_replicas: number of dp ranks; default: the dp axis of the given or active mesh, else the process
                group's world.
            rank: this rank's index among them; same default.
            shuffle: another order in every epoch, or 0, 1, 2, ...
            seed: seed of the shuffle; the same on every rank.
            drop_last: leave out the last samples that the replicas cannot share equally.
            order: `threefold`: computed on demand, O(1) memory; `torch`: exactly the indices of torch's sampler, at
                4 bytes per sample on every rank.
            tail: `drop`, `pad` (repeat the head, as torch does) or `exact` (every sample once; the replicas' counts
                differ by at most 1). Default: `drop` if drop_last, else `pad`.
            weights: one per sample: draw with replacement, in proportion to them.
            num_samples: draws in an epoch over all replicas, only with weights; default: the dataset's length.
            mesh: threefold's mesh, or a torch DeviceMesh with dims among dp, dp_replicate, dp_shard.

        Raises:
            ConfigError: contradictory settings, or an unknown rank.
        """
        self.num_replicas, self.rank = place_on_axis(num_replicas, rank, mesh)
        self.dataset = dataset
        self.shuffle, self._seed, self.drop_last = shuffle, _whole("seed", seed), drop_last
        if order not in get_args(OrderName):
            raise ConfigError(
                f"order = {order!r}", expected="threefold or torch", fix="order='threefold'"
            )
        self.order, self.tail = order, tail_of_sampler(tail, drop_last=drop_last)
        self._num_rows = _length(dataset)
        self._set_draws(weights, num_samples)
        self._by_loop = False
        self._stand_in: Callable[[int], int] | None = None
        self._alone: Callable[[int], int] | None = None
        self._set_multiple(self.num_replicas)
        if order == "torch" and shuffle and self._num_rows > _MOST_INT32:
            warnings.warn(
                f"order='torch' keeps 8 bytes for each of {self._num_rows} samples on every rank "
                f"({self._num_rows / 2**27:.0f} GiB), 4 up to {_MOST_INT32}; order='threefold' keeps none",
                stacklevel=2,
            )
        self.epoch = 0
        self._begin = self._loaded = 0
        # The pass that the state counts, and the one being read: torch begins to read after a loader opens.
        self._pass: Pass | None = None
        self._opened: Pass | None = None

    @classmethod
    def for_loop(
        cls,
        dataset: Any,
        *,
        global_batch: int | None = None,
        stand_in: Callable[[int], int] | None = None,
        alone: Callable[[int], int] | None = None,
        **settings: Any,
    ) -> Self:
        """A sampler for one loader, whose state follows the loop.

        With the tail `exact` all ranks have the same number of positions: a rank without a sample in the last round has
        a position past the end of the epoch, which maps to the epoch's head. The loader ignores that row.

        Args:
            global_batch: with the tail `drop`, an incomplete one is left out; default: a round, a sample per dp rank.
            stand_in: replaces the index of the head at that last position.
            alone: replaces the index of a sample in that last round, in which other ranks have none.
            settings: passed to the constructor.
        """
        sampler = cls(dataset, **settings)
        sampler._by_loop, sampler._stand_in, sampler._alone = True, stand_in, alone
        sampler._set_multiple(global_batch or sampler.num_replicas)
        return sampler

    @property
    def seed(self) -> int:
        """Seed of the shuffle. A new seed gives a new order, read from the epoch's head by the next iteration."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        if seed != self._seed:
            self._seed, self._begin, self._pass = _whole("seed", seed), 0, None

    @property
    def draw(self) -> dict[str, Any]:
        """The arguments that determine how samples are drawn."""
        if self._draws is None:
            return {"shuffle": self.shuffle}
        return {"weights": self._draws.weights, "num_samples": self.epoch_size}

    @property
    def replacement(self) -> bool:
        """Whether samples are drawn with weights: some several times, some never."""
        return self._draws is not None

    def __len__(self) -> int:
        """Indices of this rank in an entire epoch."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """The rest of the epoch after `load_state_dict`, else the epoch from its head.

        When exhausted, the epoch advances (not with order="torch", as in torch). For a loader: the indices of the
        pass that it has opened.
        """
        now = self._opened if self._by_loop else self.open_pass()
        if now is None or (self.num_replicas > 1 and _is_divided_again()):
            raise ConfigError(
                "the sampler is used by a loader that would read only a part of this rank's share",
                expected="threefold.distribute's loader itself, which counts what the loop receives, or torch's own: "
                "accelerator.prepare divides a sampler's indices among the processes",
                fix="leave the loader as it is; with accelerate: prepare_loader(accelerator, DataLoader(...)) of "
                "threefold.integrations.huggingface",
            )
        return itertools.chain.from_iterable(self._blocks(now))

    def open_pass(self) -> Pass:
        """Begins an iteration: the rest of the epoch after `load_state_dict`, else the epoch from its head.

        If an earlier one is open and has read nothing yet, both begin at its place.
        """
        before = self._pass
        begin = self._begin
        if before is not None and before.positions and not before.had:
            begin = before.begin
        self._begin = self._loaded = 0
        self._opened = self._pass = Pass(
            self.epoch, begin, self._share(begin), seed=self.seed, by_loop=self._by_loop
        )
        return self._pass

    def begin_reading(self, now: Pass) -> None:
        """`now` yields the first rows: of the passes opened at the same place, the state counts this one."""
        opened = self._pass
        if (
            opened is not None
            and not opened.had
            and (opened.epoch, opened.begin) == (now.epoch, now.begin)
        ):
            self._pass = now

    def close_pass(self, over: Pass) -> None:
        """Ends an iteration: the epoch advances (not with order="torch", as in torch)."""
        if self._opened is over:
            self._opened = None
        if self._pass is over and self.order != "torch":
            self.epoch, self._pass = over.epoch + 1, None

    def is_uneven(self, now: Pass) -> bool:
        """Whether some rank has no sample in the last round of a pass that neither repeats nor drops any."""
        return self.tail == "exact" and (self.epoch_size - now.begin) % self.num_replicas != 0

    def rows_left(self) -> int:
        """Rows of this rank from the current place to the end of the epoch; for a loader the same on every rank."""
        return len(self._share(self._place()[1]))

    def set_epoch(self, epoch: int) -> None:
        """Go to the head of `epoch`; that of a state just loaded keeps its place, an earlier one is refused."""
        if (epoch := checked_epoch(epoch, self._loaded)) != self.epoch:
            self.epoch, self._begin, self._pass = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the epoch, the global position after the last index yielded, the parameters of the order.

        Valid while an iterator is open; the newest one counts. A DataLoader with workers requests indices ahead of
        the loop, so this counts indices sent to the workers; the state of `distribute`'s loader is the loop's.
        """
        epoch, position = self._place()
        return Cursor(int(epoch), int(position), self._made_from).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was taken, with any number of replicas and any batch size.

        Raises:
            DataError: not a state of a sampler, or one of another seed, data, size or order.
        """
        cursor = Cursor.from_state_dict(state)
        cursor.check(self._made_from, end=self.epoch_size)
        self.epoch = self._loaded = cursor.epoch
        self._begin = cursor.position
        self._pass = None

    @property
    def _made_from(self) -> dict[str, Plain]:
        """The cursor's fingerprint; independent of number of replicas, rank, batch size and tail."""
        made_from = {name: getattr(self, name) for name in ("order", "seed", "shuffle")} | {
            "num_rows": self._num_rows
        }
        if self._draws is not None:
            made_from |= {"weights": self._draws.fingerprint, "num_samples": self.epoch_size}
        data = getattr(self.dataset, "fingerprint", None)
        return made_from | {"data": data} if isinstance(data, str) else made_from

    def _place(self) -> tuple[int, int]:
        """(epoch, global position) of the next sample."""
        if (now := self._pass) is None:
            return self.epoch, self._begin
        # After it there are repeated samples alone, as many as this number of replicas needs.
        return now.epoch, min(now.begin + now.had * self.num_replicas, self.epoch_size)

    def _set_draws(
        self, weights: Sequence[float] | Array | None, num_samples: int | None
    ) -> None:
        num_rows = self._num_rows
        if weights is not None and (not self.shuffle or self.order == "torch"):
            contrary = "shuffle = False" if not self.shuffle else "order = 'torch'"
            raise ConfigError(
                f"weights contradict {contrary}",
                expected="draws with replacement, which are random and have no counterpart in torch's sampler",
                fix=f"leave out {contrary.split(' ')[0]}, or weights",
            )
        self._draws = None if weights is None else WeightedDraws(weights)
        if self._draws is not None and len(self._draws.weights) != num_rows:
            raise ConfigError(
                f"there are {len(self._draws.weights)} weights for {num_rows} samples",
                expected="one weight for each sample of the dataset",
                fix=f"pass {num_rows} weights, 0 for samples that must never be drawn",
            )
        if num_samples is not None and (weights is None or num_samples < 1):
            raise ConfigError(
                f"num_samples = {num_samples}"
                + ("" if weights is not None else " without weights"),
                expected="a number of draws >= 1, only with weights: without them an epoch is every sample once",
                fix="leave out num_samples, or pass weights"
                if weights is None
                else f"num_samples={num_rows}",
            )
        self.epoch_size = (
            num_rows if num_samples is None else _whole("num_samples", num_samples, from_=1)
        )

    def _set_multiple(self, global_batch: int) -> None:
        self.global_batch = global_batch
        self.num_samples = len(self._share(0))
        self.total_size = (
            self.epoch_size if self.tail == "exact" else self.num_samples * self.num_replicas
        )

    def _share(self, begin: int) -> range:
        return share(
            begin,
            num_rows=self.epoch_size,
            dp_rank=self.rank,
            dp_size=self.num_replicas,
            tail="pad" if self._by_loop and self.tail == "exact" else self.tail,
            multiple=self.global_batch,
        )

    def _blocks(self, now: Pass) -> Iterator[Iterator[int]]:
        """The share of an epoch in blocks of Python ints; after the last, the epoch of a bare sampler advances."""
        positions, done, size = now.positions, 0, _FIRST_BLOCK
        indices_at = self._indices_at(now.epoch, now.seed) if positions else None
        uneven = self.is_uneven(now)
        if not self._by_loop:
            self.begin_reading(now)
        while indices_at is not None and done < len(positions):
            block = positions[done : done + size]
            wanted = np.arange(block.start, block.stop, block.step, dtype=np.int64)
            past_end = block[-1] >= self.epoch_size
            # Padded: the head again.
            indices = indices_at(wanted % self.epoch_size if past_end else wanted).tolist()
            mark = self._stand_in if past_end else self._alone
            if uneven and mark is not None and done + len(block) == len(positions):
                indices[-1] = mark(indices[-1])
            yield now.hand_out(indices)
            done, size = done + len(block), min(4 * size, _LARGEST_BLOCK)
        if not self._by_loop:
            self.close_pass(now)

    def _indices_at(self, epoch: int, seed: int) -> Callable[[Int64], Int64]:
        """positions in an epoch -> indices of the dataset."""
        if self._draws is not None:
            return self._draws.in_epoch(epoch, seed=seed).at
        if not self.shuffle:
            return np.copy
        if self.order == "torch":
            return _torch_order(self._num_rows, seed=seed + epoch).__getitem__
        return Permutation(self._num_rows, seed=seed, epoch=epoch).at


def _is_divided_again() -> bool:
    """Whether accelerate requests indices, to give each process a part of them: a sampler has no other way to tell."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "BatchSamplerShard" not in frame.f_code.co_qualname:
        frame = frame.f_back
    return frame is not None


@contextmanager
def opening(*place: int) -> Iterator[None]:
    """Inside, torch draws the seed of a loader's workers from `place`, and leaves its global numbers as they were.

    Drawn from those, as each pass begins, it would put a resumed loop one number ahead: its dropout would differ.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of("workers", *place))
        yield


def checked_epoch(epoch: int, loaded: int) -> int:
    """The epoch as an int, not before that of a state just loaded (ConfigError)."""
    if (epoch := _whole("epoch", epoch, from_=0)) < loaded:
        raise ConfigError(
            f"set_epoch({epoch}) after a state of epoch {loaded} was loaded",
            expected="that epoch or a later one: the rows of earlier epochs would be read again",
            fix=f"begin the loop's epochs there: for epoch in range({loaded}, ...)   (it is state['epoch'])",
        )
    return epoch


def _torch_order(num_rows: int, *, seed: int) -> Array:
    """torch's own shuffle; int32 draws the same permutation as torch's int64 in half the memory."""
    dtype = torch.int32 if num_rows <= _MOST_INT32 else torch.int64
    return torch.randperm(
        num_rows, generator=torch.Generator().manual_seed(seed), dtype=dtype
    ).numpy()


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"the dataset ({type(dataset).__name__}) has no length",
            expected="a map-style dataset, with __len__ and __getitem__: the order consists of its indices",
            fix="pass a map-style dataset, or give a stream to the DataLoader without a sampler",
        ) from None


class Pass:
    """One iteration over an epoch: where it begins, this rank's positions, and how many the loop received.

    Without a loop that counts its rows, yielded indices are counted, without Python code running for each index.
    """

    def __init__(
        self, epoch: int, begin: int, positions: range, *, seed: int, by_loop: bool = False
    ) -> None:
        self.epoch, self.begin, self.positions, self.seed = epoch, begin, positions, seed
        self._by_loop = by_loop
        self.asked: deque[int] = deque()
        """Indices that a loader asked the dataset for, whose rows the loop has not received yet."""
        self._counted = 0
        self._block: Iterator[int] = iter(())

    @property
    def had(self) -> int:
        """Positions whose samples the loop received, or whose indices were yielded."""
        # A list's iterator knows how many items are left.
        ahead = 0 if self._by_loop else self._block.__length_hint__()  # type: ignore[attr-defined]
        return self._counted - ahead

    def count(self, rows: int) -> None:
        """The loop received `rows` more."""
        self._counted += rows

    def hand_out(self, indices: list[int]) -> Iterator[int]:
        """An iterator over the next block of indices."""
        if self._by_loop:
            self.asked.extend(indices)
            return iter(indices)
        self._counted += len(indices)
        self._block = iter(indices)
        return self._block


_DP_DIMS = ("dp", "dp_replicate", "dp_shard")


def data_axis(mesh: Any | None = None) -> tuple[int, int]:
    """(number of dp ranks, this one) of the given mesh, the active one or the world, in this order; or ConfigError."""
    from threefold.mesh.mesh import active_mesh

    if mesh is not None:
        return _axis_of_mesh(mesh)
    mesh, world_size = active_mesh(), 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world_size = torch.distributed.get_world_size()
    if mesh is not None:
        size = mesh.topology.world_size
        if world_size not in (0, size):
            raise ConfigError(
                f"threefold.init_mesh made a mesh of {size}, and the process group has {world_size} ranks",
                expected="one place for this process: with the mesh's, several ranks would read the same samples",
                fix="call threefold.init_mesh() after torch.distributed.init_process_group(), or close the mesh before",
            )
        return _axis_of_mesh(mesh)
    if world_size:
        return world_size, torch.distributed.get_rank()
    raise ConfigError(
        "DistributedSampler does not know its rank: there is no mesh and no process group",
        expected="a mesh or a process group first; without one every rank would read every sample",
        fix="call threefold.init_mesh() before, or pass num_replicas=1, rank=0 for a single process",
    )


def place_on_axis(num_replicas: int | None, rank: int | None, mesh: Any) -> tuple[int, int]:
    """(number of dp ranks, this one) from the given numbers, the mesh or the world, in this order."""
    if mesh is not None and (num_replicas is not None or rank is not None):
        raise ConfigError(
            "DistributedSampler got mesh= together with num_replicas= or rank=",
            expected="one of them: the mesh's dp axis already gives the number of replicas and the rank",
            fix="leave out num_replicas and rank",
        )
    if num_replicas is None or rank is None:
        size, place = data_axis(mesh)
        num_replicas = size if num_replicas is None else num_replicas
        rank = place if rank is None else rank
    num_replicas = _whole("num_replicas", num_replicas, from_=1)
    if not 0 <= _whole("rank", rank) < num_replicas:
        raise ConfigError(
            f"DistributedSampler got rank = {rank} with num_replicas = {num_replicas}",
            expected=f"a rank from 0 to {num_replicas - 1}",
            fix="pass this process's place on the dp axis as rank, or leave out both",
        )
    return num_replicas, rank


def _whole(name: str, value: Any, *, from_: float = -math.inf) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    check_argument(
        name,
        value,
        number is not None and number >= from_,
        expected="a whole number" + (f" from {from_} on" if from_ > -math.inf else ""),
        fix=f"{name}={max(from_, 0)}",
    )
    assert number is not None
    return number


def _axis_of_mesh(mesh: Any) -> tuple[int, int]:
    if hasattr(mesh, "dp_size"):
        return mesh.dp_size, mesh.dp_rank
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    dims = [name for name in names if name in _DP_DIMS]
    if not dims or "fsdp" in names:
        raise ConfigError(
            f"the mesh given to DistributedSampler has the dims ({', '.join(names)})",
            expected=f"dims among {', '.join(_DP_DIMS)}: only these show which ranks read different samples",
            fix="pass the mesh that threefold.init_mesh returned, or num_replicas= and rank=",
        )
    size, rank = 1, 0
    for name in dims:
        along = mesh.size(names.index(name))
        size, rank = size * along, rank * along + mesh.get_local_rank(name)
    return size, rank
