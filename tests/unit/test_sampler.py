"""The sampler: torch's indices bit for bit, every sample once, any number of replicas before and after any stop."""

from __future__ import annotations

import itertools
import json
import time
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

from threefold.data.order.partition import TAILS, Tail
from threefold.data.order.permutation import Permutation
from threefold.data.sampling import sampler as sampler_module
from threefold.data.sampling.sampler import DistributedSampler
from threefold.errors import ConfigError, DataError
from threefold.mesh.mesh import init_mesh

REPLICAS = st.integers(1, 9)
ORDERS = st.sampled_from(["threefold", "torch"])


def samplers(n: int, replicas: int, **settings: Any) -> list[DistributedSampler]:
    return [
        DistributedSampler(range(n), replicas, rank, **settings) for rank in range(replicas)
    ]


def in_turns(ranks: list[Iterator[int]], rounds: int | None = None) -> list[int]:
    """What the ranks read in global order: one sample each, round after round."""
    read: list[int] = []
    for _ in itertools.count() if rounds is None else range(rounds):
        turn = [index for index in (next(rank, None) for rank in ranks) if index is not None]
        read += turn
        if not turn:
            break
    return read


def whole_epoch(n: int, **settings: Any) -> list[int]:
    (one,) = samplers(n, 1, tail="exact", **settings)
    return list(one)


@settings(deadline=None, max_examples=300)
@given(
    n=st.integers(0, 80),
    replicas=st.integers(1, 100),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    drop_last=st.booleans(),
)
@example(n=100_003, replicas=8, shuffle=True, seed=3, epoch=2, drop_last=False)
@example(n=3, replicas=8, shuffle=True, seed=0, epoch=0, drop_last=False)
@example(n=3, replicas=8, shuffle=True, seed=0, epoch=0, drop_last=True)
def test_torch_order_is_torch_bit_for_bit(
    n: int, replicas: int, shuffle: bool, seed: int, epoch: int, drop_last: bool
) -> None:
    for rank in {0, replicas // 2, replicas - 1}:
        theirs = TorchSampler(range(n), replicas, rank, shuffle, seed, drop_last)
        ours = DistributedSampler(
            range(n), replicas, rank, shuffle, seed, drop_last, order="torch"
        )
        for sampler in (theirs, ours):
            sampler.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert list(ours) == list(theirs), "torch's does not advance by itself"
        assert (len(ours), ours.num_samples, ours.total_size) == (
            len(theirs),
            theirs.num_samples,
            theirs.total_size,
        )


@settings(deadline=None)
@given(n=st.integers(0, 200), replicas=REPLICAS, shuffle=st.booleans(), drop_last=st.booleans())
def test_our_order_has_torchs_partition(
    n: int, replicas: int, shuffle: bool, drop_last: bool
) -> None:
    """Same lengths and places as torch's over our permutation of the rows."""
    order = (
        Permutation(n, seed=7).at(np.arange(n)).tolist() if n and shuffle else list(range(n))
    )
    for rank in range(replicas):
        theirs = list(
            TorchSampler(range(n), replicas, rank, shuffle=False, drop_last=drop_last)
        )
        ours = DistributedSampler(
            range(n), replicas, rank, shuffle, seed=7, drop_last=drop_last
        )
        assert list(ours) == [order[place] for place in theirs]


@settings(deadline=None)
@given(
    n=st.integers(1, 300),
    replicas=REPLICAS,
    order=ORDERS,
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_exact_reads_every_sample_once(
    n: int, replicas: int, order: Any, shuffle: bool, seed: int
) -> None:
    ranks = samplers(n, replicas, order=order, shuffle=shuffle, seed=seed, tail="exact")
    shares = [list(rank) for rank in ranks]
    assert sorted(itertools.chain(*shares)) == list(range(n))
    assert [len(share) for share in shares] == [len(rank) for rank in ranks]
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    assert all(rank.total_size == n for rank in ranks)


@settings(deadline=None, max_examples=200)
@given(
    n=st.integers(1, 120),
    first=REPLICAS,
    second=REPLICAS,
    stop=st.integers(0, 40),
    epoch=st.integers(0, 3),
    order=ORDERS,
    tail=st.sampled_from(TAILS),
    weighted=st.booleans(),
)
def test_any_number_of_replicas_goes_on_after_any_stop(
    n: int,
    first: int,
    second: int,
    stop: int,
    epoch: int,
    order: Any,
    tail: Tail,
    weighted: bool,
) -> None:
    """D ranks stop after any number of rounds, D' go on: together they read the epoch in its one order."""
    made: dict[str, Any] = {"seed": 11, "order": order}
    if weighted:
        made = {"seed": 11, "weights": np.arange(1, n + 1)}
    ranks = samplers(n, first, tail=tail, **made)
    for rank in ranks:
        rank.set_epoch(epoch)
    iterators = [iter(rank) for rank in ranks]
    before = in_turns(iterators, rounds=stop)
    states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
    if len(before) == stop * first:  # else the last round was incomplete, or the epoch over
        assert all(state == states[0] for state in states)
        # What pads the last round is no position of its own.
        assert (states[0]["epoch"], states[0]["position"]) == (epoch, min(n, len(before)))

    resumed = samplers(n, second, tail=tail, **made)
    for rank in resumed:
        rank.load_state_dict(states[0])
    after = in_turns([iter(rank) for rank in resumed])
    (alone,) = samplers(n, 1, tail="exact", **made)
    alone.set_epoch(epoch)
    expected = list(alone)
    # The first ranks had exhausted the epoch, so the others read the next one.
    if states[0]["epoch"] > epoch:
        assert order == "threefold" or weighted
        alone.set_epoch(epoch + 1)
        before, expected = [], list(alone)
    read = before + after
    assert read == [expected[place % n] for place in range(len(read))]
    if tail == "exact":
        assert len(read) == n
    elif tail == "drop":
        assert n - first - second < len(read) <= n
    else:
        assert n <= len(read) < n + max(first, second)


@pytest.mark.parametrize("order", ["threefold", "torch"])
@pytest.mark.parametrize(("replicas", "batch_size"), [(8, 4), (4, 16), (2, 3), (16, 1)])
def test_a_dataloader_goes_on_with_other_replicas_and_batches(
    order: Any, replicas: int, batch_size: int
) -> None:
    n = 1003
    ranks = samplers(n, 8, order=order, tail="exact", seed=5)
    before: list[int] = []
    for rank in ranks:
        loader = DataLoader(torch.arange(n), batch_size=4, sampler=rank)
        for batch in itertools.islice(loader, 10):
            before += batch.tolist()
    states = [rank.state_dict() for rank in ranks]
    assert all(state == states[0] for state in states)
    assert states[0]["position"] == 8 * 4 * 10
    after: list[int] = []
    for rank in samplers(n, replicas, order=order, tail="exact", seed=5):
        rank.load_state_dict(states[0])
        after += itertools.chain(
            *(batch.tolist() for batch in DataLoader(torch.arange(n), batch_size, sampler=rank))
        )
    assert sorted(before + after) == list(range(n))


@settings(deadline=None)
@given(per_rank=st.integers(1, 3), first=REPLICAS, second=REPLICAS, order=ORDERS)
def test_a_global_batch_is_the_same_set_for_every_number_of_replicas(
    per_rank: int, first: int, second: int, order: Any
) -> None:
    batch = per_rank * first * second
    iterators = [
        [iter(rank) for rank in samplers(500, size, order=order)] for size in (first, second)
    ]
    for _ in range(500 // batch):
        sets = [in_turns(ranks, rounds=batch // len(ranks)) for ranks in iterators]
        assert sets[0] == sets[1]


def test_the_state_counts_every_index_handed_out() -> None:
    (rank,) = samplers(100_000, 1)
    iterator = iter(rank)
    for handed_out in range(3000):
        assert rank.state_dict()["position"] == handed_out
        next(iterator)
    (second,) = samplers(20_000, 4)[2:3]
    for handed_out, _ in enumerate(second):
        assert second.state_dict()["position"] == 4 * (handed_out + 1)


def test_the_epoch_advances_when_an_iterator_is_exhausted() -> None:
    (rank,) = samplers(50, 1)
    epochs = [list(rank) for _ in range(3)]
    assert rank.epoch == 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    rank.set_epoch(1)
    assert list(rank) == epochs[1]
    assert rank.state_dict()["epoch"] == 2


def test_a_break_begins_the_epoch_again_unless_a_state_was_loaded() -> None:
    (rank,) = samplers(50, 1)
    expected = whole_epoch(50)
    for _ in range(2):
        iterator = iter(rank)
        assert [next(iterator) for _ in range(10)] == expected[:10]
    state = rank.state_dict()
    rank.load_state_dict(state)
    assert rank.state_dict() == state
    assert list(rank) == expected[10:]
    assert rank.epoch == 1


def test_set_epoch_wins_and_keeps_the_place_in_its_own_epoch() -> None:
    (rank,) = samplers(50, 1)
    rank.set_epoch(3)
    iterator = iter(rank)
    head = [next(iterator) for _ in range(20)]
    state = rank.state_dict()
    (resumed,) = samplers(50, 1)
    resumed.load_state_dict(state)
    resumed.set_epoch(3)  # as loops do at the head of every epoch
    assert head + list(resumed) == list(iter_of_epoch(3))
    resumed.load_state_dict(state)
    resumed.set_epoch(4)
    assert list(resumed) == list(iter_of_epoch(4))
    iterator = iter(resumed)
    resumed.set_epoch(9)
    list(iterator)  # an iterator of an epoch that was left does not advance the new one
    assert resumed.epoch == 9


def test_an_epoch_before_a_loaded_state_is_refused_until_rows_are_read() -> None:
    (rank,) = samplers(50, 1)
    rank.set_epoch(3)
    next(iter(rank))
    state = rank.state_dict()
    (resumed,) = samplers(50, 1)
    resumed.load_state_dict(state)
    with pytest.raises(ConfigError) as refused:
        resumed.set_epoch(0)  # a loop whose epochs begin at 0 again
    assert str(refused.value) == (
        "set_epoch(0) after a state of epoch 3 was loaded\n"
        "  expected: that epoch or a later one: the rows of earlier epochs would be read again\n"
        "  fix: begin the loop's epochs there: for epoch in range(3, ...)   (it is state['epoch'])"
    )
    assert len(list(resumed)) == 49
    resumed.set_epoch(0)
    assert list(resumed) == whole_epoch(50)


def test_torchs_order_resumed_at_an_epochs_end_begins_the_next_iteration_at_the_head() -> None:
    (rank,) = samplers(10, 1, order="torch")
    epoch = list(rank)
    (resumed,) = samplers(10, 1, order="torch")
    resumed.load_state_dict(rank.state_dict())
    assert [list(resumed) for _ in range(3)] == [[], epoch, epoch]


def test_libraries_take_it_for_torchs_sampler() -> None:
    """Fabric's setup_dataloaders, for one, divides what any other sampler gives among the ranks."""
    assert all(
        isinstance(rank, torch.utils.data.DistributedSampler) for rank in samplers(10, 2)
    )


def iter_of_epoch(epoch: int) -> Iterator[int]:
    (rank,) = samplers(50, 1)
    rank.set_epoch(epoch)
    return iter(rank)


def test_a_state_taken_at_the_end_of_an_epoch() -> None:
    """After the last index the epoch has nothing left; once the iterator is exhausted, the next has begun."""
    ranks = samplers(10, 4, tail="exact")
    iterator = iter(ranks[0])
    for _ in range(3):
        next(iterator)
    assert (ranks[0].state_dict()["epoch"], ranks[0].state_dict()["position"]) == (0, 10)
    ranks[1].load_state_dict(ranks[0].state_dict())
    assert list(ranks[1]) == []
    assert list(iterator) == []
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert (ranks[0].state_dict()["epoch"], ranks[0].state_dict()["position"]) == (1, 0)


@pytest.mark.parametrize("tail", ["exact", "pad", "drop"])
def test_a_position_after_the_end_of_an_epoch_is_refused(tail: Any) -> None:
    """The rows left would be none, without a word; what pads the last round is no position of its own."""
    ranks = samplers(10, 4, tail=tail)
    iterator = iter(ranks[0])
    for _ in range(ranks[0].num_samples):
        next(iterator)
    state = ranks[0].state_dict()
    assert state["position"] == (8 if tail == "drop" else 10)
    (other,) = samplers(10, 1, tail=tail)
    other.load_state_dict(state)
    assert len(list(other)) == 10 - state["position"]
    with pytest.raises(DataError) as refused:
        other.load_state_dict({**state, "position": 11})
    assert refused.value.problems[0].what == "the saved state is at position 11 of epoch 0"


def test_the_newest_of_two_iterators_counts() -> None:
    (rank,) = samplers(10, 1)
    old, new = iter(rank), iter(rank)
    next(new)
    assert list(old) == whole_epoch(10)
    assert (rank.epoch, rank.state_dict()["position"]) == (0, 1)


@pytest.mark.parametrize("epoch", [np.int64(2), torch.tensor(2)])
def test_numbers_of_libraries_become_plain_ones(epoch: Any) -> None:
    """As loops have them: np.arange and tensors for epochs, numpy's integers for seeds and ranks."""
    one = DistributedSampler(range(20), np.int64(2), np.int64(1), seed=np.int64(3))  # type: ignore[arg-type]
    one.set_epoch(epoch)
    next(iter(one))
    state = one.state_dict()
    assert all(
        type(value) is int
        for value in (state["epoch"], state["position"], state["fingerprint"]["seed"])
    )
    plain, again = (DistributedSampler(range(20), 2, 1, seed=3) for _ in range(2))
    plain.set_epoch(2)
    again.load_state_dict(json.loads(json.dumps(state)))
    assert list(again) == list(plain)[1:]


@pytest.mark.parametrize(
    "settings", [{}, {"order": "torch"}, {"weights": [1.0, 2.0, 3.0] * 10}]
)
def test_new_seed_is_a_new_order_and_the_state_says_so(settings: dict[str, Any]) -> None:
    """Also after a first state, which kept the old seed for good. An iterator that is open keeps its order."""
    one, other = (DistributedSampler(range(30), 1, 0, seed=seed, **settings) for seed in (1, 9))
    whole = list(DistributedSampler(range(30), 1, 0, seed=1, **settings))
    opened = iter(one)
    assert next(opened) == whole[0] and one.state_dict()["fingerprint"]["seed"] == 1
    late = iter(one)
    one.seed = 9
    assert [*opened] == whole[1:] and [*late] == whole
    assert one.state_dict() == other.state_dict()
    begun = iter(one)
    assert next(begun) == next(iter(other))
    assert one.state_dict()["fingerprint"]["seed"] == 9 and one.state_dict()["position"] == 1
    with pytest.raises(DataError, match="the saved state has seed = 9, but here seed = 1"):
        DistributedSampler(range(30), 1, 0, seed=1, **settings).load_state_dict(
            one.state_dict()
        )
    third = DistributedSampler(range(30), 1, 0, seed=9, **settings)
    third.load_state_dict(one.state_dict())
    assert list(third) == list(begun)


def test_iterators_opened_before_the_first_index_begin_at_the_loaded_place() -> None:
    """A wrapper that reads ahead may open a sampler twice; only what is read moves the place."""
    whole = whole_epoch(20, seed=4)
    one, loaded = (
        DistributedSampler(range(20), 1, 0, seed=4),
        DistributedSampler(range(20), 1, 0, seed=4),
    )
    iterator = iter(one)
    assert [next(iterator) for _ in range(12)] == whole[:12]
    loaded.load_state_dict(one.state_dict())
    opened = [iter(loaded) for _ in range(3)]
    assert loaded.state_dict() == one.state_dict()
    assert [next(opened[1]) for _ in range(2)] == whole[12:14]
    assert loaded.state_dict()["position"] == 14
    assert list(iter(loaded)) == whole, "after a break the epoch begins again"


def test_weighted_epochs_are_draws_with_replacement() -> None:
    weights = np.array([0.0, 1.0, 2.0, 5.0])
    ranks = samplers(4, 4, weights=weights, num_samples=8000, seed=1)
    assert [len(rank) for rank in ranks] == [2000] * 4
    counts = np.bincount(in_turns([iter(rank) for rank in ranks]), minlength=4)
    assert counts[0] == 0
    # 5 standard deviations of the largest are 217.
    assert np.abs(counts[1:] - [1000, 2000, 5000]).max() < 200
    (alone,) = samplers(4, 1, weights=weights, num_samples=8000, seed=1)
    first, second = list(alone), list(alone)
    assert np.array_equal(np.bincount(first, minlength=4), counts)
    assert first != second


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 2}, "the saved state has seed = 1, but here seed = 2"),
        ({"shuffle": False}, "the saved state has shuffle = True, but here shuffle = False"),
        ({"order": "torch"}, "the saved state has order = threefold, but here order = torch"),
        ({"weights": [1] * 50}, "the saved state has weights = (not set), but here weights = "),
    ],
)
def test_a_state_of_another_order_is_refused(change: dict[str, Any], text: str) -> None:
    (saved,) = samplers(50, 1, seed=1)
    (other,) = samplers(50, 1, **{"seed": 1, **change})
    with pytest.raises(DataError) as raised:
        other.load_state_dict(saved.state_dict())
    assert str(raised.value).startswith(text)
    with pytest.raises(DataError, match="num_rows = 50, but here num_rows = 51"):
        samplers(51, 1, seed=1)[0].load_state_dict(saved.state_dict())


def test_a_state_remembers_the_datas_fingerprint() -> None:
    class Rows(list[int]):
        def __init__(self, fingerprint: str) -> None:
            super().__init__(range(10))
            self.fingerprint = fingerprint

    saved = DistributedSampler(Rows("aa"), 1, 0).state_dict()
    DistributedSampler(Rows("aa"), 2, 1).load_state_dict(saved)
    with pytest.raises(DataError, match="data = aa, but here data = bb"):
        DistributedSampler(Rows("bb"), 1, 0).load_state_dict(saved)


@pytest.mark.parametrize("n", [1000, 10**8, 10**12])
def test_the_first_index_and_a_resume_need_no_table(n: int) -> None:
    next(iter(DistributedSampler(range(n), 8, 3)))
    tracemalloc.start()
    began = time.process_time()
    rank = DistributedSampler(range(n), 8, 3)
    next(iter(rank))
    rank.load_state_dict({**rank.state_dict(), "position": n // 2})
    next(iter(rank))
    spent = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The goal is 1 ms and 10 MiB; a tenth of a second leaves room for a slow machine and none for a table of n.
    assert spent < 0.1
    assert peak < 2**20


def test_torch_order_keeps_four_bytes_a_sample_and_says_so_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sampler_module._torch_order(1000, seed=0).dtype == np.int32
    monkeypatch.setattr(sampler_module, "_MOST_INT32", 99)
    assert sampler_module._torch_order(100, seed=0).dtype == np.int64
    with pytest.warns(
        UserWarning, match="order='torch' keeps 8 bytes for each of 100 samples on every rank"
    ):
        (wide,) = samplers(100, 1, order="torch")
    assert list(wide) == list(TorchSampler(range(100), 1, 0))


def test_a_mesh_of_one_in_a_larger_process_group_is_refused() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = init_mesh(device="cpu")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    try:
        with pytest.raises(
            ConfigError, match="made a mesh of 1, and the process group has 8 ranks"
        ):
            DistributedSampler(range(100))
    finally:
        torch.distributed.destroy_process_group()
        mesh.close()


@pytest.mark.parametrize("rank", range(8))
def test_defaults_come_from_the_dp_axis_of_a_device_mesh(rank: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        mesh = init_device_mesh(
            "cpu", (2, 2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp")
        )
        on_mesh = DistributedSampler(range(100), mesh=mesh)
        on_world = DistributedSampler(range(100))
        with pytest.raises(ConfigError) as raised:
            DistributedSampler(range(100), mesh=mesh["tp"])
    finally:
        torch.distributed.destroy_process_group()
    assert (on_mesh.num_replicas, on_mesh.rank) == (4, rank // 2)
    assert (on_world.num_replicas, on_world.rank) == (8, rank)
    assert str(raised.value) == (
        "the mesh given to DistributedSampler has the dims (tp)\n"
        "  expected: dims among dp, dp_replicate, dp_shard: only these show which ranks read different samples\n"
        "  fix: pass the mesh that threefold.init_mesh returned, or num_replicas= and rank="
    )


def test_defaults_come_from_the_active_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(dp_size=4, dp_rank=2, topology=SimpleNamespace(world_size=8))
    given = DistributedSampler(range(100), mesh=place)
    assert (given.num_replicas, given.rank) == (4, 2)
    monkeypatch.setattr("threefold.mesh.mesh.active_mesh", lambda: place)
    for sampler in (
        DistributedSampler(range(100)),
        DistributedSampler(range(100), num_replicas=4),
    ):
        assert (sampler.num_replicas, sampler.rank) == (4, 2)
    explicit = DistributedSampler(range(100), num_replicas=7, rank=6)
    assert (explicit.num_replicas, explicit.rank) == (7, 6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"rank": 8},
            "DistributedSampler got rank = 8 with num_replicas = 8\n  expected: a rank from 0 to 7\n"
            "  fix: pass this process's place on the dp axis as rank, or leave out both",
        ),
        (
            {"num_replicas": None, "rank": None},
            "DistributedSampler does not know its rank: there is no mesh and no process group\n"
            "  expected: a mesh or a process group first; without one every rank would read every sample\n"
            "  fix: call threefold.init_mesh() before, or pass num_replicas=1, rank=0 for a single process",
        ),
        (
            {"mesh": SimpleNamespace(dp_size=8, dp_rank=0)},
            "DistributedSampler got mesh= together with num_replicas= or rank=\n"
            "  expected: one of them: the mesh's dp axis already gives the number of replicas and the rank\n"
            "  fix: leave out num_replicas and rank",
        ),
        (
            {"order": "random"},
            "order = 'random'\n  expected: threefold or torch\n  fix: order='threefold'",
        ),
        (
            {"tail": "keep"},
            "tail = 'keep'\n  expected: drop, pad or exact\n  fix: tail='exact'",
        ),
        (
            {"drop_last": True, "tail": "exact"},
            "drop_last = True contradicts tail = 'exact'\n"
            "  expected: drop_last=True only with tail='drop' or without tail\n"
            "  fix: leave out drop_last to keep tail='exact'",
        ),
        (
            {"dataset": iter([])},
            "the dataset (list_iterator) has no length\n"
            "  expected: a map-style dataset, with __len__ and __getitem__: the order consists of its indices\n"
            "  fix: pass a map-style dataset, or give a stream to the DataLoader without a sampler",
        ),
        (
            {"weights": [1, 2]},
            "there are 2 weights for 10 samples\n  expected: one weight for each sample of the dataset\n"
            "  fix: pass 10 weights, 0 for samples that must never be drawn",
        ),
        (
            {"weights": [1] * 10, "shuffle": False},
            "weights contradict shuffle = False\n"
            "  expected: draws with replacement, which are random and have no counterpart in torch's sampler\n"
            "  fix: leave out shuffle, or weights",
        ),
        (
            {"weights": [1] * 10, "order": "torch"},
            "weights contradict order = 'torch'\n"
            "  expected: draws with replacement, which are random and have no counterpart in torch's sampler\n"
            "  fix: leave out order, or weights",
        ),
        (
            {"num_samples": 5},
            "num_samples = 5 without weights\n"
            "  expected: a number of draws >= 1, only with weights: without them an epoch is every sample once\n"
            "  fix: leave out num_samples, or pass weights",
        ),
        (
            {"num_samples": 0, "weights": [1] * 10},
            "num_samples = 0\n"
            "  expected: a number of draws >= 1, only with weights: without them an epoch is every sample once\n"
            "  fix: num_samples=10",
        ),
    ],
)
def test_what_contradicts_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        DistributedSampler(**{"dataset": range(10), "num_replicas": 8, "rank": 0, **arguments})
    assert str(raised.value) == text
