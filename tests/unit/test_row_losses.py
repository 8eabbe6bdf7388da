"""Losses of rows in their files: what was written is read, as the history stands; damage is named, the rest is read."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from test_audit import ONE, TWO, record

from threefold.audit.lookup import find_step, ordered_rows, ordered_step
from threefold.audit.record import Line, standing
from threefold.audit.row_losses import FOLDER, RankPart, packed, read

GLOBAL = 8


def write(
    run: Path, segment: int, steps: range, *, dp: int = 1, cp: int = 1, equal: bool = True
) -> None:
    """What the ranks of a start would write: row r of step t has the loss t + r / 16, over the cp ranks' parts."""
    (run / FOLDER).mkdir(exist_ok=True)
    counts = np.full(GLOBAL, 4) if equal else np.arange(GLOBAL)
    for dp_rank in range(dp):
        for cp_rank in range(cp):
            lines = b"".join(
                packed(
                    segment,
                    step,
                    RankPart(dp_rank, dp, cp_rank, cp),
                    ((step + np.arange(GLOBAL) / 16) / cp)[dp_rank::dp].astype(np.float32),
                    counts[dp_rank::dp],
                )
                for step in steps
            )
            with (run / FOLDER / f"rank-{dp_rank * cp + cp_rank:04}.bin").open("ab") as file:
                file.write(lines)


HISTORY = standing(
    [line for line in record((1, 6, ONE, 8), (4, 9, TWO, 8)) if isinstance(line, Line)]
)


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_rows_are_read_in_the_order_of_the_step(
    tmp_path: Path, dp: int, cp: int, equal: bool
) -> None:
    write(tmp_path, 1, range(1, 4), dp=dp, cp=cp, equal=equal)
    found = read(tmp_path, HISTORY)
    assert (found.steps, found.damaged) == ([1, 2, 3], [])
    losses = found.of(2)
    assert losses is not None and found.of(4) is None
    np.testing.assert_array_equal(losses.sums, 2 + np.arange(GLOBAL) / 16)
    np.testing.assert_array_equal(losses.counts, [4] * GLOBAL if equal else range(GLOBAL))


def test_a_later_start_on_another_mesh_stands(tmp_path: Path) -> None:
    write(tmp_path, 1, range(1, 7), dp=4)
    write(tmp_path, 2, range(4, 6), dp=2)
    found = read(tmp_path, HISTORY)
    assert found.steps == [1, 2, 3, 4, 5], "step 6 was not trained again yet"
    again = found.of(4)
    assert again is not None and len(again.sums) == GLOBAL and again.counts.all()


def test_parts_that_are_missing_are_no_numbers(tmp_path: Path) -> None:
    write(tmp_path, 1, range(1, 3), dp=2, cp=2)
    (tmp_path / FOLDER / "rank-0001.bin").unlink()
    losses = read(tmp_path, HISTORY).of(1)
    assert losses is not None
    assert np.isnan(losses.sums[::2]).all() and not losses.counts[::2].any()
    np.testing.assert_array_equal(losses.sums[1::2], 1 + np.arange(1, GLOBAL, 2) / 16)
    assert np.isnan(losses.means[::2]).all()


@pytest.mark.parametrize("seed", range(40))
def test_any_damage_costs_its_own_records_and_is_named(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    write(tmp_path, 1, range(1, 4), equal=False)
    write(tmp_path, 2, range(4, 10), equal=False)
    path = tmp_path / FOLDER / "rank-0000.bin"
    content, whole = bytearray(path.read_bytes()), read(tmp_path, HISTORY)
    size = len(content) // 9
    at = rng.randrange(len(content))
    kind = rng.choice(("changed", "cut", "lost", "put in"))
    if kind == "changed":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "lost":
        del content[at : at + rng.randrange(1, 30)]
    else:
        content[at:at] = rng.choice((b"3row", b"\0" * 50, bytes(content[:70])))
    path.write_bytes(content)
    found = read(tmp_path, HISTORY)
    for step in found.steps:
        (losses, before) = found.of(step), whole.of(step)
        assert losses is not None and before is not None
        np.testing.assert_array_equal(losses.sums, before.sums)
        np.testing.assert_array_equal(losses.counts, before.counts)
    lost = set(whole.steps) - set(found.steps)
    assert len(lost) <= (9 - at // size if kind == "cut" else 2)
    if kind != "cut" or at % size:
        assert found.damaged and all(
            str(path) in text and "not what was written" in text for text in found.damaged
        )


def test_no_file_and_an_empty_one_are_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path, HISTORY).steps == []
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank-0000.bin").touch()
    assert (read(tmp_path, HISTORY).steps, read(tmp_path, HISTORY).damaged) == ([], [])


def test_the_order_of_a_step_is_that_of_its_audit_and_goes_on_after_the_last_one() -> None:
    for step in range(1, 10):
        audited, ordered = find_step(HISTORY, step), ordered_step(HISTORY, step)
        assert audited is not None and ordered is not None
        np.testing.assert_array_equal(audited.rows, ordered.rows)
    first, second = HISTORY
    cut = [first, type(second)(second.start, second.lines[:1], second.last_step)]
    beyond, expected = ordered_step(cut, 9), ordered_step(HISTORY, 9)
    assert beyond is not None and expected is not None
    np.testing.assert_array_equal(beyond.rows, expected.rows)
    assert ordered_step(HISTORY[1:], 2) is None


def test_rows_of_many_steps_are_those_of_each_up_to_a_skip_or_another_start() -> None:
    lines = record((1, 9, ONE, 8), (7, 14, TWO, 16), skip={4: (4, 5), 11: (11, 12)})
    history = standing([line for line in lines if isinstance(line, Line)])
    for first in range(1, 15):
        rows = ordered_rows(history, first, 5)
        assert rows is not None
        ends = {4, 7, 11} & set(range(first + 1, first + 5))
        assert len(rows) == min([5, *(end - first for end in ends)])
        for step, row in enumerate(rows, start=first):
            own = ordered_step(history, step)
            audited = find_step(history, step)
            assert own is not None
            np.testing.assert_array_equal(own.rows, row)
            if audited is not None:
                np.testing.assert_array_equal(audited.rows, row)
