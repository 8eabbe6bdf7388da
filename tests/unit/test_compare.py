"""The one comparison: what is equal, what never is, and what is named first."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranks.reference import compare_curves, compare_trainings
from threefold.check.compare import (
    GRADIENT,
    LOSS,
    SAME_WEIGHT,
    WEIGHT,
    Bound,
    Comparison,
    Difference,
    TensorComparison,
    Training,
    compare_exactly,
    compare_number,
    compare_numbers,
    compare_tensors,
)

EXPECTED = Training(
    losses=[4.0, 3.5, 3.0],
    norms=[2.0, 1.5, 1.0],
    gradients={
        "embedding": torch.tensor([[1.0, -2.0], [0.5, 0.0]]),
        "bias": torch.tensor([1e-7, 0.0]),
    },
)


def holds(differences: list[Difference]) -> bool:
    return Comparison(differences).holds


def test_a_training_follows_itself() -> None:
    comparison = compare_trainings(EXPECTED, EXPECTED)
    assert comparison.holds and comparison.first is None
    assert [difference.place for difference in comparison.differences] == [
        *("step 1", "step 1", "embedding", "bias"),
        *("step 2", "step 2", "step 3", "step 3"),
    ]
    assert str(comparison) == "loss 0.0e+00, gradient norm 0.0e+00, gradient 0.0e+00"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_equal(value: float) -> None:
    assert not compare_number(LOSS, value, 1.0).holds
    assert not compare_number(LOSS, 1.0, value).holds
    assert not compare_number(LOSS, value, value).holds
    for place in range(3):
        values = [1.0, 2.0, 3.0]
        values[place] = value
        assert not holds(compare_numbers(LOSS, values, [1.0, 2.0, 3.0]))
        assert not holds(compare_numbers(LOSS, values, values))
        assert not holds(
            compare_tensors(GRADIENT, {"w": np.array(values)}, {"w": np.array([1.0, 2.0, 3.0])})
        )
        assert not holds(
            compare_tensors(GRADIENT, {"w": torch.tensor(values)}, {"w": torch.tensor(values)})
        )
    assert not holds(compare_exactly("bits", {"w": value}, {"w": value}))
    assert not holds(compare_exactly("bits", {"w": None}, {"w": None}))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), st.integers(0, 4), st.booleans())
def test_one_value_beyond_the_bound_is_found_wherever_it_is(
    values: list[float], place: int, above: bool
) -> None:
    place %= len(values)
    bound = Bound("loss", 1e-2, "a test's", relative=False)
    near, far = list(values), list(values)
    near[place] += 0.5e-2
    far[place] += 2e-2 if above else -2e-2
    assert holds(compare_numbers(bound, near, values))
    differences = compare_numbers(bound, far, values)
    assert [difference.place for difference in differences if not difference.holds] == [
        f"step {place + 1}"
    ]


def test_what_only_one_side_has_is_a_difference() -> None:
    shorter = compare_numbers(LOSS, [1.0], [1.0, 2.0])
    longer = compare_numbers(LOSS, [1.0, 2.0], [1.0])
    assert [str(difference) for difference in shorter + longer if not difference.holds] == [
        "loss of step 2: missing",
        "loss of step 2: not expected",
    ]
    one, both = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.zeros(2)}
    assert str(Comparison(compare_tensors(GRADIENT, one, both))) == "gradient of b: missing"
    assert (
        str(Comparison(compare_tensors(GRADIENT, both, one))) == "gradient of b: not expected"
    )
    assert (
        str(Comparison(compare_numbers(LOSS, [1.0], [1.0, 2.0, 3.0])))
        == "loss of step 2: missing, and 1 more differ"
    )
    assert not holds(compare_exactly("bits", {"a": "x"}, {"a": "x", "b": "y"}))
    assert not holds(compare_exactly("bits", {"a": "x", "b": "y"}, {"a": "x"}))
    assert not compare_curves([(1.0, 2.0)], [(1.0, 2.0), (0.5, 1.0)]).holds


def test_nothing_is_no_proof() -> None:
    assert not Comparison([]).holds
    assert str(Comparison([])) == "comparison: nothing was compared"
    for differences in (
        compare_numbers(LOSS, [], []),
        compare_tensors(GRADIENT, {}, {}),
        compare_exactly("bits", {}, {}),
        compare_curves([], []).differences,
        compare_trainings(Training(), Training()).differences,
    ):
        assert differences and not holds(differences)
    assert not compare_trainings(
        replace(EXPECTED, gradients={}), replace(EXPECTED, gradients={})
    ).holds


def test_another_shape_is_a_difference() -> None:
    (difference,) = compare_tensors(GRADIENT, {"w": torch.ones(3)}, {"w": torch.ones(1)})
    assert str(difference) == "gradient of w: of shape [3], expected [1]"


def test_a_tensor_is_measured_by_its_largest_entry_or_a_share_of_all() -> None:
    expected = {"large": torch.tensor([10.0, 1.0]), "rounding": torch.tensor([1e-9])}
    actual = {"large": torch.tensor([10.0, 1.005]), "rounding": torch.tensor([-1e-9])}
    large, rounding = compare_tensors(GRADIENT, actual, expected)
    assert large.figure == pytest.approx(5e-4) and large.holds
    assert rounding.figure == pytest.approx(2e-9 / (1e-4 * 10)) and rounding.holds
    strict = compare_tensors(replace(GRADIENT, smallest=0.0), actual, expected)
    assert strict[1].figure == pytest.approx(2.0) and not strict[1].holds


def test_the_same_bits_are_asked_for() -> None:
    weights = {"w": torch.tensor([1.0, 2.0])}
    assert holds(compare_tensors(SAME_WEIGHT, weights, {"w": weights["w"].clone()}))
    off = {"w": torch.nextafter(weights["w"], torch.tensor(9.0))}
    assert not holds(compare_tensors(SAME_WEIGHT, off, weights))
    assert not holds(compare_exactly("bits", {"loss": 0.0}, {"loss": -0.0}))


def test_the_first_difference_is_named_with_its_step() -> None:
    comparison = compare_trainings(replace(EXPECTED, losses=[4.0, math.nan, 9.0]), EXPECTED)
    assert (
        str(comparison.first)
        == "loss of step 2: nan, expected 3.5: what is not finite is never equal"
    )
    assert str(comparison).endswith("and 1 more differ")
    assert comparison.worst().place == "step 2"
    gradients = {
        **EXPECTED.gradients,
        "embedding": torch.tensor([[1.0, -2.0], [math.nan, 0.0]]),
    }
    comparison = compare_trainings(replace(EXPECTED, gradients=gradients), EXPECTED)
    assert (
        str(comparison.first)
        == "gradient of embedding: not finite at [1, 0]: what is not finite is never equal"
    )


def test_weights_are_compared_where_there_are_some() -> None:
    weights = replace(EXPECTED, weights={"w": torch.ones(2)})
    assert compare_trainings(weights, weights).holds
    assert not compare_trainings(EXPECTED, weights).holds
    assert not compare_trainings(weights, EXPECTED).holds


def test_two_tensors_under_one_name_must_both_be_equal() -> None:
    for first, second in ((0.0, 1.0), (1.0, 0.0)):
        comparison = TensorComparison(WEIGHT, {"a": torch.ones(2)})
        comparison.add("a", torch.full((2,), first))
        comparison.add("a", torch.full((2,), second))
        assert not holds(comparison.differences())


def test_tensors_are_compared_one_at_a_time() -> None:
    comparison = TensorComparison(WEIGHT, {"a": torch.ones(2), "b": torch.ones(2)})
    comparison.add("b", torch.ones(2))
    assert [
        str(difference) for difference in comparison.differences() if not difference.holds
    ] == ["weight of a: missing"]
