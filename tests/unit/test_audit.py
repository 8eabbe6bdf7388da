"""The audit: what a rank read against what the order predicts, each fault by its name, and the proof afterwards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.arrays import Int64
from threefold.audit import record as audit_record
from threefold.audit.digest import AuditWindow, Message, agree, fold_samples, predicted_samples
from threefold.audit.lookup import (
    coverage,
    coverage_lines,
    find_sample,
    find_step,
    place_after,
    turns,
)
from threefold.audit.offences import Evidence, explain
from threefold.audit.proof import prove, stretches_of
from threefold.audit.record import Line, SegmentLine, SkipLine, StepsLine, described, standing
from threefold.data.order.mixture import Mixture
from threefold.data.order.order import Order, Place
from threefold.data.order.partition import Steps
from threefold.data.order.permutation import Permutation
from threefold.errors import ConfigError, RunError, ranks_text, rows_text
from threefold.mesh.topology import Topology

SEQ_LEN = 4
ONE, TWO, FOUR = Topology(), Topology(dp_replicate=2, tp=2), Topology(dp_shard=4)
ORDER = Order(num_rows=40, global_batch=8, seed=3, shuffle=True)
SECOND = Place(0, 8)
GO_ON = "threefold resume runs/a"


@dataclass(frozen=True)
class CountingRows:
    """Row i holds the tokens 100 i, 100 i + 1, ...; its labels are one to the right."""

    num_rows: int
    fingerprint: str = "counting"
    seq_len: int = SEQ_LEN

    @property
    def store(self) -> Any:
        raise AssertionError("the audit reads rows only")

    report = store

    def rows(self, indices: npt.NDArray[np.integer[Any]]) -> dict[str, Int64]:
        tokens = indices.astype(np.int64)[:, None] * 100 + np.arange(self.seq_len + 1)
        return {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}


@dataclass
class World:
    """All ranks of a mesh in one process; `read` and `change` plant faults."""

    topology: Topology = TWO
    order: Order = ORDER
    begin: Place = SECOND
    first_step: int = 2
    num_steps: int = 5

    def share(self, step: int, dp_rank: int) -> Int64:
        """The rows of one dp rank in a step."""
        place = (
            self.order.after(self.begin, step - self.first_step)
            if step >= self.first_step
            else None
        )
        place = place or self.order.before(self.begin)
        assert place is not None
        return self.order.rows(place, 1)[0, dp_rank :: self.topology.dp]

    def windows(
        self,
        read: Callable[[int, int], Int64] | None = None,
        change: Callable[[int, int, Int64], None] | None = None,
    ) -> list[AuditWindow]:
        """What every rank has read; `read` gives a rank's rows in a step, `change` works on its tokens in place."""
        found = []
        for rank in range(self.topology.world_size):
            rows = CountingRows(self.order.num_rows)
            window = AuditWindow(rows, first_step=self.first_step)
            for step in range(self.first_step, self.first_step + self.num_steps):
                indices = (
                    read(rank, step) if read else self.share(step, self.topology.dp_rank(rank))
                )
                batch = rows.rows(indices)
                if change:
                    change(rank, step, batch["input_ids"])
                window.add(indices, batch["input_ids"], batch["labels"])
            found.append(window)
        return found

    def agrees(self, windows: list[AuditWindow]) -> bool:
        """What every rank concludes from all messages, sent as integers."""
        messages = [Message.unpack(window.message().pack()) for window in windows]
        rows = self.order.rows(self.begin, self.num_steps)
        return agree(
            messages,
            predicted_samples(rows, first_step=self.first_step, dp_size=self.topology.dp),
            self.topology,
        )

    def explain(self, windows: list[AuditWindow], *, resumed: bool = False) -> list[str]:
        """The problems as printed."""
        assert not self.agrees(windows)
        rows_per_step = self.order.global_batch // self.topology.dp
        values = np.stack([window.evidence(rows_per_step) for window in windows])
        messages = [window.message() for window in windows]
        evidence = Evidence(
            self.topology,
            self.order,
            messages,
            values,
            self.first_step,
            self.begin,
            resumed=resumed,
        )
        return [str(problem) for problem in explain(evidence, resume=GO_ON)]


MESHES = st.builds(
    Topology,
    dp_replicate=st.sampled_from([1, 2]),
    dp_shard=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
)


# --- the prediction ------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    num_rows=st.integers(8, 60),
    shuffle=st.booleans(),
    tail=st.sampled_from(["drop", "pad", "exact"]),
    dp_size=st.sampled_from([1, 2, 4]),
    before=st.integers(0, 12),
)
def test_rows_of_steps_are_the_partition_of_the_order(
    num_rows: int, shuffle: bool, tail: Any, dp_size: int, before: int
) -> None:
    """Several steps at once, over the ends of epochs, are what the partition gives step by step."""
    order = Order(num_rows, global_batch=8, seed=5, shuffle=shuffle, tail=tail)
    place = order.after(Place(0, 0), before)
    rows = order.rows(place, 7)
    for number in range(7):
        epoch, position = order.begin(order.after(place, number))
        permutation = Permutation(num_rows, seed=5, epoch=epoch)
        for dp_rank in range(dp_size):
            own = Steps(num_rows, 8, tail).of_rank(position, dp_rank=dp_rank, dp_size=dp_size)
            expected = permutation.at(own.positions) if shuffle else own.positions
            assert rows[number, dp_rank::dp_size].tolist() == [
                *expected.tolist(),
                *[-1] * own.num_ignored,
            ]
            read, num_ignored = order.rows_of_rank(
                Place(epoch, position), dp_rank=dp_rank, dp_size=dp_size
            )
            assert (read.tolist(), num_ignored) == (expected.tolist(), own.num_ignored)


def test_order_of_a_mixture_is_the_mixtures_order() -> None:
    mixture = Mixture({"a": 10, "b": 33}, {"a": 1, "b": 2}, seed=4)
    order = Order(43, 8, seed=4, shuffle=True, mixture=mixture)
    assert (
        order.rows(Place(0, 16), 9).ravel().tolist()
        == mixture.rows_at(np.arange(16, 88)).tolist()
    )


@given(num_rows=st.integers(8, 60), steps=st.integers(1, 30))
def test_before_undoes_after(num_rows: int, steps: int) -> None:
    order = Order(num_rows, 8, seed=0, shuffle=True)
    assert order.before(order.after(Place(0, 0), steps)) == order.after(Place(0, 0), steps - 1)
    assert order.before(Place(0, 0)) is None


# --- what the ranks say of one another -------------------------------------------------------------------------------


@settings(deadline=None)
@given(topology=MESHES, num_steps=st.integers(1, 7), begin=st.integers(0, 9))
def test_ranks_that_read_their_own_agree(
    topology: Topology, num_steps: int, begin: int
) -> None:
    order = Order(num_rows=43, global_batch=8, seed=3, shuffle=True)
    world = World(topology, order, order.after(Place(0, 0), begin), begin + 1, num_steps)
    assert world.agrees(world.windows())


def test_rank_that_takes_its_tp_rank_for_its_dp_rank() -> None:
    world = World()
    first, second = world.share(2, 0), world.share(2, 1)
    windows = world.windows(
        lambda rank, step: world.share(step, world.topology.coordinates(rank)[3])
    )
    expected = "\n  expected: the samples of its own dp rank on dp=2 x cp=1 x tp=2: others have read these already, "
    expected += "and nobody reads its own\n  fix: give its loader dp_rank=mesh.dp_rank and dp_size=mesh.dp_size, then: "
    assert world.explain(windows) == [
        "rank 1 (dp rank 0, cp rank 0, tp rank 1) read the samples of dp rank 1 in step 2: "
        f"{rows_text(second)} instead of {rows_text(first)}{expected}{GO_ON}",
        "rank 2 (dp rank 1, cp rank 0, tp rank 0) read the samples of dp rank 0 in step 2: "
        f"{rows_text(first)} instead of {rows_text(second)}{expected}{GO_ON}",
    ]


AGAIN = f"  fix: resume from the last checkpoint: {GO_ON}   (if it happens again, with --data.num_workers 0)"


def test_repeated_batch() -> None:
    world = World()
    windows = world.windows(
        lambda rank, step: world.share(step - (step >= 4), world.topology.dp_rank(rank))
    )
    assert world.explain(windows) == [
        "ranks 0 to 3 read the batch of step 3 again in step 4: on rank 0 "
        f"{rows_text(world.share(3, 0))} instead of {rows_text(world.share(4, 0))}\n"
        f"  expected: each batch once: step 4 reads the batch after that of step 3\n{AGAIN}"
    ]


def test_skipped_batch() -> None:
    world = World()
    windows = world.windows(
        lambda rank, step: world.share(step + (step >= 5), world.topology.dp_rank(rank))
    )
    (problem,) = world.explain(windows)
    assert problem == (
        "ranks 0 to 3 read the batch of step 6 in step 5: the batch of step 5 was left out: on rank 0 "
        f"{rows_text(world.share(6, 0))} instead of {rows_text(world.share(5, 0))}\n"
        f"  expected: every batch: step 5 reads the batch after that of step 4\n{AGAIN}"
    )


@pytest.mark.parametrize(
    ("off", "named"),
    [(1, "read the batch of step 3 in"), (-1, "read the batch of step 1 again")],
)
def test_resume_one_step_off(off: int, named: str) -> None:
    world = World()
    windows = world.windows(
        lambda rank, step: world.share(step + off, world.topology.dp_rank(rank))
    )
    (problem,) = world.explain(windows, resumed=True)
    assert problem.startswith(f"ranks 0 to 3 {named}")
    assert "step 2 (the first after the resume)" in problem


def test_one_rank_alone_is_named() -> None:
    world = World()
    windows = world.windows(
        lambda rank, step: world.share(step + (rank == 3 and step == 6), rank // 2)
    )
    (problem,) = world.explain(windows)
    assert problem.startswith(
        "rank 3 read the batch of step 7 in step 6: the batch of step 6 was left out"
    )


def test_changed_token() -> None:
    def change(rank: int, step: int, tokens: Int64) -> None:
        if (rank, step) == (1, 4):
            tokens[2, 3] += 1

    world = World()
    row = int(world.share(4, 0)[2])
    assert world.explain(world.windows(change=change)) == [
        f"rank 1 trained on a changed token in step 4: row {row} has input_ids[3] = {100 * row + 4}, the source "
        f"{100 * row + 3}\n"
        "  expected: the tokens of the source: something between it and the step has changed them (a worker, memory)\n"
        f"{AGAIN}"
    ]


def test_token_changed_alike_on_all_ranks_of_a_dp_rank() -> None:
    """No rank differs from another: only the source knows."""

    def change(rank: int, step: int, tokens: Int64) -> None:
        if rank < 2 and step == 3:
            tokens[0, 0] = 7

    (problem,) = World().explain(World().windows(change=change))
    assert problem.startswith("ranks 0 and 1 trained on a changed token in step 3: row ")
    assert "input_ids[0] = 7, the source " in problem


def test_rows_that_no_step_nearby_has() -> None:
    world = World()
    (problem,) = world.explain(
        world.windows(
            lambda rank, step: np.arange(4) if step == 3 else world.share(step, rank // 2)
        )
    )
    assert problem.startswith(
        "ranks 0 to 3 read other samples than the order has in step 3: on rank 0 rows 0, 1, 2, 3 instead of "
    )
    assert "\n  expected: the order of data.seed = 3 and 40 rows\n" in problem


def test_another_source_behind_a_rank() -> None:
    world = World()
    windows = world.windows()
    windows[2]._source = 5
    assert world.explain(windows) == [
        "rank 2 read another source than rank 0: its fingerprint differs\n"
        "  expected: the same tokens on every rank: otherwise a sample's number means different samples\n"
        "  fix: threefold data prepare --data.source ... --to DIR   once, copy DIR to all machines, "
        "and --data.source DIR"
    ]


def test_damaged_copy_of_the_source_behind_a_rank() -> None:
    """Each rank agrees with its own copy, and the two ranks of a dp rank do not agree with one another."""
    world = World()
    windows = world.windows()
    windows[3].contents ^= 1
    assert world.explain(windows) == [
        "rank 3 read other tokens than the first rank of the same dp rank, in steps 2 to 6, though the samples are "
        "the same\n"
        "  expected: the same contents on every rank; each rank agrees with its own copy of the source\n"
        f"  fix: compare the copies of the source on the machines, replace the damaged one, then: {GO_ON}"
    ]


def test_row_that_the_source_does_not_have() -> None:
    window = AuditWindow(CountingRows(10), first_step=1)
    batch = CountingRows(99).rows(np.array([3, 50]))
    window.add(np.array([3, 50]), *batch.values())
    assert window.difference is not None and window.difference[:2] == (1, 50)


def test_rows_without_a_sample_are_left_out() -> None:
    rows = CountingRows(10)
    with_ignored, without = AuditWindow(rows, first_step=1), AuditWindow(rows, first_step=1)
    batch = rows.rows(np.array([3, 4, 3]))
    batch["labels"][2] = -100
    with_ignored.add(np.array([3, 4, -1]), *batch.values())
    without.add(np.array([3, 4]), *(values[:2] for values in batch.values()))
    assert with_ignored.message() == without.message()


def test_digest_depends_on_step_and_order() -> None:
    one = np.array([1, 2, 3])
    digests = {
        fold_samples(0, 1, one),
        fold_samples(0, 2, one),
        fold_samples(0, 1, one[::-1]),
        fold_samples(5, 1, one),
    }
    assert len(digests) == 4
    # A digest that another release must reproduce to prove a run of this one.
    assert f"{fold_samples(0, 1, one):016x}" == "8f9cc030ea91bd74"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0 and 1"),
        ([2, 0, 1], "ranks 0 to 2"),
        ([0, 2, 5], "ranks 0, 2 and 5"),
    ],
)
def test_names_of_ranks(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_names_of_rows() -> None:
    assert rows_text([7]) == "row 7"
    assert rows_text(range(8)) == "rows 0, 1, 2, 3, 4, 5 and 2 more"
    assert rows_text([-1]) == "no row"


# --- the record and its proof ----------------------------------------------------------------------------------------


def record(
    *segments: tuple[int, int, Topology, int],
    num_rows: int = 43,
    every: int = 5,
    mixture: Mixture | None = None,
    skip: dict[int, tuple[int, int]] | None = None,
    tail: Any = "drop",
    epochs: int | None = None,
) -> list[Line]:
    """What a run writes that starts at each (first step, last step, mesh, global batch)."""
    lines: list[Line] = []
    places: dict[int, Place] = {0: Place(0, 0)}
    for number, (first_step, last_step, topology, global_batch) in enumerate(segments, start=1):
        order = Order(
            num_rows,
            global_batch,
            seed=3,
            shuffle=True,
            tail=tail,
            mixture=mixture,
            epochs=epochs,
        )
        place = order.begin(places[first_step - 1])
        sources = described(mixture) if mixture else None
        recorded = (num_rows, 3, True, tail, 2, "counting", sources, every, None, epochs)
        lines.append(
            SegmentLine(number, first_step, *place, topology.sizes, global_batch, *recorded)
        )
        step = first_step
        while step <= last_step:
            if skip and step in skip:
                first, last = skip[step]
                batches = last - first + 1
                lines.append(SkipLine(number, step, first, last, *place, batches))
                place = order.after(place, batches)
            stops = [
                step + every - 1 - (step - 1) % every,
                last_step,
                *(at - 1 for at in skip or {} if at > step),
            ]
            last = min(stops)
            rows = order.rows(place, last - step + 1)
            contents = []
            for dp_rank in range(topology.dp):
                window = AuditWindow(CountingRows(num_rows), first_step=step)
                for indices in rows[:, dp_rank :: topology.dp]:
                    # Of -1 too: left out.
                    window.add(indices, *CountingRows(num_rows).rows(indices).values())
                contents.append(window.contents)
            samples = predicted_samples(rows, first_step=step, dp_size=topology.dp)
            lines.append(StepsLine(number, step, last, *place, tuple(samples), tuple(contents)))
            for done in range(step, last + 1):
                places[done] = order.after(place, done - step + 1)
            step, place = last + 1, places[last]
    return lines


@settings(deadline=None, max_examples=30)
@given(
    stops=st.lists(
        st.tuples(st.integers(0, 8), MESHES, st.sampled_from([8, 16])), min_size=1, max_size=4
    ),
    num_rows=st.integers(16, 60),
    tail=st.sampled_from(["drop", "carry"]),
)
def test_run_over_any_stops_and_meshes_is_proved(
    stops: list[Any], num_rows: int, tail: str
) -> None:
    """Each start goes on some steps before the last one ended; what stands is proved and covers each row once."""
    segments, done = [], 0
    for number, (back, topology, global_batch) in enumerate(stops):
        first = max(1, done + 1 - (back if number else 0))
        segments.append((first, first + 11, topology, global_batch))
        done = first + 11
    standing_segments = standing(record(*segments, num_rows=num_rows, tail=tail))
    stretches = prove(standing_segments, CountingRows(num_rows))
    counted: Counter[tuple[int, int]] = Counter()
    for stretch in stretches:
        counted.update((stretch.epoch, at) for at in range(stretch.start, stretch.stop))
    assert set(counted.values()) == {1}
    for epoch in coverage(stretches):
        assert epoch.read == sum(1 for e, _ in counted if e == epoch.epoch)
        assert epoch.named is None or epoch.unread == len(epoch.named) or len(epoch.named) == 8
        assert epoch.named is None or tail == "drop" or epoch.unread == 0


def test_epochs_of_an_endless_order_are_read_to_the_last_row() -> None:
    """43 rows twice: five steps of 8, two of 8 again, then of 16 up to the short last one."""
    lines = record((1, 5, TWO, 8), (5, 6, ONE, 8), (7, 9, FOUR, 16), tail="carry", epochs=2)
    stretches = prove(standing(lines), CountingRows(43))
    assert [(epoch.epoch, epoch.read, epoch.unread) for epoch in coverage(stretches)] == [
        (0, 43, 0),
        (1, 43, 0),
    ]
    assert list(coverage_lines(stretches)) == [
        "  epoch 0: 43 of 43 rows, each exactly once",
        "  epoch 1: 43 of 43 rows, each exactly once",
        "  train.epochs 2: 86 of 86 reads: every sample exactly 2 times",
    ]
    last = lines[-1]
    assert (
        isinstance(last, StepsLine)
        and Order(43, 16, 3, True, "carry", epochs=2).num_read(last.place, 3) == 38
    )
    with pytest.raises(RunError, match="dp rank 0 did not read its samples"):
        prove(
            standing(
                [
                    replace(line, epochs=3) if isinstance(line, SegmentLine) else line
                    for line in lines
                ]
            )
        )


@pytest.mark.parametrize(
    ("tail", "steps", "said"),
    [
        ("drop", 5, ["  epoch 0: 40 of 43 rows, each exactly once; 3 not: they do not fill a batch at the end (rows ",
                     "  train.epochs 1: 40 of 43 reads, no batch left"]),
        ("drop", 4, ["  epoch 0: 32 of 43 rows, each exactly once; 11 not yet",
                     "  train.epochs 1: 32 of 43 reads; 11 rows left"]),
        ("carry", 5, ["  epoch 0: 40 of 43 rows, each exactly once; 3 not yet",
                      "  train.epochs 1: 40 of 43 reads; 3 rows left"]),
        ("carry", 6, ["  epoch 0: 43 of 43 rows, each exactly once",
                      "  train.epochs 1: 43 of 43 reads: every sample exactly once"]),
    ],
)  # fmt: skip
def test_end_of_the_epochs_is_said(tail: str, steps: int, said: list[str]) -> None:
    found = list(
        coverage_lines(prove(standing(record((1, steps, ONE, 8), tail=tail, epochs=1))))
    )
    assert len(found) == len(said)
    assert all(line.startswith(text) for line, text in zip(found, said, strict=True)), found


def test_lines_read_back(tmp_path: Path) -> None:
    mixture = Mixture({"a": 10, "b": 33}, {"a": 1, "b": 2}, seed=3)
    lines = record((1, 12, TWO, 8), mixture=mixture, skip={4: (4, 6)})
    path = tmp_path / "audit.jsonl"
    path.write_text(
        "".join(json.dumps(line.to_record()) + "\n" for line in lines) + '{"kind": "ste'
    )
    assert audit_record.read_lines(path) == lines
    assert prove(audit_record.read(path), CountingRows(43))


def test_later_start_supersedes() -> None:
    segments = standing(record((1, 12, TWO, 8), (8, 14, ONE, 8), (8, 9, FOUR, 8)))
    assert [(s.start.segment, s.last_step) for s in segments] == [(1, 7), (3, None)]
    assert place_after(segments, 7) == Place(1, 16)
    assert place_after(segments, 10) is None
    found = find_step(segments, 8)
    assert found is not None and found.topology == FOUR
    prove(segments)


def _changed(lines: list[Line], kind: type, **values: Any) -> list[Line]:
    """The lines with some values of the last line of a kind replaced."""
    place = max(number for number, line in enumerate(lines) if isinstance(line, kind))
    changed: Any = replace(lines[place], **values)
    return [*lines[:place], changed, *lines[place + 1 :]]


CLEAN = record((1, 12, TWO, 8), (8, 14, ONE, 8), skip={9: (9, 10)})
LAST = next(line for line in reversed(CLEAN) if isinstance(line, StepsLine))


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (
            _changed(CLEAN, StepsLine, samples=(1,)),
            "steps 11 to 14: dp rank 0 did not read its samples, according to its digest",
        ),
        (
            _changed(CLEAN, StepsLine, samples=(1, 2), contents=(1, 2)),
            "steps 11 to 14: dp rank 0 did not read",
        ),
        (
            _changed(CLEAN, StepsLine, contents=(1,)),
            "steps 11 to 14: the tokens that dp rank 0 read are not those",
        ),
        (
            _changed(CLEAN, StepsLine, position=LAST.position + 8),
            f"step 11 begins at position {LAST.position + 8} of epoch 2, but the steps before it ended",
        ),
        (_changed(CLEAN, StepsLine, first=12), "step 11 has no record"),
        (
            _changed(CLEAN, StepsLine, first=10),
            "step 10 is recorded twice within one start of the run",
        ),
        (
            _changed(CLEAN, StepsLine, faults=("rank 1 read x",)),
            "steps 11 to 14: the run itself found: rank 1 read x",
        ),
        (
            _changed(CLEAN, SegmentLine, position=8),
            "step 8 begins at position 8 of epoch 1, but the steps before it ended",
        ),
        (
            _changed(CLEAN, SegmentLine, seed=4),
            "step 8 continues in another order: seed = 4, before it 3",
        ),
        (
            _changed(CLEAN, SegmentLine, data="x"),
            "step 8 continues in another order: data = x, before it counting",
        ),
        (
            _changed(CLEAN, SegmentLine, mesh=(2, 1, 1, 1)),
            "step 8: dp rank 0 did not read its samples",
        ),
        (
            _changed(CLEAN, SkipLine, batches=1),
            "step 9 begins at position 0 of epoch 2, but the steps before it ended",
        ),
        (
            [line for line in CLEAN if not isinstance(line, SkipLine)],
            "step 9 begins at position 0 of epoch 2, but the",
        ),
        ([*CLEAN[:2], *CLEAN[3:]], "steps 6 to 7 have no record"),
    ],
)
def test_tampered_record_is_found(lines: list[Line], what: str) -> None:
    prove(standing(CLEAN), CountingRows(43))
    with pytest.raises(RunError) as caught:
        prove(standing(lines), CountingRows(43))
    assert caught.value.problems[0].what.startswith(what)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    "text",
    ["nonsense\n", "[]\n", '{"kind": "steps"}\n', '{"kind": "segment", "segment": "x"}\n', ""],
)
def test_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text(text)
    with pytest.raises(
        RunError, match=r"is not what a run writes|does not begin with the start of a run"
    ):
        audit_record.read(path)


def test_run_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        audit_record.read(tmp_path / "audit.jsonl")
    assert str(caught.value) == (
        f"{tmp_path} has no audit.jsonl\n"
        "  expected: the folder of a run, or for `data audit` a token store with its tokens.parts\n"
        "  fix: check the path: a run's folder is its log.dir (runs/... if none was given)"
    )


# --- who read what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixture", "tail"),
    [
        (None, "drop"),
        (None, "carry"),
        (None, "exact"),
        (Mixture({"a": 10, "b": 33}, {"a": 1, "b": 2}, seed=3), "drop"),
        (Mixture({"a": 10, "b": 33}, {"a": 123_457, "b": 654_321}, seed=3), "drop"),
    ],
)
def test_sample_is_found_where_it_was_read(mixture: Mixture | None, tail: str) -> None:
    segments = standing(record((1, 12, TWO, 8), (8, 20, FOUR, 8), mixture=mixture, tail=tail))
    stretches = stretches_of(segments)
    expected: dict[int, list[tuple[int, int]]] = {row: [] for row in range(43)}
    for step in range(1, 21):
        read = find_step(segments, step)
        assert read is not None and read.step == step
        for place, row in enumerate(read.rows.tolist()):
            if row >= 0:  # where an epoch of `exact` is over, there is none
                expected[row].append((step, place % read.topology.dp))
    assert sum(each.stop - each.start for each in stretches) == sum(map(len, expected.values()))
    for row in range(43):
        found = [read for read in find_sample(stretches, row) if read.step is not None]
        assert [(read.step, read.dp_rank) for read in found] == expected[row]
        assert all(
            len(read.ranks) == (2 if read.step < 8 else 1) for read in found if read.step
        )
    if mixture is not None:
        counts = Counter(
            "a" if row < 10 else "b" for row, reads in expected.items() for _ in reads
        )
        assert turns(stretches) == [("a", 10, counts["a"]), ("b", 33, counts["b"])]


def test_sample_that_was_left_out_is_said() -> None:
    segments = standing(record((1, 5, TWO, 8), skip={3: (3, 4)}))
    stretches = stretches_of(segments)
    rows = segments[0].start.order.rows(Place(0, 16), 2).ravel()
    assert next(read.step for read in find_sample(stretches, int(rows[3]))) == 0
    epoch = coverage(stretches)[0]
    assert (epoch.read, epoch.left_out) == (24, 16)
    assert find_step(segments, 6) is None


def test_batches_left_out_over_the_end_of_an_epoch() -> None:
    """Two batches of 8 at position 32 of 43: eleven rows of one epoch, five of the next."""
    segments = standing(record((1, 8, TWO, 8), skip={5: (5, 6)}, tail="carry", epochs=2))
    stretches = prove(segments, CountingRows(43))
    assert [(epoch.read, epoch.left_out) for epoch in coverage(stretches)] == [
        (32, 11),
        (32, 5),
    ]
    said = list(coverage_lines(stretches))
    assert [line.partition(" (")[0] for line in said if "left out" in line] == [
        "  left out by data.skip: positions 32 to 42 of epoch 0",
        "  left out by data.skip: positions 0 to 4 of epoch 1",
    ]
    assert "  train.epochs 2: 64 of 86 reads; 6 rows left" in said
    read = find_step(segments, 5)
    assert read is not None and read.places == [Place(1, 5)]
