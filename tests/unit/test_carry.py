"""The endless order: every sample exactly once an epoch, every batch full but the last, whatever the run's stops."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.data.order.order import Order, Place, last_step
from threefold.data.rows.concat import IGNORED
from threefold.data.sampling.loader import TokenLoader
from threefold.errors import ConfigError, DataError
from unit.test_loader import CountingRows

BATCHES = st.tuples(st.integers(1, 5), st.integers(1, 4))
"""(rows of a dp rank, dp ranks)"""


def order_of(
    num_rows: int, batch: int, *, epochs: int | None = None, shuffle: bool = True
) -> Order:
    return Order(num_rows, batch, seed=3, shuffle=shuffle, tail="carry", epochs=epochs)


def read(order: Order, steps: int, *, dp_size: int, state: Any) -> tuple[list[list[int]], Any]:
    """(rows of each step in global order, -1 where a dp rank had none; the state, the same on all dp ranks)."""
    parts, states = [], []
    for rank in range(dp_size):
        one = TokenLoader(CountingRows(order.num_rows), order, dp_rank=rank, dp_size=dp_size)
        if state is not None:
            one.load_state_dict(state)
        parts.append([batch["indices"].tolist() for batch in islice(one, steps)])
        states.append(json.loads(json.dumps(one.state_dict())))
    assert all(found == states[0] for found in states)
    steps_read = zip(*parts, strict=True)
    return [
        [row for turn in zip(*step, strict=True) for row in turn] for step in steps_read
    ], states[0]


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 40),
    epochs=st.integers(1, 4),
    stops=st.lists(st.tuples(BATCHES, st.integers(0, 6)), max_size=3),
    last=BATCHES,
    shuffle=st.booleans(),
)
def test_every_sample_exactly_epochs_times(
    num_rows: int, epochs: int, stops: list[Any], last: tuple[int, int], shuffle: bool
) -> None:
    """Any stops with other meshes and batches, batches of several epochs too; rows decide where the run ends."""
    state, done, found, full = None, 0, [], []
    for (per_rank, dp_size), wanted in [*stops, (last, None)]:
        order = order_of(num_rows, per_rank * dp_size, epochs=epochs, shuffle=shuffle)
        place = Place(state["epoch"], state["position"]) if state else Place(0, 0)
        end = last_step(order, place, done=done)
        steps = end - done if wanted is None else min(wanted, end - done)
        batches, state = read(order, steps, dp_size=dp_size, state=state)
        full += [len(batch) - batch.count(-1) == order.global_batch for batch in batches]
        found += [row for batch in batches for row in batch if row >= 0]
        done += steps
    assert all(full[:-1]), "a step before the last is short"
    assert state is not None and (state["epoch"], state["position"]) == (epochs, 0)
    assert state["rows_read"] == len(found) == epochs * num_rows
    wanted_order = [
        row for epoch in range(epochs) for row in order.rows_at(epoch, np.arange(num_rows))
    ]
    assert found == wanted_order, (
        "the sequence of an epoch is that of the shuffle, whatever the batches"
    )
    assert set(Counter(found).values()) == {epochs}


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 30),
    batch=st.integers(1, 40),
    steps=st.integers(1, 12),
    epochs=st.integers(1, 5),
)
def test_steps_at_once_are_the_single_steps(
    num_rows: int, batch: int, steps: int, epochs: int
) -> None:
    """The audit's view of many steps, also past the end, where no rows are."""
    order = order_of(num_rows, batch, epochs=epochs)
    places = [order.after(Place(0, 0), step) for step in range(steps + 1)]
    alone = [order.rows(place, 1)[0].tolist() for place in places[:-1]]
    assert order.rows(Place(0, 0), steps).tolist() == alone
    assert places[-1] == min(Place(*divmod(steps * batch, num_rows)), Place(epochs, 0))
    assert [order.num_read(place) for place in places[:-1]] == [
        sum(row >= 0 for row in rows) for rows in alone
    ]
    assert order.num_read(Place(0, 0), steps) == min(steps * batch, epochs * num_rows)
    for before, after in pairwise(places):
        if after < Place(epochs, 0):
            assert order.before(after) == before
    stretches = list(order.stretches(Place(0, 0), steps))
    assert sum(count for _, count, _ in stretches) == order.num_read(Place(0, 0), steps)
    assert all(
        count > 0 and place.position + count <= num_rows for place, count, _ in stretches
    )


def test_short_last_step_has_only_ignored_labels_besides_its_rows() -> None:
    """10 rows in steps of 8 over 4 ranks: the second step has 2 rows, so ranks 2 and 3 have none."""
    order = order_of(10, 8, epochs=1, shuffle=False)
    for rank in range(4):
        one = TokenLoader(CountingRows(10), order, dp_rank=rank, dp_size=4)
        _, short = islice(one, 2)
        assert short["indices"].tolist() == ([8 + rank, -1] if rank < 2 else [-1, -1])
        real = int(rank < 2)
        assert not (short["labels"][:real] == IGNORED).any()
        assert (short["labels"][real:] == IGNORED).all() and short["padding"][real:].all()
        assert short["input_ids"].shape == (2, 4)


@pytest.mark.parametrize(
    ("batch", "steps"), [(10, 10), (20, 5), (5, 20), (7, 15), (64, 2), (250, 1)]
)
def test_rows_decide_where_the_epochs_end(batch: int, steps: int) -> None:
    """100 of 200 rows are done in ten steps of ten; another global batch reads the other 100, not more and not less."""
    order = order_of(100, batch, epochs=2)
    assert last_step(order, Place(1, 0), done=10) == 10 + steps
    assert last_step(order, Place(2, 0), done=10 + steps) == 10 + steps


def test_dropping_order_counts_rows_too() -> None:
    """100 rows: steps of 30 drop 10 an epoch; the run that goes on with 45 in the second epoch makes two of these."""
    first, second = (Order(100, batch, seed=0, shuffle=True, epochs=3) for batch in (30, 45))
    assert last_step(first, Place(0, 0), done=0) == 9
    assert last_step(second, first.after(Place(0, 0), 4), done=4) == 4 + 1 + 2
    assert last_step(second, Place(3, 0), done=9) == 9


def test_batches_that_are_left_out_are_rows_that_are_not_read() -> None:
    order = order_of(100, 16, epochs=2)
    assert last_step(order, Place(0, 0), done=0) == 13
    assert last_step(order, Place(0, 0), done=0, skip=[(3, 4)]) == 11
    assert last_step(order, Place(0, 0), done=0, skip=[(13, 20)]) == 12
    assert last_step(order, Place(0, 0), done=0, skip=[(14, 20)]) == 13


def test_fewer_rows_than_a_batch_are_read_over_several_epochs() -> None:
    order = order_of(3, 8, shuffle=False)
    assert order.rows(Place(0, 0), 2).ravel().tolist() == [0, 1, 2] * 5 + [0]
    assert order.after(Place(0, 0), 2) == Place(5, 1)
    with pytest.raises(ConfigError, match="the data has 0 rows"):
        order_of(0, 8).begin(Place(0, 0))


def test_state_is_refused_where_the_run_began_with_another_tail() -> None:
    def loader(tail: Any) -> TokenLoader:
        order = Order(22, 4, seed=0, shuffle=True, tail=tail)
        return TokenLoader(CountingRows(22), order, dp_rank=0, dp_size=1)

    dropping, carrying = loader("drop").state_dict(), loader("carry").state_dict()
    loader("drop").load_state_dict(dropping)
    loader("carry").load_state_dict(carrying)
    for state, was, now in [(dropping, "drop", "carry"), (carrying, "carry", "drop")]:
        with pytest.raises(DataError) as caught:
            loader(now).load_state_dict(state)
        assert str(caught.value) == (
            f"the saved state has tail = {was}, but here tail = {now}\n"
            "  expected: the same tail: in another order the saved position would repeat some samples and never read "
            "others\n"
            f"  fix: pass the tail that the run began with (--data.tail {was}), or start a new run"
        )


def test_workers_that_read_ahead_of_the_end_change_nothing() -> None:
    """They ask for batches after the last: there are no rows, and nobody takes them."""
    order = order_of(10, 4, epochs=1)
    one = TokenLoader(CountingRows(10), order, dp_rank=0, dp_size=2)
    batches = list(islice(one, 5))
    assert [(batch["indices"] >= 0).sum().item() for batch in batches] == [2, 2, 1, 0, 0]
