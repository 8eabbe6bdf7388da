"""The loader: the same rows a step on every mesh and through every stop, whatever the workers prefetched."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter, deque
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks.spawn import PRELOAD
from threefold.data.order.order import Order
from threefold.data.order.partition import Tail
from threefold.data.rows.concat import IGNORED
from threefold.data.sampling.loader import Batch, TokenLoader, evaluation_batches
from threefold.errors import ConfigError, DataError

SEQ_LEN = 4
DP_SIZES = st.sampled_from([1, 2, 3, 4, 6, 12])


@dataclass(frozen=True)
class CountingRows:
    """Row i holds the tokens 100 i, 100 i + 1, ...; its labels are one to the right."""

    num_rows: int
    fingerprint: str = "counting"
    seq_len: int = SEQ_LEN

    @property
    def store(self) -> Any:
        raise AssertionError("the loader reads rows only")

    report = store

    def rows(self, indices: npt.NDArray[np.integer[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        assert len(indices) and indices.min() >= 0 and indices.max() < self.num_rows
        tokens = indices.astype(np.int64)[:, None] * 100 + np.arange(self.seq_len + 1)
        places = np.broadcast_to(np.arange(self.seq_len), (len(indices), self.seq_len))
        return {
            "input_ids": tokens[:, :-1].copy(),
            "labels": tokens[:, 1:].copy(),
            "position_ids": places.copy(),
            "document_ids": np.zeros_like(places),
        }


def loader(
    num_rows: int, *, batch: int, dp: tuple[int, int] = (0, 1), **keys: Any
) -> TokenLoader:
    """A loader of one dp rank; `dp` is (rank, size)."""
    workers = keys.pop("num_workers", 0)
    order: dict[str, Any] = {"seed": 0, "shuffle": True, "tail": "drop", **keys}
    rows = CountingRows(num_rows)
    return TokenLoader(
        rows, Order(num_rows, batch, **order), dp_rank=dp[0], dp_size=dp[1], num_workers=workers
    )


def indices(batch: Batch) -> list[int]:
    return batch["indices"].tolist()


def read(
    num_rows: int,
    steps: int,
    *,
    batch: int,
    dp_size: int,
    state: dict[str, Any] | None,
    tail: Tail,
) -> Any:
    """(rows of each step over all dp ranks, sorted; the state afterwards, the same on all of them)."""
    per_rank, states = [], []
    for rank in range(dp_size):
        one = loader(num_rows, batch=batch, dp=(rank, dp_size), tail=tail)
        if state is not None:
            one.load_state_dict(state)
        per_rank.append([indices(found) for found in islice(iter(one), steps)])
        states.append(one.state_dict())
    assert all(found == states[0] for found in states)
    assert {len(part) for found in per_rank for part in found} <= {batch // dp_size}
    return [
        sorted(chain.from_iterable(parts)) for parts in zip(*per_rank, strict=True)
    ], states[0]


# --- the same data -----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    num_rows=st.integers(12, 60),
    before=DP_SIZES,
    after=DP_SIZES,
    stop=st.integers(0, 9),
    tail=st.sampled_from(["drop", "pad", "exact"]),
)
def test_steps_read_the_same_rows_over_any_mesh_and_stop(
    num_rows: int, before: int, after: int, stop: int, tail: Tail
) -> None:
    """Ten steps of twelve rows, across the ends of epochs: one process, and D ranks that stop and go on as D'."""
    whole, end = read(num_rows, 10, batch=12, dp_size=1, state=None, tail=tail)
    first, state = read(num_rows, stop, batch=12, dp_size=before, state=None, tail=tail)
    second, end_again = read(
        num_rows, 10 - stop, batch=12, dp_size=after, state=state, tail=tail
    )
    assert first + second == whole
    assert end_again == end


def test_an_epoch_reads_each_row_once_and_the_next_in_another_order() -> None:
    one = loader(24, batch=6)
    orders = [[i for batch in islice(iter(one), 4) for i in indices(batch)] for _ in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(24))
    assert orders[0] != orders[1]
    assert one.epoch == 2 and one.order.steps.per_epoch == 4


def test_order_depends_on_the_seed_and_not_without_shuffle() -> None:
    def first(**keys: Any) -> list[int]:
        return indices(next(iter(loader(1000, batch=8, **keys))))

    assert first(seed=1) == first(seed=1) != first(seed=2)
    assert first(shuffle=False) == list(range(8))
    assert first(shuffle=False, dp=(1, 2)) == [1, 3, 5, 7]


def test_batch_holds_the_rows_that_its_indices_name() -> None:
    batch = next(iter(loader(50, batch=8, dp=(1, 2))))
    expected = CountingRows(50).rows(batch["indices"].numpy())
    assert batch.keys() == {"input_ids", "labels", "position_ids", "indices", "padding"}
    assert not batch["padding"].any()
    for name in ("input_ids", "labels", "position_ids"):
        assert batch[name].dtype == torch.int64 and batch[name].shape == (4, SEQ_LEN)
        assert batch[name].tolist() == expected[name].tolist()


def test_documents_are_handed_out_where_attention_stops_at_them() -> None:
    order = Order(8, 2, seed=0, shuffle=False)
    batch = next(
        iter(TokenLoader(CountingRows(8), order, dp_rank=0, dp_size=1, document_mask=True))
    )
    assert batch["document_ids"].shape == (2, SEQ_LEN)


def test_padding_is_what_belongs_to_no_document() -> None:
    """Places behind a row's documents, and rows that fill up the last step."""

    class Padded(CountingRows):
        def rows(self, indices: Any) -> Any:
            found = super().rows(indices)
            found["document_ids"][:, 3:] = -1
            return found

    order = Order(3, 2, seed=0, shuffle=False, tail="exact")
    batches = list(islice(iter(TokenLoader(Padded(3), order, dp_rank=1, dp_size=2)), 2))
    assert batches[0]["padding"].tolist() == [[False] * 3 + [True] * (SEQ_LEN - 3)]
    assert batches[1]["indices"].tolist() == [-1]
    assert batches[1]["padding"].all()


# --- the same state ----------------------------------------------------------------------------------------------


def test_workers_change_neither_batches_nor_state() -> None:
    """Two workers prefetch; the state counts the batches that the loop took, and no workers go on from it."""
    # A worker that imports torch itself needs seconds.
    multiprocessing.set_forkserver_preload(PRELOAD)
    plain, prefetched = loader(22, batch=4), loader(22, batch=4, num_workers=2)
    ours, theirs = iter(plain), iter(prefetched)
    with closing(cast(Any, theirs)):  # ends the workers
        for step in range(1, 8):  # five steps an epoch
            expected, found = next(ours), next(theirs)
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)
            assert prefetched.state_dict() == plain.state_dict()
            assert prefetched.cursor().epoch * 5 + prefetched.cursor().position // 4 == step
        resumed = loader(22, batch=4)
        resumed.load_state_dict(prefetched.state_dict())
        assert indices(next(iter(resumed))) == indices(next(ours))


def test_state_in_the_middle_counts_what_was_consumed() -> None:
    one = loader(22, batch=4, seed=3)
    assert one.state_dict()["position"] == 0
    batches = iter(one)
    for consumed in range(1, 5):
        next(batches)
        state = one.state_dict()
        assert (state["epoch"], state["position"]) == (0, 4 * consumed)
    assert state["fingerprint"] == {
        "data": "counting",
        "num_rows": 22,
        "seed": 3,
        "shuffle": True,
        "tail": "drop",
    }


@pytest.mark.parametrize("stop", range(12))
def test_any_stop_goes_on_with_the_next_batch(stop: int) -> None:
    """Also at an epoch's end, and through a state that went through JSON."""
    whole = [indices(batch) for batch in islice(iter(loader(22, batch=4)), 12)]
    first, second = loader(22, batch=4), loader(22, batch=4)
    assert [indices(batch) for batch in islice(iter(first), stop)] == whole[:stop]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [indices(batch) for batch in islice(iter(second), 12 - stop)] == whole[stop:]
    assert second.epoch == 2


@settings(deadline=None)
@given(steps=st.integers(0, 40), then=st.integers(0, 9), num_rows=st.integers(4, 30))
def test_leaving_out_is_reading_and_throwing_away(steps: int, then: int, num_rows: int) -> None:
    read_one, moved = loader(num_rows, batch=4), loader(num_rows, batch=4)
    for _ in islice(iter(read_one), steps + then):
        pass
    for _ in islice(iter(moved), steps):
        pass
    if then:
        moved.leave_out([(steps + 1, steps + then)], first_step=steps + 1)
    assert indices(next(iter(moved))) == indices(next(iter(read_one)))
    assert moved.cursor() == read_one.cursor()


def test_loop_that_breaks_goes_on_where_it_left() -> None:
    one = loader(24, batch=6)
    found = [indices(batch) for _ in range(4) for batch in islice(iter(one), 1)]
    assert found == [indices(batch) for batch in islice(iter(loader(24, batch=6)), 4)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "the saved state has seed = 0, but here seed = 1"),
        ({"shuffle": False}, "the saved state has shuffle = True, but here shuffle = False"),
    ],
)
def test_other_order_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError) as caught:
        loader(22, batch=4, **change).load_state_dict(loader(22, batch=4).state_dict())
    assert [problem.what for problem in caught.value.problems] == [named]


def test_other_data_is_refused_by_name() -> None:
    state = loader(22, batch=4).state_dict()
    other = CountingRows(23, fingerprint="other")
    order = Order(23, 4, seed=0, shuffle=True)
    with pytest.raises(DataError) as caught:
        TokenLoader(other, order, dp_rank=0, dp_size=1).load_state_dict(state)
    assert [problem.what for problem in caught.value.problems] == [
        "the saved state has data = counting, but here data = other",
        "the saved state has num_rows = 22, but here num_rows = 23",
    ]


def test_other_batch_and_mesh_are_no_offence() -> None:
    """The state is a place in the order; how many rows a step takes may change there."""
    first = loader(24, batch=4)
    next(iter(first))
    second = loader(24, batch=10, dp=(0, 2))
    second.load_state_dict(first.state_dict())
    rest = [i for batch in islice(iter(loader(24, batch=2)), 1, 12) for i in indices(batch)]
    assert set(indices(next(iter(second)))) <= set(rest)


def test_batch_that_cannot_be_shared_or_filled_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be divided equally among 3 dp ranks"):
        loader(22, batch=4, dp=(0, 3))
    with pytest.raises(ConfigError, match="an epoch has no step"):
        loader(3, batch=4)


# --- evaluation --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(num_rows=st.integers(1, 70), dp_size=st.integers(1, 6), rows_per_rank=st.integers(1, 7))
def test_evaluation_reads_every_row_once_in_equal_batches(
    num_rows: int, dp_size: int, rows_per_rank: int
) -> None:
    """Every dp rank gives as many batches, all of the same size, so that no rank is alone in a collective."""
    found = [
        list(
            evaluation_batches(
                CountingRows(num_rows),
                rows_per_rank=rows_per_rank,
                dp_rank=rank,
                dp_size=dp_size,
            )
        )
        for rank in range(dp_size)
    ]
    assert {len(batches) for batches in found} == {-(-num_rows // (rows_per_rank * dp_size))}
    counted: Counter[int] = Counter()
    for batch in (batch for batches in found for batch in batches):
        assert batch["labels"].shape == (rows_per_rank, SEQ_LEN)
        counted.update(indices(batch))
        for place, index in enumerate(indices(batch)):
            if index == -1:
                assert batch["labels"][place].tolist() == [IGNORED] * SEQ_LEN
                assert (
                    batch["input_ids"][place].tolist()
                    in CountingRows(num_rows).rows(np.arange(num_rows))["input_ids"].tolist()
                )
            else:
                assert batch["labels"][place].tolist() == [
                    100 * index + k for k in range(1, SEQ_LEN + 1)
                ]
    counted.pop(-1, None)
    assert counted == Counter(range(num_rows))


@given(num_rows=st.integers(1, 40), dp_size=st.integers(1, 6), size=st.integers(1, 5))
def test_evaluation_batches_that_are_alike_do_not_depend_on_the_dp_ranks(
    num_rows: int, dp_size: int, size: int
) -> None:
    def read(num_ranks: int) -> list[list[list[int]]]:
        every = CountingRows(num_rows)
        ranks = [
            {"rows_per_rank": size, "dp_rank": rank, "dp_size": num_ranks}
            for rank in range(num_ranks)
        ]
        return [
            [indices(batch) for batch in evaluation_batches(every, **each, alike=True)]
            for each in ranks
        ]

    (alone,), found = read(1), read(dp_size)
    assert [found[number % dp_size][number // dp_size] for number in range(len(alone))] == alone
    assert sum(map(len, found)) == len(alone)
    assert [row for batch in alone for row in batch if row >= 0] == list(range(num_rows))


def test_evaluation_of_a_single_row_over_three_ranks_by_hand() -> None:
    found = [
        list(evaluation_batches(CountingRows(1), rows_per_rank=2, dp_rank=rank, dp_size=3))
        for rank in range(3)
    ]
    assert [[indices(batch) for batch in batches] for batches in found] == [
        [[0, -1]],
        [[-1, -1]],
        [[-1, -1]],
    ]


def test_rows_read_go_on_with_another_global_batch() -> None:
    first, second = loader(50, batch=4), loader(50, batch=6)
    deque(islice(first, 3), maxlen=0)
    second.load_state_dict(first.state_dict())
    next(iter(second))
    assert (first.rows_read, second.rows_read) == (12, 18)
