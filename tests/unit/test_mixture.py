"""Mixtures: exact proportions in every window, every row once in each epoch; draws that follow their weights."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from threefold.data.order.draws import WeightedDraws
from threefold.data.order.mixture import MAX_PERIOD, Mixture, quotas
from threefold.errors import ConfigError

SOURCES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def stats() -> Any:
    """Not at the head: each process that collects tests would import it."""
    return pytest.importorskip(
        "scipy.stats", reason="scipy (in the dev extra) gives the p-values"
    )


def mixture_of(sources: list[tuple[int, int]], *, seed: int = 0) -> Mixture:
    """A mixture of sources given as (rows, weight)."""
    names = [f"source {number}" for number in range(len(sources))]
    return Mixture(
        dict(zip(names, (size for size, _ in sources), strict=True)),
        dict(zip(names, (weight for _, weight in sources), strict=True)),
        seed=seed,
    )


@settings(deadline=None)
@given(sources=SOURCES, begin=st.integers(0, 10**12))
def test_every_window_of_a_period_holds_each_source_its_quota(
    sources: list[tuple[int, int]], begin: int
) -> None:
    mixture = mixture_of(sources)
    turns = mixture.locate(np.arange(begin, begin + 3 * mixture.period)).source
    taken = turns[:, None] == np.arange(len(sources))
    counts = np.concatenate((np.zeros((1, len(sources)), dtype=int), np.cumsum(taken, axis=0)))
    assert np.all(
        counts[mixture.period :] - counts[: -mixture.period] == np.array(mixture.quotas)
    )
    weights = [weight for _, weight in sources]
    assert [Fraction(quota, mixture.period) for quota in mixture.quotas] == [
        Fraction(weight, sum(weights)) for weight in weights
    ]


@settings(deadline=None)
@given(sources=SOURCES)
def test_no_source_is_ever_a_whole_turn_ahead_or_behind(sources: list[tuple[int, int]]) -> None:
    mixture = mixture_of(sources)
    counts = np.cumsum(
        mixture.locate(np.arange(mixture.period)).source[:, None] == np.arange(len(sources)),
        axis=0,
    )
    # In units of 1 / period, so that all is integer.
    ahead = counts * mixture.period - np.arange(1, mixture.period + 1)[:, None] * np.array(
        mixture.quotas
    )
    assert np.abs(ahead).max() < mixture.period


@settings(deadline=None, max_examples=60)
@given(sources=SOURCES, seed=st.integers(0, 2**70))
def test_each_source_is_read_in_epochs_of_its_own(
    sources: list[tuple[int, int]], seed: int
) -> None:
    mixture = mixture_of(sources, seed=seed)
    positions = np.arange(400)
    turns, (source, index) = mixture.locate(positions), mixture.at(positions)
    assert np.array_equal(turns.source, source)
    for number, (size, _) in enumerate(sources):
        mine = source == number
        count = int(mine.sum())
        assert turns.epoch[mine].tolist() == [nth // size for nth in range(count)]
        assert turns.position[mine].tolist() == [nth % size for nth in range(count)]
        for epoch in range(count // size):
            assert sorted(index[mine][epoch * size : (epoch + 1) * size]) == list(range(size))


def test_any_part_gives_the_same_order() -> None:
    mixture = mixture_of([(1000, 7), (30, 2), (5, 1)], seed=3)
    positions = np.random.default_rng(0).integers(0, 10**15, (40, 50))
    source, index = mixture.at(positions)
    for place in [(0, 0), (7, 9), (39, 49)]:
        alone = mixture.at(positions[place].reshape(1))
        assert (int(alone[0][0]), int(alone[1][0])) == (source[place], index[place])


def test_every_mesh_reads_the_same_rows_and_resumes_anywhere() -> None:
    whole = np.stack(mixture_of([(100, 3), (17, 2)]).at(np.arange(240)))
    for dp_size in (1, 2, 3, 8):
        again = mixture_of([(100, 3), (17, 2)])
        for rank in range(dp_size):
            assert np.array_equal(
                np.stack(again.at(np.arange(96 + rank, 240, dp_size))),
                whole[:, 96 + rank :: dp_size],
            )


def test_shuffling_depends_on_seed_source_and_epoch() -> None:
    mixture = mixture_of([(64, 1), (64, 1)])
    orders = [
        mixture.order_of(source, epoch).at(np.arange(64)).tolist()
        for source in (0, 1)
        for epoch in (0, 1)
    ]
    orders.append(
        mixture_of([(64, 1), (64, 1)], seed=1).order_of(0, 0).at(np.arange(64)).tolist()
    )
    assert len({tuple(order) for order in orders}) == 5
    source, index = mixture.at(np.arange(256), shuffle=False)
    assert index[source == 1].tolist() == [*range(64), *range(64)]


def test_a_fifth_and_a_tenth_are_what_they_say() -> None:
    assert quotas([Fraction("0.7"), Fraction("0.2"), Fraction("0.1")]) == (7, 2, 1)
    mixture = Mixture(
        {"web": 9, "code": 5, "books": 4}, {"web": 0.7, "code": 0.2, "books": "0.1"}
    )
    assert mixture.quotas == (7, 2, 1)
    assert mixture.fingerprint() == {
        "seed": 0,
        "mixture": "web (9 rows) x 7, code (5 rows) x 2, books (4 rows) x 1",
    }


def test_ten_thousand_sources_have_a_turn_each() -> None:
    rare = [Fraction(1), *[Fraction(1, 10**9)] * (MAX_PERIOD - 1)]
    assert quotas(rare) == (10**9, *(1,) * (MAX_PERIOD - 1))
    with pytest.raises(ConfigError) as raised:
        quotas([Fraction(1)] * (MAX_PERIOD + 1))
    assert str(raised.value) == (
        "the mixture has 10001 sources\n  expected: at most 10000, the turns of one period\n"
        "  fix: join sources that have the same weight into one"
    )


@pytest.mark.parametrize(
    ("sizes", "weights", "text"),
    [
        (
            {"a": 5, "b": 5},
            {"a": 1, "c": 1},
            "the mixture has weights for a, c, but the sources are a, b\n  expected: one weight for each source\n"
            "  fix: data.mixture: {a: 1, b: 1}",
        ),
        (
            {},
            {},
            "the mixture has weights for (none), but the sources are (none)\n  expected: one weight for each source\n"
            "  fix: data.mixture: {NAME: 1}",
        ),
        (
            {"a": 5},
            {"a": 0},
            "the mixture's weight of a is 0\n"
            "  expected: a positive number; to skip a source, remove it\n"
            "  fix: data.mixture: {a: 1, ...}, or remove a",
        ),
        (
            {"a": 0},
            {"a": 1},
            "the source a of the mixture has 0 rows\n  expected: at least one row in each source\n"
            "  fix: check its path and data.seq_len, or remove a from data.mixture",
        ),
    ],
)
def test_a_wrong_mixture_is_refused(
    sizes: dict[str, int], weights: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        Mixture(sizes, weights)
    assert str(raised.value) == text


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf"), "much", None])
def test_a_weight_that_is_no_positive_number_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match=f"the mixture's weight of a is {weight}"):
        Mixture({"a": 5}, {"a": weight})


def test_no_position_is_below_zero() -> None:
    with pytest.raises(IndexError, match="-1 is not a position"):
        mixture_of([(3, 1)]).locate(np.array([4, -1]))
    with pytest.raises(IndexError, match="-1 is not a position"):
        WeightedDraws([1.0]).at(np.array([4, -1]))


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e12)), min_size=1, max_size=200).filter(
        any
    )
)
# Three times their share, divided by their sum, is more than 1.
@example([434433256380.82214] * 3)
@example([0.1] * 3)
def test_the_alias_table_holds_the_very_weights(weights: list[float]) -> None:
    """Buckets are chosen equally often, so a row's probability can be summed up from the table."""
    draws = WeightedDraws(weights)
    probability = draws._keep.copy()
    np.add.at(probability, draws._alias, 1 - draws._keep)
    expected = np.array(weights) * (len(weights) / sum(weights))
    assert np.allclose(probability, expected, rtol=1e-9, atol=1e-9)
    assert np.all((draws._keep >= 0) & (draws._keep <= 1))
    assert not np.any(draws._keep[expected == 0])
    assert not np.isin(draws._alias[draws._keep < 1], np.flatnonzero(expected == 0)).any()


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(np.ones(10), id="equal"),
        pytest.param(np.arange(20), id="linear"),
        pytest.param(1 / np.arange(1, 1001), id="zipf"),
        pytest.param(np.array([1000.0, *[1.0] * 99]), id="one-heavy"),
    ],
)
def test_draws_follow_the_weights(weights: Any, stats: Any) -> None:
    """Chi-square over 20 keys of 100,000 draws: the p-values are uniform (Kolmogorov and Smirnov)."""
    drawable = weights > 0
    expected = 100_000 * weights[drawable] / weights.sum()
    p_values = []
    for seed in range(20):
        counts = np.bincount(
            WeightedDraws(weights, seed=seed).at(np.arange(100_000)), minlength=len(weights)
        )
        assert not counts[~drawable].any()
        p_values.append(stats.chisquare(counts[drawable], expected).pvalue)
    assert stats.kstest(p_values, "uniform").pvalue > 1e-3
    assert min(p_values) > 1e-4  # chance: 20 in 10,000 for the smallest of 20


def test_neighbouring_draws_and_epochs_are_independent(stats: Any) -> None:
    draws = WeightedDraws(np.ones(16))
    first, second = draws.at(np.arange(100_001)), draws.in_epoch(1).at(np.arange(100_000))
    for pairs in (first[:-1] * 16 + first[1:], first[:-1] * 16 + second):
        assert stats.chisquare(np.bincount(pairs, minlength=256)).pvalue > 1e-3


def test_a_draw_depends_on_nothing_but_its_position() -> None:
    draws = WeightedDraws(np.arange(1, 50), seed=5, epoch=2)
    positions = np.random.default_rng(1).integers(0, 2**62, (30, 10))
    whole = draws.at(positions)
    assert np.array_equal(draws.at(positions[::-1, ::3]), whole[::-1, ::3])
    assert np.array_equal(
        WeightedDraws(np.arange(1, 50), seed=5).in_epoch(2).at(positions), whole
    )
    assert not np.array_equal(draws.in_epoch(3).at(positions), whole)
    assert not np.array_equal(
        WeightedDraws(np.arange(1, 50), seed=6, epoch=2).at(positions), whole
    )
    assert whole.dtype == np.int64


def test_draws_never_change() -> None:
    """A run that has begun keeps its draws and its turns: these values are part of the format."""
    assert WeightedDraws([1, 2, 3, 4], seed=42, epoch=7).at(np.arange(12)).tolist() == [
        2,
        2,
        3,
        2,
        2,
        3,
        2,
        1,
        0,
        3,
        3,
        3,
    ]
    source, index = Mixture({"a": 100, "b": 10}, {"a": 3, "b": 1}, seed=42).at(np.arange(12))
    assert list(zip(source.tolist(), index.tolist(), strict=True)) == [
        (0, 49),
        (0, 92),
        (0, 6),
        (1, 2),
        (0, 51),
        (0, 96),
        (0, 32),
        (1, 5),
        (0, 23),
        (0, 47),
        (0, 7),
        (1, 9),
    ]


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        ([], "there are no weights"),
        ([0.0, 0.0], "all weights are 0"),
        ([1.0, -2.0], r"weights\[1\] is -2.0"),
        ([1.0, float("nan")], r"weights\[1\] is nan"),
        ([[1.0, 2.0]], r"weights has the shape \(1, 2\)"),
    ],
)
def test_wrong_weights_are_refused(weights: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as raised:
        WeightedDraws(weights)
    assert str(raised.value).endswith(
        "\n  expected: one finite number >= 0 for each row, and at least one above 0\n"
        "  fix: pass one weight for each row, 0 for rows that must never be drawn"
    )
