"""Timelines: phases follow one another, as trace events that viewers read; and what is broken is left out."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from threefold.config.loading import validate
from threefold.errors import ConfigError
from threefold.training.progress import Progress
from threefold.training.timeline import MERGED, Timeline, intervals, merge

PHASES = ("data", "forward", "backward", "reduce", "optimizer")


class Event:
    """As a torch.cuda.Event: its time on the device, in the order in which events are recorded."""

    now_ms = 0.0

    def record(self) -> None:
        Event.now_ms += 2.5
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def run_steps(timeline: Timeline, steps: range) -> None:
    progress = Progress()
    progress.timeline = timeline
    for step in steps:
        for number, phase in enumerate(PHASES):
            progress.enter(phase, step=None if number else step)
    progress.close()


def is_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a file, after a comparison with what Chrome's trace event format asks for."""
    trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert all(type(event[key]) is int for key in ("pid", "tid"))
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
        else:
            assert event["ph"] == "X" and event["cat"] == "phase"
            assert all(isinstance(event[key], int | float) and event[key] >= 0 for key in ("ts", "dur"))
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_phases_of_the_steps_asked_for_follow_one_another(tmp_path: Path) -> None:
    for rank in (0, 3):
        run_steps(Timeline(tmp_path, rank, (2, 3)), range(1, 6))
    for rank in (0, 3):
        own = [each for each in intervals(tmp_path) if each.rank == rank]
        assert [(each.step, each.name) for each in own] == [(step, name) for step in (2, 3) for name in PHASES]
        for before, after in itertools.pairwise(own):
            assert before.begin_s <= before.end_s == pytest.approx(after.begin_s, abs=1e-5)
        is_trace(tmp_path / f"timeline/rank-000{rank}.json")
    assert merge(tmp_path) == tmp_path / "timeline" / MERGED
    events = is_trace(tmp_path / "timeline" / MERGED)
    assert {event["pid"] for event in events} == {0, 3}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 3"]
    assert len(intervals(tmp_path)) == 20, "the merged file is not read again"


def test_a_device_has_a_track_of_its_own(tmp_path: Path) -> None:
    run_steps(Timeline(tmp_path, 0, (1, 1), Event), range(1, 3))
    device = [each for each in intervals(tmp_path) if each.track == "device"]
    assert [each.name for each in device] == list(PHASES)
    assert {round((each.end_s - each.begin_s) * 1e3, 2) for each in device} == {2.5}
    assert is_trace(tmp_path / "timeline/rank-0000.json")


def test_a_run_that_ends_early_keeps_what_was_noted_and_one_that_fails_waits_for_no_device(tmp_path: Path) -> None:
    run_steps(Timeline(tmp_path / "early", 0, (2, 9)), range(1, 4))
    assert {each.step for each in intervals(tmp_path / "early")} == {2, 3}
    failed = Timeline(tmp_path / "failed", 0, (1, 9), Event)
    failed.enter(1, "data")
    failed.close(device=False)
    failed.close()
    assert [each.track for each in intervals(tmp_path / "failed")] == ["host"]
    run_steps(Timeline(tmp_path / "never", 0, (8, 9)), range(1, 4))
    assert not (tmp_path / "never/timeline").exists() and merge(tmp_path / "never") is None


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}', "\x00"])
def test_files_that_are_no_timeline_are_left_out(tmp_path: Path, content: str) -> None:
    run_steps(Timeline(tmp_path, 0, (1, 1)), range(1, 3))
    (tmp_path / "timeline/rank-0001.json").write_text(content)
    assert {each.rank for each in intervals(tmp_path)} == {0}


def test_a_range_of_steps_is_checked() -> None:
    def refused(steps: list[int]) -> str:
        with pytest.raises(ConfigError) as caught:
            validate({"log": {"timeline": steps}, "train": {"steps": 2000}})
        return str(caught.value)

    assert refused([5, 3]).splitlines()[0] == "log.timeline = [5, 3] ends before it begins"
    assert refused([1, 1001]).splitlines()[0] == "log.timeline = [1, 1001] are 1001 steps"
    assert "at most 1,000 steps: a viewer holds every phase of every rank" in refused([1, 1001])
    assert refused([3000, 3001]).splitlines()[0] == "log.timeline = [3000, 3001] has no effect"
    assert validate({"log": {"timeline": [1, 1000]}}).log.timeline == (1, 1000)
