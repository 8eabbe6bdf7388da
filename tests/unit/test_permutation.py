"""Permutation: a bijection of [0, n) for every n, undone by its inverse, the same for ever, small and quick."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from threefold.data.order import permutation
from threefold.data.order.permutation import (
    MAX_ROWS,
    ORDER_VERSION,
    Permutation,
    check_order_version,
    key_words,
    seed_of,
)
from threefold.errors import ConfigError, DataError

SEEDS = st.integers(0, 2**200)
SIZES = st.one_of(
    st.integers(1, 2**17),
    st.integers(1, MAX_ROWS),
    st.integers(0, 62).map(lambda bits: 2**bits),
)


def test_every_n_to_2000_is_a_bijection() -> None:
    for n in range(1, 2001):
        positions = np.arange(n)
        order = Permutation(n, seed=n, epoch=3)
        indices = order.at(positions)
        assert np.array_equal(np.sort(indices), positions), n
        assert np.array_equal(order.inverse(indices), positions), n


def test_every_n_to_2000_is_a_bijection_without_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(permutation, "_TABLE_ROWS", 0)
    for n in range(1, 2001):
        positions = np.arange(n)
        order = Permutation(n, seed=n)
        indices = order.at(positions)
        assert np.array_equal(np.sort(indices), positions), n
        assert np.array_equal(order.inverse(indices), positions), n


@pytest.mark.parametrize("n", [8192, 8193, 65535, 65536, 65537, 10**6 + 3])
def test_larger_sizes_are_bijections(n: int) -> None:
    positions = np.arange(n)
    order = Permutation(n, seed=1)
    indices = order.at(positions)
    assert np.array_equal(np.sort(indices), positions)
    assert np.array_equal(order.inverse(indices), positions)


def test_words_of_64_bits_are_bijections(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (8193, 70001, 2**17):
        order = Permutation(n, seed=1)
        order._word = np.uint64
        order._sides = (np.uint64(order._sides[0]), np.uint64(order._sides[1]))
        order._round_keys = key_words("any", n, count=len(order._round_keys))
        positions = np.arange(n)
        indices = order.at(positions)
        assert np.array_equal(np.sort(indices), positions), n
        assert np.array_equal(order.inverse(indices), positions), n


@settings(deadline=None, max_examples=150)
@given(n=SIZES, seed=SEEDS, epoch=st.integers(0, 2**70), data=st.data())
@example(n=2**32, seed=0, epoch=0, data=None)
@example(n=2**32 + 1, seed=0, epoch=0, data=None)
@example(n=MAX_ROWS, seed=0, epoch=0, data=None)
def test_the_inverse_undoes_it_at_any_size(
    n: int, seed: int, epoch: int, data: st.DataObject | None
) -> None:
    drawn = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50)) if data else []
    positions = np.unique(np.array([0, n - 1, n // 2, n // 3, *drawn], dtype=np.int64))
    order = Permutation(n, seed=seed, epoch=epoch)
    indices = order.at(positions)
    assert indices.dtype == np.int64
    assert indices.min() >= 0
    assert indices.max() < n
    assert len(np.unique(indices)) == len(positions)
    assert np.array_equal(order.inverse(indices), positions)
    assert np.array_equal(order.at(order.inverse(positions)), positions)
    assert [order.at(int(p)) for p in positions] == indices.tolist()


@pytest.mark.parametrize("n", [100, 10**5, 10**10])
def test_any_slice_and_shape_gives_the_same_order(n: int) -> None:
    order = Permutation(n, seed=9, epoch=1)
    positions = np.random.default_rng(0).integers(0, n, 100_000)
    whole = order.at(positions)
    assert np.array_equal(order.at(positions[::-1])[::-1], whole)
    assert np.array_equal(order.at(positions[::7]), whole[::7])
    assert np.array_equal(
        order.at(positions.reshape(10, 100, 100)), whole.reshape(10, 100, 100)
    )
    assert np.array_equal(order.at(positions.astype(np.uint64)), whole)
    assert order.at(np.array([], dtype=np.int64)).shape == (0,)
    assert order.at(np.array(7)).shape == ()
    assert not np.shares_memory(order.at(positions), positions)


def test_an_int_gives_an_int() -> None:
    for n in (10, 10**9, 10**12):
        order = Permutation(n)
        assert type(order.at(3)) is int
        assert type(order.inverse(np.int64(3))) is int
        assert len(order) == n


def test_seed_epoch_and_size_each_change_the_order() -> None:
    pairs = [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2**32, 0),
        (2**32 + 1, 0),
        (1, 2**32),
        (2**64, 0),
        (2**128 + 1, 0),
    ]
    for n in (1000, 10**6):
        orders = {
            Permutation(n, seed=seed, epoch=epoch).at(np.arange(64)).tobytes()
            for seed, epoch in pairs
        }
        assert len(orders) == len(pairs)
    assert (
        Permutation(10**6).at(np.arange(9)).tolist()
        != Permutation(10**6 + 1).at(np.arange(9)).tolist()
    )


def test_order_never_changes() -> None:
    """A run that has begun keeps its order: these values are part of the format, in tables, 32 and 64 bits."""
    golden = {
        10: [6, 1, 3, 4, 8, 7],
        10**6: [54576, 675727, 344820, 857451, 102638, 60734],
        10**12: [
            222781204811,
            729920705752,
            305284897234,
            764220841728,
            191659416448,
            885722958215,
        ],
    }
    for n, expected in golden.items():
        assert Permutation(n, seed=42, epoch=7).at(np.arange(6)).tolist() == expected


def test_no_position_is_favoured_at_tiny_sizes() -> None:
    """All 24 orders of four rows occur equally often over seeds (chi-square with 23 degrees, p = 1e-4 at 57)."""
    seen: dict[bytes, int] = {}
    for seed in range(2400):
        order = Permutation(4, seed=seed).at(np.arange(4)).tobytes()
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    assert sum((count - 100) ** 2 / 100 for count in seen.values()) < 57


@pytest.mark.parametrize("n", [8192, 10**8, 10**12])
def test_the_first_index_needs_no_table(n: int) -> None:
    Permutation(n, seed=1).at(0)
    tracemalloc.start()
    began = time.process_time()
    Permutation(n, seed=2).at(n // 2)
    spent = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The goal is 1 ms and 10 MiB; a tenth of a second leaves room for a slow machine and none for a table of n.
    assert spent < 0.1
    assert peak < 2**20


@pytest.mark.parametrize("position", [-1, 10, 2**63 - 1])
def test_a_position_outside_is_refused(position: int) -> None:
    order = Permutation(10)
    with pytest.raises(IndexError, match=rf"{position} is outside \[0, 10\)"):
        order.at(position)
    with pytest.raises(IndexError, match=rf"{position} is outside \[0, 10\)"):
        order.inverse(np.array([3, position]))


def test_what_is_no_integer_is_refused() -> None:
    with pytest.raises(TypeError, match="integers, not float64"):
        Permutation(10).at(np.array([1.0]))
    with pytest.raises(TypeError):
        Permutation(10).at(1.0)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"n": 0},
            "the number of rows is 0\n  expected: an integer from 1 to 4611686018427387904\n"
            "  fix: pass an integer from 1 to 4611686018427387904",
        ),
        (
            {"n": MAX_ROWS + 1},
            "the number of rows is 4611686018427387905\n  expected: an integer from 1 to 4611686018427387904\n"
            "  fix: pass an integer from 1 to 4611686018427387904",
        ),
        (
            {"n": 5, "seed": -1},
            "the seed of the order is -1\n  expected: an integer >= 0\n  fix: pass an integer >= 0",
        ),
        (
            {"n": 5, "epoch": -2},
            "the epoch of the order is -2\n  expected: an integer >= 0\n  fix: pass an integer >= 0",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Permutation(**arguments)
    assert str(raised.value) == text


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(DataError) as raised:
        check_order_version(ORDER_VERSION + 1)
    assert str(raised.value) == (
        "this release does not support order version 3\n"
        "  expected: version 2; another algorithm reads different samples\n"
        "  fix: install the release of threefold that began the run, or start a new run"
    )


def test_seeds_differ_by_purpose_and_parts_and_fit_torch() -> None:
    places = [("a", 0, 1), ("a", 1, 0), ("b", 0, 1), ("a", 0, 1, 0), ("a", 0)]
    seeds = [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Written down: a run's random numbers must not follow the version of Python.
    assert seed_of("a run", 0, 0, 0) == 4453678915656308821
