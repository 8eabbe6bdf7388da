"""The curves of a page: the loss of every step, time as it passed, what a start chose, and what is left to do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_why import STEPS, write

from report_runs import at, head_of, make_run, step_line, write_lines
from threefold.records.metrics import Points
from threefold.report.document import points_of, report
from threefold.report.facts import gather, resolved
from threefold.report.headline import differing, figures
from threefold.report.run_list import listed, runs_in
from threefold.report.sections import judged
from threefold.report.thinned_curves import with_rows


def points(values: dict[int, float]) -> Points:
    return Points(np.array(list(values), np.int64), np.array(list(values.values())))


def test_of_a_run_that_logs_some_steps_every_step_has_its_loss(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in logged if line["step"] == 1 or line["step"] % 10 == 0]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    curve = points_of([gather(run)], [judged(run)])["runs"][0]["curves"]["loss"]
    assert curve["x"] == list(range(1, STEPS + 1))
    assert curve["y"] == pytest.approx([line["loss"] for line in logged], rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "steps"),
    [({1: 2.0, 2: 1.5, 3: 1.0}, [1, 2, 3]), ({1: 1.9, 2: 1.5, 3: 1.0}, [1, 3])],
)
def test_losses_of_rows_are_taken_only_if_they_are_what_was_logged(
    rows: dict[int, float], steps: list[int]
) -> None:
    merged = with_rows(points({1: 2.0, 3: 1.0}), points(rows))
    assert merged.steps.tolist() == steps and merged.values[0] == 2.0


def test_a_loss_that_was_not_finite_in_both_is_the_same() -> None:
    merged = with_rows(
        points({1: math.nan, 3: 1.0}), points({1: math.nan, 2: math.nan, 3: 1.0, 4: 0.5})
    )
    assert merged.steps.tolist() == [1, 2, 3, 4] and np.isnan(merged.values[:2]).all()
    assert with_rows(points({1: math.nan}), points({1: 2.0, 2: 1.0})).steps.tolist() == [1]
    assert with_rows(points({}), points({1: 2.0})).steps.tolist() == []


def test_each_pass_over_the_steps_has_its_own_time(tmp_path: Path) -> None:
    """Steps 1 to 20 in 20 s, an hour's pause, then from step 11 on again: nothing is at the time of another pass."""
    first = [step_line(step) for step in range(1, 21)]
    again = [step_line(step, time=at(3600 + step)) for step in range(12, 31, 2)]
    events = [{"event": "start", "time": at(3605), "start": 2, "step": 10}]
    run = make_run(tmp_path / "run", [*first, *again], events=events)
    drawn = points_of([gather(run)], [None])["runs"][0]
    before, after = drawn["passes"]
    assert (before["pass"], before["first"], before["x"][-1], before["y"][-1]) == (
        1,
        1,
        20,
        19.0,
    )
    # It began after step 10, 3,604 s after the first logged step; its first logged step is 12.
    assert (after["pass"], after["first"], after["x"][:2], after["y"][:2]) == (
        2,
        11,
        [10, 12],
        [3604.0, 3611.0],
    )
    (old,) = drawn["curves"]["loss"]["old"]
    assert old["pass"] == 1 and old["x"] == list(range(12, 21))
    assert drawn["marks"] == [{"step": 10, "kind": "resume", "seconds": 3604.0}]


def test_what_was_left_to_a_start_is_shown_as_it_chose() -> None:
    config = {
        "mesh": {"dp": None, "tp": 2},
        "train": {"steps": None},
        "optimizer": {"lr": "auto"},
        "data": {"seed": None},
    }
    start = {"mesh": [2, 2, 1, 2], "head": head_of("llama")}
    assert resolved(config, start) == {
        "mesh.dp": "4 (auto)", "mesh.tp": "2", "train.steps": "80 (auto)", "optimizer.lr": "0.001 (auto)",
        "data.seed": "None",
    }  # fmt: skip
    assert resolved(config, {})["mesh.dp"] == "None"


def test_keys_that_differ_are_the_same_for_all_runs() -> None:
    configs = [
        {"a": "1", "b": "2", "log.dir": "x"},
        {"a": "1", "b": "3", "log.dir": "y"},
        {"a": "1"},
    ]
    assert differing(configs) == [{"b": "2"}, {"b": "3"}, {"b": "-"}]
    assert differing([]) == []


def test_the_list_has_a_column_for_each_key_in_which_runs_differ(tmp_path: Path) -> None:
    for name, rate in (("a", "0.5"), ("b", "0.25"), ("c", "[broken")):
        make_run(tmp_path / name, [step_line(1)])
        (tmp_path / name / "config.yaml").write_text(
            f"optimizer: {{lr: {rate}}}\ntrain: {{steps: 3}}\n"
        )
    page = listed(runs_in(tmp_path))
    assert ">optimizer.lr</th>" in page and ">0.25</td>" in page and page.count("</tr>") == 4
    assert listed({}) and "<table" not in listed({})


def test_a_run_that_goes_says_how_long_it_has_left(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step_line(step) for step in range(1, 41)])
    facts = gather(run)
    facts.state = "stopped"
    assert "<dt>left" not in figures(facts)
    facts.state = "running"
    # 60 of 100 steps, a second each.
    assert "<dt>left</dt><dd>about 1 min 0 s<progress" in figures(facts)
    write_lines(
        run / "metrics.jsonl", [step_line(step) for step in range(41, 121)], append=True
    )
    facts.metrics.read()
    assert "about 0.0 s" in figures(facts)


def test_a_page_of_a_run_without_times_is_drawn(tmp_path: Path) -> None:
    lines: list[Any] = [step_line(step, time=None) for step in range(1, 5)]
    facts = gather(
        make_run(tmp_path / "run", lines, events=[{"event": "stop", "time": "?", "step": 4}])
    )
    drawn = points_of([facts], [None])["runs"][0]
    assert drawn["passes"] == [] and drawn["marks"][0]["seconds"] is None and report([facts])
