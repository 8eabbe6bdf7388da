"""The cursor: plain values that come back unchanged, and a refusal that names everything that differs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.data.order.order import Cursor
from threefold.data.order.permutation import ORDER_VERSION
from threefold.errors import DataError

PLAIN = st.one_of(
    st.integers(), st.text(), st.booleans(), st.none(), st.floats(allow_nan=False)
)
SAVED = {"order": "threefold", "seed": 1, "shuffle": True, "num_rows": 1000, "data": "a1b2"}


@given(
    epoch=st.integers(0, 2**70),
    position=st.integers(0, 2**62),
    fingerprint=st.dictionaries(st.text(), PLAIN, max_size=5),
)
def test_a_state_survives_json(epoch: int, position: int, fingerprint: dict[str, Any]) -> None:
    cursor = Cursor(epoch, position, fingerprint)
    assert Cursor.from_state_dict(json.loads(json.dumps(cursor.state_dict()))) == cursor
    cursor.check(fingerprint)


def test_the_state_is_plain_and_names_the_order_version() -> None:
    state = Cursor(2, 640, SAVED).state_dict()
    assert state == {
        "epoch": 2,
        "position": 640,
        "order_version": ORDER_VERSION,
        "fingerprint": SAVED,
    }
    state["fingerprint"]["seed"] = 9
    assert SAVED["seed"] == 1


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "seed",
            2,
            "the saved state has seed = 1, but here seed = 2\n"
            "  expected: the same seed: in another order the saved position would repeat some samples and never "
            "read others\n"
            "  fix: pass the seed that the run began with (--data.seed 1), or start a new run",
        ),
        (
            "shuffle",
            False,
            "the saved state has shuffle = True, but here shuffle = False\n"
            "  expected: the same shuffle: in another order the saved position would repeat some samples and never "
            "read others\n"
            "  fix: pass the shuffle that the run began with (--data.shuffle true), or start a new run",
        ),
        (
            "order",
            "torch",
            "the saved state has order = threefold, but here order = torch\n"
            "  expected: the same order: in another order the saved position would repeat some samples and never "
            "read others\n"
            "  fix: pass order='threefold', or start a new run",
        ),
        (
            "num_rows",
            1001,
            "the saved state has num_rows = 1000, but here num_rows = 1001\n"
            "  expected: the same num_rows: in another order the saved position would repeat some samples and never "
            "read others\n"
            "  fix: resume with the data and settings that the run began with, or start a new run",
        ),
    ],
)
def test_what_differs_is_named(name: str, value: Any, text: str) -> None:
    with pytest.raises(DataError) as raised:
        Cursor(0, 8, SAVED).check({**SAVED, name: value})
    assert str(raised.value) == text


def test_everything_that_differs_is_named_at_once() -> None:
    with pytest.raises(DataError) as raised:
        Cursor(0, 8, SAVED).check({**SAVED, "seed": 3, "data": "ffff"})
    assert [problem.what for problem in raised.value.problems] == [
        "the saved state has seed = 1, but here seed = 3",
        "the saved state has data = a1b2, but here data = ffff",
    ]


def test_a_value_that_only_one_of_them_has_is_named() -> None:
    without_data = {name: value for name, value in SAVED.items() if name != "data"}
    with pytest.raises(DataError, match=r"has data = a1b2, but here data = \(not set\)"):
        Cursor(0, 8, SAVED).check(without_data)
    with pytest.raises(DataError, match=r"has data = \(not set\), but here data = a1b2"):
        Cursor(0, 8, without_data).check(SAVED)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"position": -1}, "position = -1"),
        ({"position": "8"}, "position = '8'"),
        ({"epoch": True}, "epoch = True"),
        ({"epoch": 1.0}, "epoch = 1.0"),
        ({"order_version": None}, "order_version = None"),
    ],
)
def test_a_damaged_state_is_refused(changes: dict[str, Any], found: str) -> None:
    (name,) = changes
    with pytest.raises(DataError) as raised:
        Cursor.from_state_dict({**Cursor(0, 8, SAVED).state_dict(), **changes})
    assert str(raised.value) == (
        f"this is not a saved order of samples: it has {found}\n"
        f"  expected: a state_dict() of threefold's sampler or loader, with an integer >= 0 under "
        f"{name!r}\n"
        "  fix: load the state that the same sampler or loader saved, or start a new run"
    )


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(DataError, match="it has no epoch"):
        Cursor.from_state_dict({"yielded": 640})
    with pytest.raises(DataError, match="it has no fingerprint") as raised:
        Cursor.from_state_dict({"epoch": 0, "position": 0, "order_version": 1})
    assert "a mapping under 'fingerprint'" in str(raised.value)


def test_a_state_of_a_later_order_is_refused() -> None:
    with pytest.raises(DataError, match="this release does not support order version 9"):
        Cursor.from_state_dict({**Cursor(0, 0, SAVED).state_dict(), "order_version": 9})
