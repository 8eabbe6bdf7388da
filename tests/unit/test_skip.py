"""Batches that are left out: once, at the right step, whatever stops, meshes and workers do."""

from __future__ import annotations

import json
import multiprocessing
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ranks.spawn import PRELOAD
from threefold.config.loading import validate
from threefold.config.schema import Config
from threefold.data.order.order import Order, Place, last_step, skips_ahead
from threefold.data.sampling.loader import TokenLoader
from threefold.errors import ConfigError

SKIP = ((3, 4), (6, 6))


@dataclass(frozen=True)
class FlatRows:
    """Rows of nothing but their number."""

    num_rows: int = 22
    fingerprint: str = "flat"
    seq_len: int = 2
    store: Any = None
    report: Any = None

    def rows(self, indices: npt.NDArray[np.integer[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        flat = np.repeat(indices.astype(np.int64)[:, None], self.seq_len, axis=1)
        return {
            name: flat.copy()
            for name in ("input_ids", "labels", "position_ids", "document_ids")
        }


def loader(*, dp: tuple[int, int] = (0, 1), num_workers: int = 0) -> TokenLoader:
    order = Order(22, 4, seed=0, shuffle=True)
    return TokenLoader(FlatRows(), order, dp_rank=dp[0], dp_size=dp[1], num_workers=num_workers)


def batches(one: TokenLoader, count: int) -> list[list[int]]:
    with closing(iter(one)) as found:
        return [batch["indices"].tolist() for batch in islice(found, count)]


PLAIN = batches(loader(), 14)
# Steps 3 and 4 would have read batches 3 and 4; with them gone step 6 would have read batch 8.
LEFT_OUT = [PLAIN[number - 1] for number in (1, 2, 5, 6, 7, 9, 10, 11, 12, 13, 14)]


def test_batches_of_the_steps_are_left_out() -> None:
    """Over the end of an epoch of five steps too."""
    one = loader()
    one.leave_out(SKIP, first_step=1)
    assert batches(one, 11) == LEFT_OUT
    assert one.left_out == list(SKIP) and one.planned == {}


@pytest.mark.parametrize("stop", range(11))
def test_stop_and_resume_leave_out_once(stop: int) -> None:
    first, second = loader(), loader(dp=(0, 2))
    first.leave_out(SKIP, first_step=1)
    assert batches(first, stop) == LEFT_OUT[:stop]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.leave_out(SKIP, first_step=stop + 1)
    assert batches(second, 11 - stop) == [batch[::2] for batch in LEFT_OUT[stop:]]


def test_setting_dropped_on_a_later_resume_changes_nothing() -> None:
    first, second = loader(), loader()
    first.leave_out(SKIP, first_step=1)
    batches(first, 7)
    second.load_state_dict(first.state_dict())
    second.leave_out((), first_step=8)
    assert batches(second, 4) == LEFT_OUT[7:]


def test_epoch_and_workers_know_of_it() -> None:
    multiprocessing.set_forkserver_preload(PRELOAD)
    one = loader(num_workers=1)
    one.leave_out(((2, 5),), first_step=1)
    with closing(iter(one)) as found:
        next(found)
        assert one.epoch == 1
        assert next(found)["indices"].tolist() == PLAIN[5]


def test_steps_that_are_done_cannot_be_left_out() -> None:
    assert skips_ahead(SKIP, first_step=5, left_out=[(3, 4)]) == {6: (6, 6)}
    with pytest.raises(ConfigError) as caught:
        skips_ahead(SKIP, first_step=5, left_out=[(3, 5)])
    assert str(caught.value) == (
        "data.skip has [3, 4], but step 3 is done: the run resumes with step 5\n"
        "  expected: ranges of future steps: batches that were trained on cannot be left out afterwards\n"
        "  fix: --checkpoint.resume RUN/checkpoints/step-...   (one before step 3; or leave the range out)"
    )


@pytest.mark.parametrize(
    ("skip", "left"),
    [((), 20), (((3, 4),), 18), (((3, 4), (6, 6)), 17), (((19, 30),), 18), (((21, 22),), 20)],
)
def test_steps_of_a_run_that_leaves_batches_out(skip: Any, left: int) -> None:
    """Four epochs of five steps."""
    assert (
        last_step(Order(22, 4, seed=0, shuffle=True, epochs=4), Place(0, 0), done=0, skip=skip)
        == left
    )


def test_setting_is_read_and_checked() -> None:
    assert validate({"data": {"skip": [[10, 20], [15, 15]]}}).data.skip == ((10, 20), (15, 15))
    assert Config().data.skip == ()
    with pytest.raises(ConfigError) as caught:
        validate({"data": {"skip": [[20, 10], [20, 30], [5, 6]]}})
    assert str(caught.value) == (
        "data.skip has [20, 10], which ends before it begins\n"
        "  expected: [first, last], both steps included\n"
        "  fix: --data.skip '[[10, 20]]'\n\n"
        "data.skip has ranges that begin with steps 20, 20, 5: they do not ascend\n"
        "  expected: ranges in the order in which the run reaches them, each beginning with a different step\n"
        "  fix: --data.skip '[[5, 6], [20, 30]]'"
    )


@pytest.mark.parametrize("value", [[[0, 4]], [5], [[1, 2, 3]], "x", [["1", "2"]]])
def test_setting_of_another_form_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"data": {"skip": value}})
    assert (
        caught.value.problems[0].expected
        == "[first, last] ranges of steps, counted from 1: [[1000, 1100]]"
    )
