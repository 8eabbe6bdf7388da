"""The metrics file: floats read back to the same value, and a line torn by a kill never reaches a reader."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threefold.config.paths import METRICS
from threefold.jsonl import MetricsFile, cut_torn_line
from threefold.records.metrics import Metrics
from threefold.training.progress import Stopwatch, peak_memory_bytes

LINES = b'{"step": 1}\n{"step": 2}\n'


def read_metrics(path: Path) -> list[Any]:
    """All lines of a file, without a torn last one."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@settings(deadline=None)
@given(losses=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_floats_read_back_to_the_same_value(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float]
) -> None:
    """Bit for bit, the sign of zero and subnormal numbers included."""
    path = tmp_path_factory.getbasetemp() / "floats.jsonl"
    path.unlink(missing_ok=True)
    file = MetricsFile(path)
    for step, loss in enumerate(losses, start=1):
        file.log({"step": step, "loss": loss})
    file.close()
    found = read_metrics(path)
    assert [line["step"] for line in found] == list(range(1, len(losses) + 1))
    assert [line["loss"].hex() for line in found] == [loss.hex() for loss in losses]


def test_what_is_not_finite_is_null_and_reads_back_as_no_number(tmp_path: Path) -> None:
    """JSON has no NaN: a strict reader must get through, and the readers of runs must agree on what it is."""
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path)
    for step, loss in enumerate((1.5, math.nan, math.inf, -math.inf), start=1):
        file.log({"step": step, "loss": loss, "grad_norm": loss})
    file.close()
    lines = [
        json.loads(line, parse_constant=pytest.fail)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert [line["loss"] for line in lines] == [1.5, None, None, None]
    metrics = Metrics(path)
    assert not metrics.damaged
    for name in ("loss", "grad_norm"):
        np.testing.assert_array_equal(
            metrics.points(name).values, [1.5, math.nan, math.nan, math.nan]
        )


def test_each_line_is_there_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    """A run may be killed at any time, and a user may read along."""
    file = MetricsFile(tmp_path / "m.jsonl")
    for step in (1, 2):
        file.log({"step": step, "loss": 0.5})
        assert len(read_metrics(tmp_path / "m.jsonl")) == step
    file.close()


def test_resumed_run_appends(tmp_path: Path) -> None:
    for steps in ((1, 2), (2, 3)):
        file = MetricsFile(tmp_path / "m.jsonl")
        for step in steps:
            file.log({"step": step})
        file.close()
    assert [line["step"] for line in read_metrics(tmp_path / "m.jsonl")] == [1, 2, 2, 3]


@pytest.mark.parametrize(
    "torn", [b"", b"{", b'{"step": 3, "loss": 0.', b'{"step": 3}', "{é".encode()[:2]]
)
def test_torn_last_line_is_cut_before_the_first_append(tmp_path: Path, torn: bytes) -> None:
    """A line counts when its end is written; one that happens to parse may still be half a number."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(LINES + torn)
    file = MetricsFile(path)
    assert path.read_bytes() == LINES
    file.log({"step": 3})
    file.close()
    assert path.read_bytes() == LINES + b'{"step": 3}\n'


@pytest.mark.parametrize("torn", [b"", b"{", b'{"step": 3}'])
def test_reader_leaves_a_torn_line_out_and_in_place(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(LINES + torn)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    assert path.read_bytes() == LINES + torn


def test_file_of_nothing_but_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step"')
    assert read_metrics(path) == []
    cut_torn_line(path)
    assert path.read_bytes() == b""
    assert read_metrics(path) == []


def test_cutting_makes_no_file(tmp_path: Path) -> None:
    cut_torn_line(tmp_path / "nothing.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_text_of_any_language_is_one_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.log({"note": "line\nbreak \u2028 é"})
    file.close()
    assert (tmp_path / "m.jsonl").read_bytes().count(b"\n") == 1
    assert read_metrics(tmp_path / "m.jsonl") == [{"note": "line\nbreak \u2028 é"}]
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"note": "line\nbreak \u2028 é"}


def test_stopwatch_laps_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.5, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    watch = Stopwatch()
    assert [watch.lap(), watch.lap()] == [0.5, 2.5]


def test_peak_memory_is_in_bytes() -> None:
    assert 10 * 2**20 < peak_memory_bytes("cpu") < 2**40


def _logged(run: Path, *lines: Any) -> Metrics:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run / METRICS).write_text("\n".join(texts) + "\n")
    return Metrics(run / METRICS)


def test_what_a_rewind_left_behind_does_not_stand(tmp_path: Path) -> None:
    def step(number: int, loss: float) -> dict[str, Any]:
        return {"step": number, "loss": loss}

    logged = _logged(
        tmp_path,
        *(step(number, 3.0) for number in range(1, 7)),
        {"step": 7, "skipped": "the loss is not finite on rank 1"},
        step(8, 3.0),
        {"step": 8, "eval_loss": 2.0},
        *(step(number, 2.0) for number in range(5, 7)),
    )
    assert dict(zip(*logged.points("loss"), strict=True)) == {
        **dict.fromkeys(range(1, 5), 3.0),
        **dict.fromkeys(range(5, 7), 2.0),
    }
    assert logged.skipped == {} and logged.damaged == []


def test_a_damaged_line_is_named_and_left_out(tmp_path: Path) -> None:
    logged = _logged(
        tmp_path,
        {"step": 1, "loss": 2.0},
        '{"step": 2, "lo',
        {"step": "x"},
        [],
        {"step": 3, "loss": 1.0},
    )
    assert logged.steps == [1, 3]
    assert [(file, line) for file, line, _ in logged.damaged] == [
        (METRICS, number) for number in (2, 3, 4)
    ]
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')
    assert Metrics(tmp_path / METRICS).damaged == [
        *logged.damaged,
        (METRICS, 6, "it is incomplete"),
    ]
    assert Metrics(tmp_path / METRICS).damaged[:-1] == logged.damaged
    assert Metrics(tmp_path / "nowhere").steps == []


def test_an_update_that_was_left_out_is_logged_late_and_begins_no_pass(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 3.0} for step in range(1, 9)]
    logged = _logged(
        tmp_path,
        *lines,
        {"step": 7, "skipped": "the loss is not finite"},
        {"step": 9, "loss": 2.0},
    )
    assert logged.steps == [*range(1, 10)] and logged.skipped == {7: "the loss is not finite"}
