"""The partition: every position to one dp rank, the same set of a step on every mesh, exact tails."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.data.order import partition
from threefold.data.order.partition import StepRows, Steps, Tail
from threefold.errors import ConfigError

DP_SIZES = st.integers(1, 9)
TAILS = st.sampled_from(partition.TAILS)


def step_of_all(
    position: int, *, num_rows: int, global_batch: int, dp_size: int, tail: Tail
) -> list[StepRows]:
    return [
        Steps(num_rows, global_batch, tail).of_rank(position, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]


def read_in_order(shares: list[StepRows]) -> list[int]:
    """The positions of one step as the dp ranks take turns."""
    rounds = max(len(rows.positions) for rows in shares)
    return [
        int(rows.positions[k])
        for k in range(rounds)
        for rows in shares
        if k < len(rows.positions)
    ]


@given(step=st.integers(0, 10**15), per_rank=st.integers(1, 8), dp_size=DP_SIZES)
def test_dp_ranks_take_turns_in_a_step(step: int, per_rank: int, dp_size: int) -> None:
    batch = per_rank * dp_size
    shares = step_of_all(
        step * batch,
        num_rows=(step + 1) * batch,
        global_batch=batch,
        dp_size=dp_size,
        tail="drop",
    )
    assert {len(share.positions) for share in shares} == {per_rank}
    assert read_in_order(shares) == list(range(step * batch, (step + 1) * batch))


@given(num_rows=st.integers(1, 300), per_rank=st.integers(1, 5), dp_size=DP_SIZES, tail=TAILS)
def test_an_epoch_is_covered_once_with_equal_steps(
    num_rows: int, per_rank: int, dp_size: int, tail: Tail
) -> None:
    batch = per_rank * dp_size
    steps = Steps(num_rows, batch, tail).left(0)
    read: list[int] = []
    for step in range(steps):
        shares = step_of_all(
            step * batch, num_rows=num_rows, global_batch=batch, dp_size=dp_size, tail=tail
        )
        assert {len(rows.positions) + rows.num_ignored for rows in shares} == {per_rank}
        assert tail == "exact" or not any(rows.num_ignored for rows in shares)
        read += read_in_order(shares)
    if tail == "drop":
        assert read == list(range(num_rows // batch * batch))
    elif tail == "exact":
        assert read == list(range(num_rows))
    else:
        assert read == [
            position % num_rows for position in range(-(-num_rows // batch) * batch)
        ]


@given(
    num_rows=st.integers(1, 200),
    first=st.tuples(st.integers(1, 4), DP_SIZES),
    second=st.tuples(st.integers(1, 4), DP_SIZES),
    stop=st.integers(0, 12),
    tail=TAILS,
)
def test_another_mesh_and_batch_go_on_where_the_first_stopped(
    num_rows: int, first: tuple[int, int], second: tuple[int, int], stop: int, tail: Tail
) -> None:
    """Rows read before and after any stop, over any dp sizes and batches: the epoch in order, nothing twice."""
    position, read = 0, []
    for number, (per_rank, dp_size) in enumerate((first, second)):
        batch, made = per_rank * dp_size, 0
        while Steps(num_rows, batch, tail).left(position) and (number or made < stop):
            read += read_in_order(
                step_of_all(
                    position, num_rows=num_rows, global_batch=batch, dp_size=dp_size, tail=tail
                )
            )
            position += batch
            made += 1
    wrapped = [place % num_rows for place in range(len(read))]
    assert read == wrapped
    assert tail != "exact" or len(read) == num_rows
    assert tail != "drop" or len(read) <= num_rows < len(read) + second[0] * second[1]
    assert tail != "pad" or len(read) >= num_rows


@given(
    per_rank=st.integers(1, 4),
    first=DP_SIZES,
    second=DP_SIZES,
    num_rows=st.integers(1, 200),
    tail=TAILS,
)
def test_a_step_is_the_same_set_on_every_mesh(
    per_rank: int, first: int, second: int, num_rows: int, tail: Tail
) -> None:
    batch = per_rank * first * second
    for position in range(0, num_rows - batch + 1, batch):
        sets = [
            read_in_order(
                step_of_all(
                    position, num_rows=num_rows, global_batch=batch, dp_size=size, tail=tail
                )
            )
            for size in (first, second)
        ]
        assert sets[0] == sets[1]


@given(
    num_rows=st.integers(1, 50),
    batch=st.integers(1, 9),
    start=st.integers(0, 60),
    ahead=st.integers(0, 60),
    tail=TAILS,
)
def test_many_steps_at_once_end_where_single_steps_do(
    num_rows: int, batch: int, start: int, ahead: int, tail: Tail
) -> None:
    if tail == "drop" and num_rows < batch:
        return
    walked = Steps(num_rows, batch, tail).begin(3, start)
    for _ in range(ahead):
        epoch, position = walked
        walked = Steps(num_rows, batch, tail).begin(epoch, position + batch)
        assert Steps(num_rows, batch, tail).left(walked[1]) > 0
    assert walked == Steps(num_rows, batch, tail).after(3, start, ahead)


def test_steps_across_epochs() -> None:
    assert Steps(10, 4, "drop").per_epoch == 2
    assert Steps(10, 4, "pad").per_epoch == 3
    assert Steps(10, 4, "exact").per_epoch == 3
    assert Steps(10, 4, "drop").after(0, 4, 1) == (1, 0)
    assert Steps(10, 4, "exact").after(0, 4, 1) == (0, 8)
    assert Steps(10, 4, "exact").after(0, 8, 1) == (1, 0)
    assert Steps(10, 4, "drop").after(0, 0, 10**12) == (5 * 10**11, 0)


def test_an_exact_last_step() -> None:
    shares = step_of_all(8, num_rows=11, global_batch=8, dp_size=4, tail="exact")
    assert [rows.positions.tolist() for rows in shares] == [[8], [9], [10], []]
    assert [rows.num_ignored for rows in shares] == [1, 1, 1, 2]
    assert all(rows.positions.dtype == np.int64 for rows in shares)


def test_a_padded_last_step_repeats_the_head_as_often_as_needed() -> None:
    shares = step_of_all(0, num_rows=3, global_batch=8, dp_size=2, tail="pad")
    assert [rows.positions.tolist() for rows in shares] == [[0, 2, 1, 0], [1, 0, 2, 1]]


@given(num_rows=st.integers(0, 200), start=st.integers(0, 220), dp_size=DP_SIZES, tail=TAILS)
def test_shares_of_a_bare_sampler(num_rows: int, start: int, dp_size: int, tail: Tail) -> None:
    shares = [
        partition.share(start, num_rows=num_rows, dp_rank=rank, dp_size=dp_size, tail=tail)
        for rank in range(dp_size)
    ]
    lengths = [len(share) for share in shares]
    read = sorted(position for share in shares for position in share)
    left = max(num_rows - start, 0)
    assert read == list(range(start, start + len(read)))
    if tail == "exact":
        assert len(read) == left
        assert max(lengths) - min(lengths) <= 1
    else:
        assert len(set(lengths)) == 1
        assert (
            (left - dp_size < len(read) <= left)
            if tail == "drop"
            else (left <= len(read) < left + dp_size)
        )


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        Steps(90, 30, "drop").of_rank(0, dp_rank=0, dp_size=4)
    assert str(raised.value) == (
        "train.global_batch = 30 cannot be divided equally among 4 dp ranks\n"
        "  expected: a multiple of mesh.dp (4), so that every dp rank makes the same number of steps\n"
        "  fix: --train.global_batch 32   (or 28)"
    )
    with pytest.raises(ConfigError, match=r"fix: --train\.global_batch 4$"):
        Steps(9, 3, "drop").of_rank(0, dp_rank=0, dp_size=4)
    with pytest.raises(ConfigError, match=r"fix: --train\.global_batch 4$"):
        partition.check_global_batch(0, dp_size=4)


def test_an_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        _ = Steps(10, 16, "drop").per_epoch
    assert str(raised.value) == (
        "the data has 10 rows and train.global_batch is 16: an epoch has no step\n"
        "  expected: at least one full global batch, because the incomplete one at an epoch's end is dropped\n"
        "  fix: --train.global_batch 10 or less, a shorter data.seq_len, or more data"
    )
    with pytest.raises(ConfigError) as raised:
        Steps(0, 16, "exact").begin(0, 0)
    assert str(raised.value) == (
        "the data has 0 rows and train.global_batch is 16: an epoch has no step\n"
        "  expected: at least one row\n"
        "  fix: check data.source, or shorten data.seq_len: a row needs data.seq_len + 1 tokens"
    )


@pytest.mark.parametrize("position", [-4, 8, 12])
def test_a_step_that_does_not_exist_is_refused(position: int) -> None:
    with pytest.raises(
        IndexError, match=f"no step begins at position {position} of 10 rows with 4 rows a step"
    ):
        Steps(10, 4, "drop").of_rank(position, dp_rank=0, dp_size=2)
