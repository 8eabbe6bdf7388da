"""What a step that went wrong is called, and that a rank's own losses tell who it was."""

from __future__ import annotations

from typing import Any

from threefold.training.nonfinite import _ordinal, _what


def part(rows: list[list[int]], wrong: list[int] | None = None) -> dict[str, Any]:
    return {"wrong": wrong, "rows": rows}


def test_ranks_and_rows_of_the_bad_micro_batches_are_named_once() -> None:
    """The tp ranks of a dp rank read the same rows."""
    parts = [
        part([[1, 2], [3, 4]]),
        part([[1, 2], [3, 4]]),
        *[part([[5, 6], [7, 8]], [7, 8])] * 2,
    ]
    assert (
        _what(9, float("nan"), parts)
        == "step 9: the loss is not finite on ranks 2 and 3: rows 7, 8"
    )


def test_with_finite_losses_all_rows_of_the_step_are_named() -> None:
    parts = [part([[4, 2]]), part([[3, 1]])]
    assert _what(2, float("inf"), parts) == (
        "step 2: the gradient's norm is inf, with finite losses on all ranks; the step read rows 1, 2, 3, 4"
    )


def test_rank_without_row_numbers_is_named_all_the_same() -> None:
    assert (
        _what(1, float("nan"), [part([[]], [])])
        == "step 1: the loss is not finite on rank 0: no row"
    )


def test_step_without_a_token_to_train_on_is_named_with_its_rows() -> None:
    parts = [part([[4, 2]]), part([[3, 1]])]
    assert _what(2, float("nan"), parts, empty=True) == (
        "step 2: no token of its rows is trained on; the step read rows 1, 2, 3, 4"
    )


def test_ordinals() -> None:
    assert [_ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th")
    ]
