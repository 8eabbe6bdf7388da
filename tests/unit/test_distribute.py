"""`distribute`: every sample once, equal steps, and a state that is the loop's, on any ranks and with any workers."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import DistributedSampler as TorchSampler
from transformers import BatchEncoding

import threefold
from threefold.data.order.partition import Tail
from threefold.data.sampling.distribute import (
    DistributedLoader,
    distribute,
    refuse_other_dataset,
    require_distributed,
)
from threefold.data.sampling.sampler import DistributedSampler
from threefold.errors import ConfigError, DataError

RANKS = st.integers(1, 6)


class Labelled(Dataset[dict[str, torch.Tensor]]):
    """Sample i: its number, and two labels."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index), "labels": torch.tensor([index, index + 1])}


def place(rank: int, size: int) -> Any:
    return SimpleNamespace(dp_rank=rank, dp_size=size)


def per_rank(loader: DataLoader[Any], size: int, **settings: Any) -> list[DistributedLoader]:
    return [distribute(loader, place(rank, size), **settings) for rank in range(size)]


def numbers(n: int, **settings: Any) -> DataLoader[Any]:
    """A loader whose batches are lists of the samples' numbers."""
    return DataLoader(range(n), collate_fn=list, **settings)  # type: ignore[arg-type]


def read(ranks: list[Any], steps: int | None = None) -> list[list[Any]]:
    """[rank][step] batches; all ranks make the same number of steps."""
    batches = [list(islice(rank, steps)) for rank in ranks]
    assert len({len(rank) for rank in batches}) == 1
    return batches


def in_turns(batches: list[list[list[int]]]) -> list[int]:
    """What the ranks' batches hold in global order: in a step one sample of each rank, round after round."""
    steps = zip(*batches, strict=True)
    return [index for step in steps for turn in zip(*step, strict=True) for index in turn]


def real(batch: dict[str, torch.Tensor]) -> list[int]:
    """Numbers of the samples of a batch that are not ignored."""
    return [
        int(i)
        for i, labels in zip(batch["id"], batch["labels"], strict=True)
        if int(labels[0]) != -100
    ]


# --- who reads what ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 60),
    size=RANKS,
    batch=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_torch_order_gives_the_batches_of_torchs_sampler(
    n: int, size: int, batch: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    ours = per_rank(
        numbers(n, batch_size=batch, shuffle=shuffle, drop_last=drop_last),
        size,
        seed=3,
        order="torch",
    )
    for rank, loader in enumerate(ours):
        sampler = TorchSampler(range(n), size, rank, shuffle, 3, drop_last)  # type: ignore[arg-type]
        theirs = numbers(n, batch_size=batch, sampler=sampler, drop_last=drop_last)
        sampler.set_epoch(epoch)
        loader.set_epoch(epoch)
        assert list(loader) == list(theirs)
        assert len(loader) == len(theirs)


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 60),
    size=RANKS,
    batch=st.integers(1, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_exact_counts_every_sample_once(
    n: int, size: int, batch: int, shuffle: bool, seed: int
) -> None:
    loader = DataLoader(Labelled(n), batch_size=batch, shuffle=shuffle)
    batches = read(per_rank(loader, size, tail="exact", seed=seed))
    counted = chain.from_iterable(real(found) for found in chain.from_iterable(batches))
    assert sorted(counted) == list(range(n))
    steps = math.ceil(math.ceil(n / size) / batch)
    assert len(batches[0]) == len(distribute(loader, place(0, size), tail="exact")) == steps
    rows = [[len(found["id"]) for found in rank] for rank in batches]
    assert all(found == rows[0] for found in rows), "batches of one size on all ranks"


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 60),
    sizes=st.tuples(RANKS, RANKS),
    rows=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stop=st.integers(0, 12),
    tail=st.sampled_from(["drop", "pad", "exact"]),
    shuffle=st.booleans(),
)
def test_stop_anywhere_and_go_on_with_other_ranks_and_rows(
    n: int, sizes: tuple[int, int], rows: tuple[int, int], stop: int, tail: Tail, shuffle: bool
) -> None:
    """Before and after the stop together: every sample once (`exact`), at most once (`drop`), at least once (`pad`)."""
    before, after = (
        DataLoader(Labelled(n), batch_size=count, shuffle=shuffle) for count in rows
    )
    first = per_rank(before, sizes[0], tail=tail)
    begun = read([iter(rank) for rank in first], stop)
    states = [rank.state_dict() for rank in first]
    assert all(state == states[0] for state in states)
    assert json.loads(json.dumps(states[0])) == states[0]
    second = per_rank(after, sizes[1], tail=tail)
    for rank in second:
        rank.load_state_dict(states[0])
    ended = read(list(second)) if states[0]["epoch"] == 0 else []
    counted = Counter(
        chain.from_iterable(real(found) for found in chain.from_iterable([*begun, *ended]))
    )
    assert set(counted) <= set(range(n))
    if tail == "exact":
        assert counted == Counter(range(n))
    elif tail == "pad":
        assert set(counted) == set(range(n))
    else:
        assert all(times == 1 for times in counted.values())
        assert n - len(counted) < sizes[0] + sizes[1]


@settings(deadline=None, max_examples=6)
@given(
    n=st.integers(24, 40),  # an epoch has more steps than the stop
    size=st.integers(1, 3),
    workers=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    stop=st.integers(1, 3),
    persistent=st.booleans(),
)
def test_state_counts_what_the_loop_had_with_any_number_of_workers(
    n: int, size: int, workers: tuple[int, int], stop: int, persistent: bool
) -> None:
    alone = read(per_rank(numbers(n, batch_size=2, shuffle=True), size))
    begun: list[list[Any]] = []
    ended: list[list[Any]] = []
    for rank in range(size):
        first, second = (
            distribute(
                numbers(
                    n,
                    batch_size=2,
                    shuffle=True,
                    num_workers=count,
                    persistent_workers=persistent and count > 0,
                ),
                place(rank, size),
            )
            for count in workers
        )
        begun.append(list(islice(first, stop)))
        second.load_state_dict(first.state_dict())
        ended.append(list(second))
        assert list(second) == list(
            set_to(distribute(numbers(n, batch_size=2, shuffle=True), place(rank, size)), 1)
        )
    assert [first + second for first, second in zip(begun, ended, strict=True)] == alone


@pytest.mark.parametrize("workers", [0, 1])
def test_loops_random_numbers_do_not_depend_on_passes_begun(workers: int) -> None:
    loader = distribute(numbers(6, num_workers=workers), place(0, 1))
    before = torch.get_rng_state()
    for _ in range(2):
        assert len(list(loader)) == 6
    assert torch.equal(torch.get_rng_state(), before)


class Seeds(Dataset[int]):
    """The seed of the worker that reads a sample."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


def test_workers_draw_other_numbers_in_each_epoch_and_on_each_rank() -> None:
    plain = DataLoader(Seeds(), batch_size=1, num_workers=1)
    loaders = [*per_rank(plain, 2), set_to(distribute(plain, place(1, 2)), 1)]
    first, second, resumed = ([seed for _ in range(2) for seed in each] for each in loaders)
    assert len({int(seed) for seed in first + second}) == 4
    assert resumed[0] == second[1], "those of its epoch"


def set_to(loader: DistributedLoader, epoch: int) -> DistributedLoader:
    loader.set_epoch(epoch)
    return loader


def test_global_batches_are_the_same_on_any_number_of_ranks() -> None:
    whole = in_turns(
        read(per_rank(numbers(48, batch_size=12, shuffle=True, drop_last=True), 1))
    )
    for size in (2, 3, 4, 6):
        ranks = per_rank(numbers(48, batch_size=12 // size, shuffle=True, drop_last=True), size)
        assert in_turns(read(ranks)) == whole


def test_weights_are_drawn_as_the_sampler_draws_them() -> None:
    weights = [0.0, 1.0, 2.0, 0.0, 5.0]
    sampler = WeightedRandomSampler(weights, num_samples=400)
    ranks = per_rank(numbers(5, batch_size=4, sampler=sampler), 2, seed=1)
    drawn = Counter(in_turns(read(ranks)))
    assert drawn.total() == 400
    assert set(drawn) == {1, 2, 4}
    assert drawn[4] > drawn[2] > drawn[1]
    alone = threefold.DistributedSampler(
        range(5), 1, 0, seed=1, weights=weights, num_samples=400
    )
    assert Counter(alone) == drawn


# --- epochs and states -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_is_the_loops_and_not_the_workers(workers: int) -> None:
    loader = distribute(
        numbers(12, batch_size=2, shuffle=True, num_workers=workers), place(0, 1)
    )
    epochs = [[list(batch) for batch in loader] for _ in range(2)]
    assert sorted(chain(*epochs[0])) == sorted(chain(*epochs[1])) == list(range(12))
    assert epochs[0] != epochs[1]
    loader.set_epoch(0)
    # Two batches before the end the workers have all of the epoch's indices.
    assert list(islice(loader, 5)) == epochs[0][:5]
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 10)
    assert list(loader) == epochs[0], "after a break the epoch begins again"
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def test_set_epoch_wins_and_the_sampler_is_torchs_place_for_it() -> None:
    loader = distribute(numbers(10, batch_size=2, shuffle=True), place(0, 1))
    expected = [list(set_to(loader, epoch)) for epoch in range(3)]
    for epoch in (2, 0, 1):
        loader.sampler.set_epoch(epoch)
        next(iter(loader))
        assert list(loader) == expected[epoch]
    opened = iter(set_to(loader, 0))
    loader.set_epoch(2)
    assert list(opened) == expected[0], "an open iterator stays in its epoch"
    assert loader.state_dict()["epoch"] == 2
    assert list(loader) == expected[2]


def test_another_loader_over_its_sampler_is_refused() -> None:
    """accelerator.prepare reads a part of what the sampler gives, which is a share already."""
    (loader,) = per_rank(numbers(12, batch_size=2), 1)
    with pytest.raises(ConfigError, match="would read only a part of this rank's share"):
        next(iter(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)))


@pytest.mark.parametrize("split_batches", [False, True])
def test_a_share_is_not_divided_again(split_batches: bool) -> None:
    """What accelerator.prepare makes of a loader with the sampler, on two processes: half of the rows were read."""
    from accelerate.data_loader import BatchSamplerShard

    def shared(num_replicas: int) -> BatchSamplerShard:
        sampler = DistributedSampler(range(12), num_replicas=num_replicas, rank=0)
        batches = BatchSampler(sampler, 2, drop_last=False)
        return BatchSamplerShard(batches, 2, 0, split_batches=split_batches)

    with pytest.raises(ConfigError, match="would read only a part of this rank's share"):
        next(iter(shared(2)))
    assert sum(map(len, shared(1))) == 6, "one share of one is the whole, and may be divided"


def test_state_between_epochs_goes_on_at_the_next() -> None:
    loader, again = (
        distribute(numbers(7, batch_size=2, shuffle=True), place(0, 1)) for _ in range(2)
    )
    opened = iter(loader)
    for _ in range(len(loader)):
        next(opened)
    at_the_end = loader.state_dict()
    assert next(opened, None) is None
    again.load_state_dict(at_the_end)
    assert list(again) == []
    assert list(again) == list(loader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("used", [0, 1])
def test_loader_opened_twice_after_a_state_was_loaded(workers: int, used: int) -> None:
    """Either iterator gives the rest, and the state counts the one that the loop reads."""
    one, again = (
        distribute(numbers(40, batch_size=4, num_workers=workers), place(0, 1))
        for _ in range(2)
    )
    begun = iter(one)
    head = [next(begun) for _ in range(6)]
    again.load_state_dict(one.state_dict())
    iterators = [iter(again), iter(again)]
    found = [next(iterators[used]), next(iterators[used])]
    assert again.state_dict()["position"] == 32
    found += iterators[used]
    assert head + found == [*numbers(40, batch_size=4)]
    assert (again.state_dict()["epoch"], again.state_dict()["position"]) == (1, 0)


def test_state_of_another_order_is_refused() -> None:
    state = distribute(numbers(7, shuffle=True), place(0, 1), seed=1).state_dict()
    with pytest.raises(DataError, match="seed = 1, but here seed = 0"):
        distribute(numbers(7, shuffle=True), place(0, 1)).load_state_dict(state)


# --- what is kept of the loader ----------------------------------------------------------------------------------


def start_worker(worker: int) -> None:
    """A `worker_init_fn`; it finds the user's own dataset."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.offset = 100


class Shifted(Dataset[int]):
    offset = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def test_other_arguments_are_kept() -> None:
    generator = torch.Generator()
    dataset = Shifted()
    loader = DataLoader(
        dataset,
        batch_size=2,
        num_workers=1,
        collate_fn=sum,
        drop_last=True,
        timeout=60,
        worker_init_fn=start_worker,
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    found = distribute(loader, place(1, 2))
    assert isinstance(found, DataLoader)
    assert isinstance(found.sampler, threefold.DistributedSampler)
    assert found.dataset is dataset
    assert found.generator is generator
    assert (found.batch_size, found.num_workers, found.drop_last, found.timeout) == (
        2,
        1,
        True,
        60,
    )
    assert (found.prefetch_factor, found.persistent_workers, found.collate_fn) == (3, True, sum)
    assert found.worker_init_fn is start_worker
    assert found.multiprocessing_context.get_start_method() == "fork"
    # dp rank 1 of 2 has the samples 1, 3 and 5, and drop_last leaves one batch.
    assert list(found) == [101 + 103]
    assert isinstance(loader.sampler, SequentialSampler), "the user's loader is left as it is"


def test_samples_that_are_batches_already() -> None:
    loader = DataLoader(range(7), batch_size=None)  # type: ignore[arg-type]
    assert in_turns([[list(rank)] for rank in per_rank(loader, 2, tail="drop")]) == list(
        range(6)
    )


# --- exact tails -------------------------------------------------------------------------------------------------


def test_row_without_a_sample_is_marked_in_a_copy() -> None:
    samples = [{"labels": torch.tensor([i, i])} for i in range(3)]
    loader = DataLoader(samples, batch_size=2, collate_fn=BatchEncodingOf())  # type: ignore[arg-type]
    (found,) = list(distribute(loader, place(1, 2), tail="exact"))
    assert isinstance(found, BatchEncoding)
    assert found["labels"].tolist() == [[1, 1], [-100, -100]]
    assert [sample["labels"].tolist() for sample in samples] == [[0, 0], [1, 1], [2, 2]]


class BatchEncodingOf:
    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> BatchEncoding:
        return BatchEncoding({"labels": torch.stack([sample["labels"] for sample in samples])})


def weigh(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers, weights) with the last weight 0."""
    number, weight = batch
    weight = weight.clone()
    weight[-1] = 0
    return number, weight


@pytest.mark.parametrize(("n", "size"), [(1, 3), (5, 3), (6, 3), (7, 3)])
def test_batches_of_another_form_are_ignored_as_the_caller_says(n: int, size: int) -> None:
    loader = DataLoader([(i, 1.0) for i in range(n)], batch_size=2)  # type: ignore[arg-type]
    batches = read(per_rank(loader, size, tail="exact", ignore_last_row=weigh))
    counted = Counter(
        int(i)
        for number, weight in chain(*batches)
        for i, w in zip(number, weight, strict=True)
        if float(w)
    )
    assert counted == Counter(range(n))


EXPECTED_LABELS = (
    "a dict with integer `labels`, one row for each sample: a dp rank without a sample in the last round reads an "
    "extra row, which labels of -100 mark as ignored"
)


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        ([(0, 1)] * 5, "a list"),
        ([{"x": 0}] * 5, "a dict of x"),
        ([{"x": 0, "labels": "no"}] * 5, "a dict of x, labels whose labels are a list"),
        (
            [{"labels": 0.5}] * 5,
            "a dict whose labels are torch.float64, for which -100 is an ordinary value",
        ),
    ],
)
def test_batch_that_cannot_be_ignored_is_refused_on_every_rank_at_once(
    samples: list[Any], found: str
) -> None:
    loader = DataLoader(samples, batch_size=2)  # type: ignore[arg-type]
    for rank in per_rank(loader, 2, tail="exact"):
        with pytest.raises(ConfigError) as caught:
            next(iter(rank))
        (problem,) = caught.value.problems
        assert problem.what == f"tail = 'exact', and the loader's batch is {found}"
        assert problem.expected == EXPECTED_LABELS
        assert problem.fix.startswith(
            "distribute(loader, tail='exact', ignore_last_row=FUNCTION)"
        )
    assert len(list(distribute(loader, place(0, 5), tail="exact"))) == 1, "nothing to ignore"


def test_labels_that_are_no_row_a_sample_are_refused() -> None:
    def packed(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {"labels": torch.zeros(1, 10, dtype=torch.int64)}

    loader = DataLoader(Labelled(5), batch_size=2, collate_fn=packed)
    with pytest.raises(ConfigError, match=r"labels have the shape \[1, 10\] for 2 samples"):
        next(iter(distribute(loader, place(0, 2), tail="exact")))


@pytest.mark.parametrize("shuffle", [False, True])
def test_batch_sampler_of_torch_is_the_loader_it_stands_for(shuffle: bool) -> None:
    sampler: Any = RandomSampler(range(11)) if shuffle else SequentialSampler(range(11))
    plain: Any = DataLoader(range(11), batch_size=2, shuffle=shuffle, drop_last=True)  # type: ignore[arg-type]
    batches: Any = DataLoader(range(11), batch_sampler=BatchSampler(sampler, 2, True))  # type: ignore[arg-type]
    for rank in range(2):
        wanted, found = (distribute(each, place(rank, 2)) for each in (plain, batches))
        assert [batch.tolist() for batch in found] == [batch.tolist() for batch in wanted]
        assert found.state_dict() == wanted.state_dict()


# --- what is refused ---------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter(())


DATA = Labelled(6)


@pytest.mark.parametrize(
    ("loader", "what", "fix"),
    [
        ([1, 2], "distribute got a list", "threefold.distribute(DataLoader("),
        (
            DataLoader(Stream()),
            "the loader's dataset (Stream) is a stream",
            "threefold.data.sampling.streaming.StreamingLoader",
        ),
        (
            OwnLoader(DATA),
            "distribute got a OwnLoader, which has its own iteration",
            "pass the DataLoader that",
        ),
        (
            distribute(DataLoader(DATA), place(0, 2)),
            "distribute got a DistributedLoader, which has its own iteration",
            "pass the DataLoader that",
        ),
        (
            DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]),
            "the loader has a batch_sampler (list)",
            "without batch_sampler",
        ),
        (
            DataLoader(DATA, sampler=TorchSampler(DATA, 2, 0)),
            "the loader already has a distributed sampler (DistributedSampler)",
            "build it with shuffle=True or False and no sampler",
        ),
        (
            DataLoader(DATA, sampler=[0, 1]),
            "that cannot be distributed: list",
            "shuffle=True instead",
        ),
        (
            DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True, num_samples=4)),
            "that cannot be distributed: RandomSampler with replacement=True, num_samples=4",
            "shuffle=True instead",
        ),
        (
            DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 6, 3, replacement=False)),
            "that cannot be distributed: WeightedRandomSampler with replacement=False, num_samples=3",
            "shuffle=True instead",
        ),
        (
            DataLoader(DATA, num_workers=2, in_order=False),
            "the loader has in_order = False",
            "leave in_order out",
        ),
    ],
)
def test_loader_that_cannot_be_distributed(loader: Any, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        distribute(loader, place(0, 2))
    (problem,) = caught.value.problems
    assert what in problem.what
    assert problem.expected
    assert fix in problem.fix


def test_settings_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ConfigError, match="drop_last = True contradicts tail = 'exact'"):
        distribute(DataLoader(DATA, drop_last=True), place(0, 2), tail="exact")
    with pytest.raises(ConfigError, match="ignore_last_row has no effect with tail = None"):
        distribute(DataLoader(DATA), place(0, 2), ignore_last_row=weigh)
    with pytest.raises(ConfigError, match="does not know its rank"):
        distribute(DataLoader(DATA))


def test_one_process_may_train_with_any_loader() -> None:
    require_distributed(DataLoader(DATA))
    require_distributed([1, 2])


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_without_batches_resumes_too(workers: int) -> None:
    """With batch_size=None torch asks the sampler for an iterator more often than it reads."""
    first, second = (
        distribute(DataLoader(range(12), batch_size=None, num_workers=workers), place(0, 1))
        for _ in range(2)
    )
    read = [int(sample) for sample in islice(iter(first), 3)]
    second.load_state_dict(first.state_dict())
    assert read + [int(sample) for sample in second] == list(range(12))


class _Apart:
    """A mesh of two ranks, of which the other has described its dataset."""

    def __init__(self, other: Any) -> None:
        self.other: list[Any] = []
        refuse_other_dataset(other, SimpleNamespace(decide=self._note))  # type: ignore[arg-type]

    def _note(self, name: str, part: Any, conclude: Any) -> list[Any]:
        self.other = [part]
        return [part]

    def decide(self, name: str, part: Any, conclude: Any) -> Any:
        return conclude([*self.other, part])


class _Rows(Dataset[Any]):
    """A program's own dataset, which counts what is read."""

    def __init__(self, first: int) -> None:
        self.first, self.read = first, 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return self.first + index


def _changed(rows: dict[str, list[int]]) -> dict[str, list[float]]:
    return {"x": [random.random() for _ in rows["x"]]}


STORED = datasets.Dataset.from_dict({"x": [[1], [2], [3], [4]]})


@pytest.mark.parametrize(
    ("rows", "others"),
    [
        ([{"x": 1}, {"x": 2}], [{"x": 1}, {"x": 3}]),
        ([{"x": torch.ones(2)}], [{"x": torch.zeros(2)}]),
        (TensorDataset(torch.arange(4)), TensorDataset(torch.arange(1, 5))),
        (STORED, STORED.select([3, 2, 1, 0])),
        (Subset(_Rows(0), [0, 1, 2]), Subset(_Rows(0), [0, 1, 3])),
        (_Rows(0), Subset(_Rows(0), [0, 1, 3])),
    ],
    ids=["a list", "tensors", "a TensorDataset", "stored rows", "another split", "lengths"],
)
def test_ranks_with_other_rows_are_refused(rows: Any, others: Any) -> None:
    refuse_other_dataset(rows, _Apart(rows))  # type: ignore[arg-type]
    with pytest.raises(DataError) as error:
        refuse_other_dataset(rows, _Apart(others))  # type: ignore[arg-type]
    assert str(error.value) == (
        "the dataset does not have the same rows on ranks 0 and 1\n"
        "  expected: the same rows in the same order on every rank: each dp rank is given its share of them\n"
        "  fix: give every rank the whole dataset, split at random with the same seed: its loader takes the share"
    )


def test_rows_that_only_a_program_can_read_are_not_read() -> None:
    """Nor are those that it draws at random: a false refusal would be worse."""
    own, drawn = _Rows(0), STORED.with_transform(_changed)
    refuse_other_dataset(own, _Apart(_Rows(1)))  # type: ignore[arg-type]
    assert own.read == 0
    before = random.getstate()
    refuse_other_dataset(drawn, _Apart(drawn))  # type: ignore[arg-type]
    assert random.getstate() == before and drawn[0] != drawn[0]
    unwritable = [[object()], [object()]]
    refuse_other_dataset(unwritable, _Apart([[object()], [object()]]))  # type: ignore[arg-type]
    refuse_other_dataset([], _Apart([]))  # type: ignore[arg-type]
