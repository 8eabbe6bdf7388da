"""A rank that gets a part of its CPU time is named in a real run, with the reason; and nobody in a healthy one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranks.faults import last_step, rank_processes, started, wait_for
from ranks.runs import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timing]

LATE = 1
# Steps of some tens of milliseconds, each of them logged.
STEPS = (
    "--train.steps",
    "1000000",
    "--checkpoint.every",
    "0",
    "--log.sample_tokens",
    "0",
    "--model.admission",
    "off",
)
SMALL = ("--data.seq_len", "64", "--train.global_batch", "16")
LARGER = ("--data.seq_len", "256", "--train.global_batch", "16")
# Seconds of each turn in which a process runs, and in which it is stopped: 29 % of a core.
RUNS_S, STOPPED_S = 0.1, 0.25


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


def lags(run: Path) -> list[dict[str, Any]]:
    """Those that the journal has."""
    path = run / "journal.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == "lag"]


@contextlib.contextmanager
def stopped_by_turns(process: int) -> Iterator[None]:
    """A process as `cpulimit` has it."""
    over = threading.Event()

    def turns() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(process, signal.SIGSTOP)
                over.wait(STOPPED_S)
                os.kill(process, signal.SIGCONT)
                over.wait(RUNS_S)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("axis", ["dp", "tp", "cp"])
def test_rank_that_is_stopped_by_turns_is_named_once_and_why(folder: Path, axis: str) -> None:
    run = folder / axis
    mesh = (f"--mesh.{axis}", "2", "--mesh.device", "cpu")
    with started(
        folder, "train", "config.yaml", *mesh, *STEPS, *SMALL, "--log.dir", axis
    ) as going:
        wait_for(
            lambda: last_step(run) >= 3 or not going.running(),
            lambda: f"step 3: {going.output()}",
        )
        healthy = last_step(run)
        with stopped_by_turns(rank_processes(run)[LATE]):
            wait_for(lambda: lags(run), lambda: f"a lag: {going.output()[-2000:]}", within_s=90)
            # The journal is written before the step's own line.
            named = max(last_step(run), lags(run)[0]["step"])
            wait_for(
                lambda: last_step(run) >= named + 20,
                lambda: f"20 more steps: {going.output()[-2000:]}",
            )
        going.signal_all(signal.SIGTERM)
        assert going.wait(60) == 75, going.output()[-2000:]
        output = going.output()
    (lag,) = lags(run)
    assert (lag["rank"], lag["host"] != "") == (LATE, True)
    assert lag["step"] - healthy <= 100, lag
    assert 0.3 < lag["share"] < 0.95, lag
    assert lag["own"]["still"] - lag["others"]["still"] > 0.3, lag
    assert "it stands still for" in lag["text"] and "its process is stopped in" in lag["text"]
    assert output.count("has been the slowest since step") == 1
    assert f"\n{lag['text']}\n" in output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line.get("lagging_rank") for line in lines if line["step"] < lag["step"]} == {None}
    assert {
        line.get("lagging_rank") for line in lines if lag["step"] <= line["step"] <= named
    } == {LATE}


@pytest.mark.parametrize("axis", ["dp", "tp", "cp"])
def test_nobody_is_named_in_a_healthy_run(folder: Path, axis: str) -> None:
    run = folder / axis
    mesh = (f"--mesh.{axis}", "2", "--mesh.device", "cpu")
    with started(
        folder, "train", "config.yaml", *mesh, *STEPS, *LARGER, "--log.dir", axis
    ) as going:
        wait_for(lambda: last_step(run) >= 100, lambda: f"step 100: {going.output()}")
        going.signal_all(signal.SIGTERM)
        assert going.wait(60) == 75, going.output()[-2000:]
    assert lags(run) == []
    assert "slowest" not in going.output()
