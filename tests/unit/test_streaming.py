"""Streams: what is promised for them, and what is not, measured."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.data
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.data.sampling.distribute import _replica_of
from threefold.data.sampling.streaming import StreamingLoader
from threefold.errors import ConfigError, DataError


def stream(n: int = 23, *, shards: int = 1, buffer: int = 0) -> IterableDataset:
    """Rows {"i": 0}, {"i": 1}, ..."""
    rows = Dataset.from_dict({"i": list(range(n))}).to_iterable_dataset(num_shards=shards)
    return rows.shuffle(seed=0, buffer_size=buffer) if buffer else rows


def numbers(samples: list[dict[str, int]]) -> list[int]:
    return [sample["i"] for sample in samples]


def loader(dataset: Any, rank: int = 0, size: int = 1, **keys: Any) -> StreamingLoader:
    mesh = SimpleNamespace(dp_rank=rank, dp_size=size)
    return StreamingLoader(dataset, mesh, **{"batch_size": 3, "collate_fn": numbers, **keys})


def flat(batches: Any) -> list[int]:
    return list(chain.from_iterable(batches))


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(1, 40),
    shards=st.integers(1, 6),
    size=st.integers(1, 4),
    buffer=st.sampled_from([0, 5]),
    epoch=st.integers(0, 2),
)
def test_every_sample_once_an_epoch(
    n: int, shards: int, size: int, buffer: int, epoch: int
) -> None:
    read = []
    for rank in range(size):
        one = loader(stream(n, shards=min(shards, n), buffer=buffer), rank, size)
        one.set_epoch(epoch)
        read += flat(one)
    assert sorted(read) == list(range(n))


@settings(deadline=None, max_examples=4)
@given(shards=st.integers(2, 6), workers=st.integers(1, 2), buffer=st.sampled_from([0, 5]))
def test_every_sample_once_with_workers(shards: int, workers: int, buffer: int) -> None:
    ranks = [
        loader(stream(shards=shards, buffer=buffer), rank, 2, num_workers=workers)
        for rank in range(2)
    ]
    assert sorted(chain.from_iterable(map(flat, ranks))) == list(range(23))


@pytest.mark.parametrize("resume", ["replay", "seek"])
def test_loops_random_numbers_do_not_depend_on_passes_begun(resume: str) -> None:
    one = loader(stream(), resume=resume)
    before = torch.get_rng_state()
    next(iter(one))
    again = loader(stream(), resume=resume)
    again.load_state_dict(one.state_dict())
    assert flat(again) == list(range(3, 23))
    assert torch.equal(torch.get_rng_state(), before)


def test_shuffled_stream_has_another_order_in_every_epoch() -> None:
    one = loader(stream(40, shards=4, buffer=20))
    first, second = flat(one), flat(one)
    assert sorted(first) == sorted(second)
    assert first != second
    assert one.epoch == 2
    one.set_epoch(0)
    assert flat(one) == first


@settings(deadline=None, max_examples=40)
@given(
    stop=st.integers(0, 12),
    shards=st.integers(1, 4),
    size=st.integers(1, 2),
    buffer=st.sampled_from([0, 5]),
)
def test_replay_goes_on_at_the_next_batch(
    stop: int, shards: int, size: int, buffer: int
) -> None:
    """Of endless batches, so that the stop is in the first epoch or in a later one."""
    for rank in range(size):
        whole, first, second = (
            loader(stream(shards=shards, buffer=buffer), rank, size) for _ in range(3)
        )
        begun = list(islice(first.endless(), stop))
        state = json.loads(json.dumps(first.state_dict()))
        second.load_state_dict(state)
        assert second.state_dict() == state, "a state that was loaded and not used stays"
        ended = list(islice(second.endless(), 5))
        assert begun + ended == list(islice(whole.endless(), stop + 5))


@pytest.mark.parametrize("resume", ["replay", "seek"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_of_an_unshuffled_stream_is_exact(resume: str, workers: int) -> None:
    keys: dict[str, Any] = {"num_workers": workers, "resume": resume}
    whole = list(loader(stream(shards=4), **keys))
    for stop in (1, 3, len(whole)):
        first, second = loader(stream(shards=4), **keys), loader(stream(shards=4), **keys)
        opened = iter(first)
        begun = [next(opened) for _ in range(stop)]
        second.load_state_dict(first.state_dict())
        assert begun + list(second) == whole
        assert Counter(flat(second)) == Counter(range(23)), "the next epoch is a whole one"


def test_what_seek_loses_of_a_shuffled_stream() -> None:
    """The reason why `replay` is the default: the rows in the buffer are gone."""
    lost = {}
    for resume in ("replay", "seek"):
        first, second = (loader(stream(40, buffer=10), resume=resume) for _ in range(2))
        opened = iter(first)
        begun = [next(opened) for _ in range(4)]
        second.load_state_dict(first.state_dict())
        lost[resume] = 40 - len({*flat(begun), *flat(second)})
    assert lost["replay"] == 0
    assert 0 < lost["seek"] <= 10


def test_epoch_begins_again_after_a_break() -> None:
    for resume in ("replay", "seek"):
        one = loader(stream(), resume=resume)
        state = loader(stream(), resume=resume).state_dict()
        whole = list(one)
        one.set_epoch(0)
        next(iter(one))
        assert list(one) == whole
        one.load_state_dict(state)
        assert list(one) == whole


def test_ranks_may_have_unequal_epochs_but_endless_never_ends() -> None:
    ranks = [loader(stream(7), rank, 2, batch_size=1) for rank in range(2)]
    assert [len(list(rank)) for rank in ranks] == [4, 3]
    assert [len(list(islice(rank.endless(), 20))) for rank in ranks] == [20, 20]


def test_loader_counts_as_distributed() -> None:
    assert _replica_of(loader(stream(), 1, 3)) == (3, 1)


# --- what is refused ---------------------------------------------------------------------------------------------


def problem_of(error: Any) -> tuple[str, str, str]:
    (problem,) = error.value.problems
    return problem.what, problem.expected, problem.fix


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": 3}, "num_replicas = 2, but here num_replicas = 3"),
        ({"rank": 1}, "rank = 0, but here rank = 1"),
        ({"num_workers": 1}, "num_workers = 0, but here num_workers = 1"),
        ({"batch_size": 4}, "batch_size = 3, but here batch_size = 4"),
        ({"resume": "seek"}, "resume = replay, but here resume = seek"),
    ],
)
def test_state_of_another_mesh_is_refused(settings: dict[str, Any], named: str) -> None:
    state = loader(stream(), 0, 2).state_dict()
    with pytest.raises(DataError) as caught:
        loader(stream(), **{"rank": 0, "size": 2, **settings}).load_state_dict(state)
    assert problem_of(caught)[0] == f"the saved state has {named}"


def test_state_of_a_stream_that_is_shuffled_without_a_seed_is_refused() -> None:
    """Another process would read the epoch in another order, and pass over other rows."""
    first, second = (loader(stream().shuffle(buffer_size=5).map(dict)) for _ in range(2))
    next(iter(first))
    with pytest.raises(DataError, match="the saved state has shuffles = "):
        second.load_state_dict(first.state_dict())


def test_data_with_indices_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        loader(Dataset.from_dict({"i": [1]}))  # type: ignore[arg-type]
    assert problem_of(caught) == (
        "StreamingLoader got a Dataset",
        "an IterableDataset of datasets or of torch",
        "threefold.distribute(DataLoader(dataset, ...)) for data with indices, or "
        "datasets.load_dataset(..., streaming=True)",
    )


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows {"i": 0}, {"i": 1}, ... of torch's kind."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter([{"i": number} for number in range(self.size)])


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_of_torch_is_shared_by_rows_and_replayed(workers: int) -> None:
    ranks = [loader(Stream(23), rank, 2, num_workers=workers) for rank in range(2)]
    read = [list(rank) for rank in ranks]
    assert read[0][0] == [0, 2, 4] and read[1][0] == [1, 3, 5]
    # Row 22 has no companion for the other rank, so that both make as many steps.
    assert sorted(chain.from_iterable(map(flat, read))) == list(range(22)) and len(
        read[0]
    ) == len(read[1])
    begun = iter(ranks[0])
    next(begun), next(begun)
    state = json.loads(json.dumps(ranks[0].state_dict()))
    later = loader(Stream(23), 1, 2, num_workers=workers)  # one state for all ranks
    later.load_state_dict(state)
    assert list(later) == read[1][2:]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            {"num_workers": 2},
            (
                "num_workers = 2, and a Stream is a torch stream",
                "one worker at most: each would repeat the whole stream",
                "num_workers=1",
            ),
        ),
        (
            {"resume": "seek"},
            (
                "resume = 'seek', and a Stream is a torch stream",
                "a stream of the datasets library, which can start anywhere",
                "resume='replay'",
            ),
        ),
    ],
    ids=["workers", "seek"],
)
def test_stream_of_torch_refuses_what_it_cannot_have(
    settings: dict[str, Any], wanted: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        loader(Stream(3), **settings)
    assert problem_of(caught) == wanted


def test_stream_that_is_split_already_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        loader(split_dataset_by_node(stream(), rank=0, world_size=2))
    assert problem_of(caught) == (
        "the stream is already split by split_dataset_by_node",
        "an unsplit stream: split twice, ranks would read only a part of their part",
        "leave split_dataset_by_node out",
    )


def test_seek_without_torchdata_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes an import fail as if the module were not installed.
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(ConfigError) as caught:
        loader(stream(), resume="seek")
    assert problem_of(caught) == (
        "resume = 'seek' without torchdata",
        "torchdata's StatefulDataLoader, which asks the stream and its workers for their position",
        "pip install 'threefold[streaming]'   (or resume='replay')",
    )


def test_unknown_resume_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        loader(stream(), resume="jump")
    assert problem_of(caught) == ("resume = 'jump'", "replay or seek", "resume='replay'")


def test_epoch_without_a_batch_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        next(loader(stream(2), 1, 2, drop_last=True).endless())
    assert problem_of(caught) == (
        "an epoch of the stream has no batch on dp rank 1 of 2",
        "at least one batch per dp rank and epoch",
        "fewer dp ranks, a smaller batch_size, or no drop_last",
    )
