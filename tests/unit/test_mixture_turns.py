"""The turns of a mixture: weights are kept to 1 part in 10^9, in every window, at any position, in O(1)."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.audit.record import SegmentLine, read_lines
from threefold.data.order.mixture import Mixture, quotas
from threefold.data.order.mixture_turns import (
    LONGEST_PERIOD,
    SourceTurns,
    SplitTurns,
    TurnTable,
    turns_of,
)
from threefold.data.order.order import Order, Place
from threefold.errors import ConfigError, DataError
from threefold.mesh.topology import Topology
from threefold.report import verdict
from unit.test_mixture_loader import SIZES, loader, read

FOUND = {"web": 1_234_567_891, "code": 12_345, "math": 678}
"""Weights as people give them: numbers of tokens. Rounded to 10,000 turns, math came 182 times as often."""
LONG = {"code": 0.123456789, "prose": 0.5, "maths": 0.376543211}
QUOTAS = st.one_of(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(st.integers(1, 10**14), min_size=1, max_size=9),
    st.lists(st.sampled_from([1, 2, 10**6, 10**13, 10**14 + 1]), min_size=1, max_size=9),
)


def of(turns: SourceTurns, begin: int, count: int) -> tuple[Any, Any]:
    return turns.locate(np.arange(begin, begin + count))


@settings(deadline=None)
@given(quotas=QUOTAS, begin=st.integers(0, 2**60), table=st.booleans())
def test_any_position_both_ways(quotas: list[int], begin: int, table: bool) -> None:
    """What is read at a position is one more than what was read before it, for every way to ask."""
    short = table and sum(quotas) <= 10_000
    turns = TurnTable(quotas) if short else SplitTurns(quotas)
    source, nth = of(turns, begin, 200)
    before = turns.before(begin)
    assert before.sum() == begin and (before >= 0).all()
    for place, (one, count) in enumerate(zip(source.tolist(), nth.tolist(), strict=True)):
        assert count == before[one]
        assert turns.position_of(one, count) == begin + place
        before[one] += 1
    assert before.tolist() == turns.before(begin + 200).tolist()
    alone = turns.locate(np.array([[begin + 7]]))
    assert (alone[0].item(), alone[1].item()) == (source[7], nth[7])


@settings(deadline=None)
@given(quotas=QUOTAS, begin=st.integers(0, 2**60))
def test_every_window_holds_the_shares(quotas: list[int], begin: int) -> None:
    turns, period = turns_of(quotas), sum(quotas)
    window = turns.before(begin + period) - turns.before(begin)
    assert window.tolist() == quotas
    bound = 1 if isinstance(turns, TurnTable) or len(quotas) == 2 else 4
    ahead = [
        int(count) * period - begin * turn
        for count, turn in zip(turns.before(begin), quotas, strict=True)
    ]
    assert max(map(abs, ahead)) < bound * period


@settings(deadline=None, max_examples=200)
@given(period=st.integers(2, LONGEST_PERIOD), data=st.data())
def test_split_is_exact_where_floats_are_not(period: int, data: Any) -> None:
    """floor(t a / P) for products of up to 100 bits; the numbers next to a whole quotient too."""
    a = data.draw(st.integers(1, period - 1))
    wanted = data.draw(st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
    wanted += [
        min(2**62, max(0, -(-k * period // a) + d)) for k in wanted[:5] for d in (-1, 0, 1)
    ]
    turns = SplitTurns([a, period - a])
    first = turns._sides[turns._root][0]
    source, nth = turns.locate(np.array(wanted))
    for t, one, count in zip(wanted, source.tolist(), nth.tolist(), strict=True):
        share = [a, period - a][first]
        begun = t * share // period
        taken = (t + 1) * share // period > begun
        assert (one, count) == ((first, begun) if taken else (1 - first, t - begun))


@given(
    st.lists(st.one_of(st.integers(1, 10**12), st.floats(1e-3, 1e3)), min_size=1, max_size=20)
)
def test_weights_are_kept_to_a_part_in_a_billion(weights: list[Any]) -> None:
    fractions = [Fraction(str(weight)) for weight in weights]
    found = quotas(fractions)
    assert sum(found) <= LONGEST_PERIOD
    names = [str(number) for number in range(len(weights))]
    try:
        mixture = Mixture(dict.fromkeys(names, 5), dict(zip(names, weights, strict=True)))
    except ConfigError:
        assert min(fractions) / sum(fractions) < 1e-6
        return
    for weight, turns in zip(fractions, found, strict=True):
        assert abs(Fraction(turns, sum(found)) / (weight / sum(fractions)) - 1) <= Fraction(
            1, 10**9
        )
    assert quotas([Fraction(turns) for turns in found]) == found == mixture.quotas, (
        "as the record rebuilds them"
    )


def test_numbers_of_tokens_are_exact_weights() -> None:
    sizes = {"web": 1_000_000_000, "code": 5_000, "math": 300}
    mixture = Mixture(sizes, FOUND)
    assert mixture.quotas == tuple(FOUND.values())
    assert (
        mixture.shares
        == "asked web 99.9989451 %, code 0.00099993446 %, math 5.49174212e-05 %; kept exactly"
    )


def test_a_billion_rows_in_a_stretch_have_their_shares_anywhere() -> None:
    """Read in pieces from 10^9 on: rows of each source are in order, its epochs are whole."""
    mixture = Mixture({"web": 10**9, "code": 70, "math": 3}, FOUND, seed=5)
    before = mixture.read_before(10**9)
    assert abs(int(before[1]) - 10**9 * 12_345 / mixture.period) < 4
    assert abs(int(before[2]) - 10**9 * 678 / mixture.period) < 4
    positions = np.arange(10**9, 10**9 + 300_000)
    turns, (source, index) = mixture.locate(positions), mixture.at(positions)
    for number, (size, count) in enumerate(
        zip(mixture.sizes, mixture.read_before(10**9 + 300_000), strict=True)
    ):
        mine = source == number
        assert mine.sum() == count - before[number]
        nth = before[number] + np.arange(mine.sum())
        assert (turns.epoch[mine] * size + turns.position[mine] == nth).all()
    scattered = np.random.default_rng(0).permutation(positions)[:500]
    again = mixture.at(scattered)
    assert (again[0] == source[scattered - 10**9]).all() and (
        again[1] == index[scattered - 10**9]
    ).all()
    every = [mixture.position_of(1, 4, place) for place in range(70)]
    assert sorted(mixture.at(np.array(every))[1].tolist()) == list(range(70)), (
        "an epoch of 70 rows, each once"
    )


def test_weights_that_cannot_be_kept_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        Mixture(
            {"web": 5, "rare": 5, "rarer": 5},
            {"web": "0.3333333333333333333", "rare": 1e-8, "rarer": 1e-17},
        )
    assert str(caught.value) == (
        "the mixture cannot keep the weight of rare, rarer: rare 2.99999991e-06 %, rarer 2.99999991e-15 % of the rows\n"
        "  expected: weights in a ratio of whole numbers whose sum is at most 2^50, or near enough to one that each is "
        "kept to 1 part in 10^9\n"
        "  fix: use the weights web: 1125899873065625, rare: 33776996, rarer: 1, or leave out the smallest"
    )
    Mixture(
        {"web": 5, "rare": 5, "rarer": 5},
        {"web": 1125899873065625, "rare": 33776996, "rarer": 1},
    )


# --- versions --------------------------------------------------------------------------------------------------------


def test_an_unknown_version_is_refused_everywhere(tmp_path: Path) -> None:
    state = {**loader(weights=LONG).state_dict(), "order_version": 7}
    line = SegmentLine.of(
        loader().order, Place(0, 0), first_step=1, topology=Topology(), every=5
    ).to_record()
    (tmp_path / "audit.jsonl").write_text(json.dumps({**line, "order_version": 7}) + "\n")
    for refused in (
        lambda: loader(weights=LONG).load_state_dict(state),
        lambda: read_lines(tmp_path / "audit.jsonl"),
    ):
        with pytest.raises(DataError, match="this release does not support order version 7"):
            refused()


@pytest.mark.parametrize(("before", "after"), [(4, 3), (1, 12)])
def test_long_ratio_on_another_number_of_ranks(before: int, after: int) -> None:
    whole, _ = read(9, weights=LONG)
    first, state = read(4, before, weights=LONG)
    second, _ = read(5, after, state=state, weights=LONG)
    assert first + second == whole


# --- what is said ----------------------------------------------------------------------------------------------------


def test_audit_says_asked_and_kept_shares(tmp_path: Path) -> None:
    said = (
        "asked code 99.9989451 %, prose 0.00099993446 %, maths 5.49174212e-05 %; kept exactly"
    )
    given = dict(zip(SIZES, FOUND.values(), strict=True))
    mixture = Mixture(SIZES, given, seed=0)
    order = Order(sum(SIZES.values()), 4, seed=0, shuffle=True, mixture=mixture)
    start = SegmentLine.of(order, Place(0, 0), first_step=1, topology=Topology(), every=5)
    sources = {name: {"source": "x", "weight": weight} for name, weight in given.items()}
    (tmp_path / "config.yaml").write_text(json.dumps({"data": {"mixture": sources}}))
    again = SegmentLine.from_record(json.loads(json.dumps(start.to_record())))
    assert again.order.rows(Place(0, 0), 20).tolist() == order.rows(Place(0, 0), 20).tolist()
    assert list(verdict._shares(tmp_path, again)) == [f"  shares: {said}"]
