"""Is the order as random as a drawn one? Ten statistics with known null distributions, as p-values, over 20 keys and
eight sizes: 1,600 p-values, of which chance puts 1.6 below 1e-3.

Every statistic is exact or asymptotically exact for a uniformly drawn permutation (numpy's own is the control), and
orders that are visibly not random fail it, so the battery can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from threefold.data.order import permutation
from threefold.data.order.permutation import Permutation

stats = pytest.importorskip("scipy.stats", reason="scipy (in the dev extra) gives the p-values")

Order = npt.NDArray[np.int64]
SIZES = (1000, 4096, 8192, 8193, 65536, 65537, 100003, 262144)  # 8,192 is the last table
KEYS = range(20)
LAGS = (1, 2, 8, 64)
SIGNIFICANCE = 1e-3
# Poisson with the expected 1.6 of 1,600: more than 7 happens by chance once in 3,800 batteries; with the expected 0.2
# of the 200 of one size, more than 3 once in 17,000.
MOST_OF_ALL = 7
MOST_OF_ONE_SIZE = 3


def chi_square(
    counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64], *, freedom: int
) -> float:
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), freedom))


def two_sided(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z)))


def bins_of(values: Order, *, n: int, bins: int) -> tuple[Order, npt.NDArray[np.float64]]:
    """bin of each value, and how many of [0, n) each bin holds."""
    return values * bins // n, np.bincount(np.arange(n) * bins // n, minlength=bins).astype(
        float
    )


def differences(later: Order, earlier: Order) -> float:
    """(later - earlier) modulo n in 64 bins; for a permutation the counts have the multinomial's covariance."""
    n = int(max(later.max(), earlier.max())) + 1
    binned, sizes = bins_of((later - earlier) % n, n=n, bins=64)
    return chi_square(np.bincount(binned, minlength=64), sizes * len(later) / n, freedom=63)


def displacement(order: Order) -> float:
    return differences(order, np.arange(len(order)))


def adjacent_differences(order: Order) -> float:
    n = len(order)
    # The difference 0 cannot occur: [1, n) is shifted to [0, n - 1).
    gaps = (order[1:] - order[:-1]) % n - 1
    binned, sizes = bins_of(gaps, n=n - 1, bins=64)
    return chi_square(np.bincount(binned, minlength=64), sizes, freedom=63)


def serial_correlation(order: Order, *, lag: int) -> float:
    """Circular; mean -1 / (n - 1) and variance 1 / n to first order (Wald and Wolfowitz 1943)."""
    n = len(order)
    centred = order - (n - 1) / 2
    correlation = float(centred @ np.roll(centred, lag)) / float(centred @ centred)
    return two_sided((correlation + 1 / (n - 1)) * n**0.5)


def pair_uniformity(order: Order) -> float:
    """Disjoint neighbours in an 8 x 8 grid; every value occurs once, which fixes row + column sums: 7 less freedom."""
    n, bins = len(order), 8
    pairs = n // 2
    binned, sizes = bins_of(order, n=n, bins=bins)
    counts = np.bincount(
        binned[: 2 * pairs : 2] * bins + binned[1 : 2 * pairs : 2], minlength=bins**2
    )
    expected = (np.outer(sizes, sizes) - np.diag(sizes)).ravel() * pairs / (n * (n - 1))
    return chi_square(counts, expected, freedom=bins * (bins - 1))


def low_bits(order: Order) -> float:
    """Three low bits of the position against three of the index; both margins are fixed."""
    rows, columns = np.arange(len(order)) % 8, order % 8
    return contingency(rows, columns, bins=8)


def contingency(rows: Order, columns: Order, *, bins: int) -> float:
    n = len(rows)
    counts = np.bincount(rows * bins + columns, minlength=bins**2)
    expected = (
        np.outer(
            np.bincount(rows, minlength=bins), np.bincount(columns, minlength=bins)
        ).ravel()
        / n
    )
    statistic = ((counts - expected) ** 2 / expected).sum() * (n - 1) / n
    return float(stats.chi2.sf(statistic, (bins - 1) ** 2))


def block_balance(order: Order) -> float:
    """Pairs that share a block of 64 positions and a block of 64 indices; exact moments (Mantel 1967)."""
    n = len(order)
    blocks = -(-n // 64)
    cells = np.unique(np.arange(n) // 64 * blocks + order // 64, return_counts=True)[1].astype(
        float
    )
    observed = float((cells * (cells - 1)).sum())
    sizes = np.bincount(np.arange(n) // 64).astype(float)
    ordered_pairs = float((sizes * (sizes - 1)).sum())
    degrees = float((sizes * (sizes - 1) ** 2).sum())
    mean = ordered_pairs**2 / (n * (n - 1))
    square = (
        2 * ordered_pairs**2 / (n * (n - 1))
        + 4 * (degrees - ordered_pairs) ** 2 / (n * (n - 1) * (n - 2))
        + (ordered_pairs**2 + 2 * ordered_pairs - 4 * degrees) ** 2
        / (n * (n - 1) * (n - 2) * (n - 3))
    )
    return two_sided((observed - mean) / (square - mean**2) ** 0.5)


def two_epochs(order: Order, following: Order) -> float:
    n = len(order)
    return contingency(order * 8 // n, following * 8 // n, bins=8)


def battery(order: Order, following: Order) -> Iterator[tuple[str, float]]:
    """name and p-value of each statistic for one order and the same key's next epoch."""
    yield "displacement", displacement(order)
    yield "adjacent differences", adjacent_differences(order)
    for lag in LAGS:
        yield f"serial correlation {lag}", serial_correlation(order, lag=lag)
    yield "pair uniformity", pair_uniformity(order)
    yield "low bits", low_bits(order)
    yield "block balance", block_balance(order)
    yield "two epochs", two_epochs(order, following)


def p_values(n: int, order_of: Callable[[int, int, int], Order]) -> dict[str, list[float]]:
    """p-values by statistic over all keys; `order_of(n, key, epoch)` gives the order."""
    found: dict[str, list[float]] = {}
    for key in KEYS:
        for name, p in battery(order_of(n, key, 0), order_of(n, key, 1)):
            found.setdefault(name, []).append(p)
    return found


def ours(n: int, key: int, epoch: int) -> Order:
    return Permutation(n, seed=key, epoch=epoch).at(np.arange(n))


def numpy_order(n: int, key: int, epoch: int) -> Order:
    return np.random.default_rng((key, epoch)).permutation(n)


def low(found: dict[str, list[float]]) -> list[tuple[str, float]]:
    return [(name, p) for name, values in found.items() for p in values if p < SIGNIFICANCE]


@pytest.fixture(scope="module")
def measured() -> dict[int, dict[str, list[float]]]:
    return {n: p_values(n, ours) for n in SIZES}


def test_no_more_than_chance_below_a_thousandth(
    measured: dict[int, dict[str, list[float]]],
) -> None:
    by_size = {n: low(found) for n, found in measured.items()}
    count = sum(len(values) for found in measured.values() for values in found.values())
    total = sum(map(len, by_size.values()))
    print(
        f"{total} of {count} p-values below {SIGNIFICANCE}; chance: {count * SIGNIFICANCE:.1f}; {by_size}"
    )
    assert count == 1600
    assert total <= MOST_OF_ALL, by_size
    assert max(map(len, by_size.values())) <= MOST_OF_ONE_SIZE, by_size


def test_p_values_are_uniform(measured: dict[int, dict[str, list[float]]]) -> None:
    """Kolmogorov and Smirnov per statistic over sizes and keys (160 values); ten tests, so 1e-3 each is 1 % for all."""
    for name in measured[SIZES[0]]:
        values = [p for found in measured.values() for p in found[name]]
        assert stats.kstest(values, "uniform").pvalue > SIGNIFICANCE, name


def test_the_statistics_hold_for_a_drawn_permutation() -> None:
    found = {n: p_values(n, numpy_order) for n in SIZES[:3]}
    assert sum(len(low(values)) for values in found.values()) <= MOST_OF_ONE_SIZE, found
    for name in found[SIZES[0]]:
        values = [p for by_name in found.values() for p in by_name[name]]
        assert stats.kstest(values, "uniform").pvalue > SIGNIFICANCE, name


def shuffled_blocks(n: int, key: int, epoch: int) -> Order:
    return (numpy_order(n // 64, key, epoch)[:, None] * 64 + np.arange(64)).ravel()


def affine(n: int, key: int, epoch: int) -> Order:
    return (np.arange(n) * 40503 + 8191 * key + epoch) % n


def swapped_neighbours(n: int, key: int, epoch: int) -> Order:
    return np.arange(n) ^ 1


@pytest.mark.parametrize("order_of", [affine, shuffled_blocks, swapped_neighbours])
def test_the_battery_finds_a_poor_order(order_of: Callable[[int, int, int], Order]) -> None:
    poor = low(p_values(65536, order_of))
    assert len(poor) > 20 * MOST_OF_ONE_SIZE
    assert len({name for name, _ in poor}) >= 4


def test_the_battery_finds_too_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_ROUNDS", 3)
    assert len(low(p_values(65537, ours))) > MOST_OF_ONE_SIZE
