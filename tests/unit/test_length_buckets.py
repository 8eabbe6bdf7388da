"""Batches of rows of like length: a reordering inside windows, exact, resumable, proved, and cheaper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from threefold.arrays import Int64
from threefold.audit.compare import Audit
from threefold.audit.lookup import find_sample
from threefold.audit.proof import prove, stretches_of
from threefold.audit.record import SegmentLine, read
from threefold.audit.row_lengths import keep, stored
from threefold.data.order.length_buckets import WINDOW
from threefold.data.order.order import Order, Place
from threefold.errors import RunError
from threefold.mesh.topology import Topology

LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 5000).astype(np.int64).clip(2, 512)


def lengths(rows: Int64) -> Int64:
    return LENGTHS[rows]


def order_of(num_rows: int, batch: int = 4, **keys: Any) -> Order:
    return Order(
        num_rows, batch, seed=3, shuffle=True, **{"tail": "carry", "lengths": lengths, **keys}
    )


@pytest.mark.parametrize("tail", ["carry", "drop", "pad", "exact"])
@pytest.mark.parametrize(
    ("num_rows", "batch"), [(1, 1), (3, 4), (200, 4), (201, 4), (999, 4), (1000, 16), (5000, 7)]
)
def test_every_row_is_read_once_and_near_its_place(
    num_rows: int, batch: int, tail: Any
) -> None:
    order = order_of(num_rows, batch, tail=tail)
    bare, positions = replace(order, lengths=None), np.arange(num_rows)
    for epoch in range(3):
        rows = order.rows_at(epoch, positions)
        assert sorted(rows.tolist()) == list(range(num_rows))
        moved = np.argsort(bare.rows_at(epoch, positions))[rows] - positions
        assert abs(moved).max() < WINDOW * batch
        shares = [order.rows_at(epoch, positions[part::3]) for part in range(3)]
        assert all(np.array_equal(rows[part::3], share) for part, share in enumerate(shares))
        assert all(
            order.position_of(epoch, int(rows[at])) == at
            for at in range(0, num_rows, 1 + num_rows // 20)
        )
    if num_rows > WINDOW * batch:
        assert not np.array_equal(order.rows_at(0, positions), order.rows_at(1, positions))


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_ranks_share_the_rows_of_each_step_over_the_ends_of_epochs(dp_size: int) -> None:
    order, place = order_of(333, epochs=3), Place(0, 0)
    counts = np.zeros(333, np.int64)
    while order.steps_left(place):
        whole = order.rows(place, 1)[0]
        for rank in range(dp_size):
            own, ignored = order.rows_of_rank(place, dp_rank=rank, dp_size=dp_size)
            assert (
                np.array_equal(own, whole[rank::dp_size][: len(own)])
                and len(own) + ignored == 4 // dp_size
            )
            counts += np.bincount(own, minlength=333)
        place = order.after(place, 1)
    assert (counts == 3).all()


def test_whole_batches_of_an_epoch_hold_rows_of_like_length_wherever_it_begins() -> None:
    """Epochs of 4,999 rows begin inside a step: batches are cut where the steps are."""
    order = order_of(4999, 16)
    steps = [order.rows(order.after(Place(0, 0), step), 1)[0] for step in range(2 * 4999 // 16)]
    spread = [int(np.ptp(LENGTHS[step])) for step in steps]
    assert np.median(spread) <= 8 and sum(each > 100 for each in spread) < 0.1 * len(steps)


def test_padding_falls_and_short_and_long_batches_alternate() -> None:
    """Figures of docs/fine-tuning.md: places to compute for each token of chats with lengths as above."""

    def places(order: Order) -> tuple[float, list[int]]:
        widths = [order.longest(order.after(Place(0, 0), step)) for step in range(5000 // 16)]
        tokens = LENGTHS[order.rows(Place(0, 0), 5000 // 16)].sum()
        return sum(width or 512 for width in widths) * 16 / tokens, [
            width or 512 for width in widths
        ]

    grouped, widths = places(order_of(5000, 16))
    whole, _ = places(order_of(5000, 16, lengths=None))
    mixed = (
        LENGTHS[order_of(5000, 16, lengths=None).rows(Place(0, 0), 312)].max(axis=1).sum()
        * 16
        / LENGTHS.sum()
    )
    print(
        f"places per token: {whole:.2f} padded to 512, {mixed:.2f} cut to the longest, {grouped:.2f} grouped"
    )
    assert grouped < 1.15 < 2 < mixed < whole
    first, second = np.array(widths[:WINDOW]), np.array(widths[WINDOW : 2 * WINDOW])
    assert abs(np.corrcoef(first, np.arange(WINDOW))[0, 1]) < 0.5 and not np.array_equal(
        first, second
    )


def recorded(run: Path, order: Order, steps: int, *, every: int = 5) -> None:
    """The record of a run that reads what the order has."""
    from threefold.audit import compare
    from threefold.jsonl import MetricsFile

    digest = keep(run, lengths, order.num_rows)
    start = SegmentLine.of(
        order, Place(0, 0), first_step=1, topology=Topology(2, 1, 1, 1), every=every
    )
    start = replace(start, grouped=digest, lengths=order.lengths)
    file = MetricsFile(run / "audit.jsonl", continue_on_error=False)
    start = replace(start, **compare.begin(start, run / "audit.jsonl", file, fix=""))
    batches = order.rows(Place(0, 0), steps)

    told: list[Any] = []
    audits = [
        Audit(start, lambda _: np.stack(told), lambda _: [], record=file if rank == 0 else None)
        for rank in range(2)
    ]
    for step, rows in enumerate(batches, start=1):
        for rank, audit in enumerate(audits):
            audit.observe(step, rows[rank::2])
        if step % every == 0:
            told[:] = [audit._window.message().pack() for audit in audits]
            for audit in audits:
                audit.check()
    file.close()


def test_record_proves_the_order_from_the_lengths_that_the_run_kept(tmp_path: Path) -> None:
    recorded(tmp_path, order_of(150), 60)
    segments = read(tmp_path / "audit.jsonl")
    assert sum(each.stop - each.start for each in prove(segments)) == 240
    row = int(order_of(150).rows(Place(0, 0), 60)[45, 1])
    assert any(
        each.step == 46 and each.dp_rank == 1
        for each in find_sample(stretches_of(segments), row)
    )


def test_other_lengths_and_another_grouping_are_found(tmp_path: Path) -> None:
    recorded(tmp_path, order_of(150), 10)
    (file,) = (tmp_path / "lengths").iterdir()
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"has changed: it is not what audit\.jsonl names"):
        read(tmp_path / "audit.jsonl")
    file.unlink()
    with pytest.raises(
        RunError, match=r"lengths/[0-9a-f]{32}\.i32 cannot be read: No such file"
    ):
        read(tmp_path / "audit.jsonl")
    other = keep(tmp_path, lambda rows: LENGTHS[::-1][rows], 150)
    record = (tmp_path / "audit.jsonl").read_text().replace(file.stem, other)
    (tmp_path / "audit.jsonl").write_text(record)
    with pytest.raises(RunError, match="did not read its samples"):
        prove(read(tmp_path / "audit.jsonl"))


def test_stored_lengths_are_those_of_the_rows(tmp_path: Path) -> None:
    digest = keep(tmp_path, lengths, 5000)
    assert np.array_equal(
        stored(tmp_path, digest, 5000)(np.array([7, 4999])), LENGTHS[[7, 4999]]
    )
    with pytest.raises(RunError, match="has changed"):
        stored(tmp_path, digest, 4999)
