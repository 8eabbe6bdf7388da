"""The summary of a trace: each moment belongs to one share, on a device and on a CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from threefold.commands import main
from threefold.config.loading import validate
from threefold.config.paths import PROFILE_FOLDER
from threefold.errors import ConfigError
from threefold.training.profiler import PHASE, summary_of

MOMENTS = 60


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}


def phases(*, data: int) -> list[dict[str, Any]]:
    """One step of MOMENTS moments, the first of which wait for data."""
    return [
        event(f"{PHASE}data", "user_annotation", 0, data),
        event(f"{PHASE}forward", "user_annotation", data, MOMENTS - data - 5),
        event(f"{PHASE}optimizer", "user_annotation", MOMENTS - 5, 5),
    ]


def _drawn(draws: random.Random, name: str, cat: str, count: int) -> list[dict[str, Any]]:
    return [
        event(name, cat, start, draws.randint(1, 9), tid=number + 7)
        for number, start in enumerate(draws.sample(range(-3, MOMENTS), count))
    ]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_moments_are_divided(device: str, seed: int) -> None:
    """As if every moment were looked at by itself."""
    draws = random.Random(seed)
    on_device = device == "cuda"
    operators = _drawn(draws, "aten::mm", "cpu_op", draws.randint(0, 9))
    kernels = _drawn(draws, "sgemm", "kernel", draws.randint(1, 9)) if on_device else []
    sent = _drawn(
        draws,
        *(
            ("ncclKernel_AllReduce", "kernel")
            if on_device
            else ("gloo:all_reduce", "user_annotation")
        ),
        3,
    )
    launches = _drawn(draws, "cudaLaunchKernel", "cuda_runtime", 4) if on_device else []
    data = draws.randint(0, 20)
    found = summary_of(
        [
            *phases(data=data),
            *operators,
            *kernels,
            *sent,
            *launches,
            {"ph": "i", "name": "mark"},
        ]
    )

    def during(events: list[dict[str, Any]], moment: int) -> bool:
        return any(each["ts"] <= moment < each["ts"] + each["dur"] for each in events)

    shares = dict.fromkeys(("compute", "communication", "host", "idle", "overlapped"), 0)
    for moment in range(MOMENTS):
        computed, sending = (
            during(kernels if on_device else operators, moment),
            during(sent, moment),
        )
        shares["overlapped"] += computed and sending
        if computed:
            shares["compute"] += 1
        elif sending:
            shares["communication"] += 1
        elif moment < data or (on_device and not during([*operators, *launches], moment)):
            shares["idle"] += 1
        else:
            shares["host"] += 1
    assert {name: getattr(found, name) * MOMENTS for name in shares} == pytest.approx(shares)
    assert found.compute + found.communication + found.host + found.idle == pytest.approx(1)
    assert found.step_s == pytest.approx(MOMENTS / 1e6)


def test_operators_are_counted_without_what_they_call() -> None:
    operators = [
        event("aten::linear", "cpu_op", 10, 20),
        event("aten::addmm", "cpu_op", 12, 15),
        event("aten::copy_", "cpu_op", 13, 2),
        event("aten::copy_", "cpu_op", 30, 5),
        event("aten::addmm", "cpu_op", 12, 4, tid=2),
    ]
    found = summary_of([*phases(data=0), *operators])
    expected = [("aten::addmm", 2, 13 + 4), ("aten::copy_", 2, 7), ("aten::linear", 1, 5)]
    assert found.kernels == [
        (name, calls, pytest.approx(time / 1e6)) for name, calls, time in expected
    ]


def test_trace_without_a_whole_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole step"):
        summary_of([event(f"{PHASE}data", "user_annotation", 0, 4)])


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([5, 3], "log.profile = [5, 3] ends before it begins"),
        ([5, 300], "log.profile = [5, 300] are 296 steps"),
        ([30, 31], "log.profile = [30, 31] has no effect"),
        (5, "log.profile = 5 is not accepted"),
        ([0, 1], "log.profile"),
    ],
)
def test_steps_that_cannot_be_traced(steps: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate({"log": {"profile": steps}, "train": {"steps": 20}})
    assert said in str(refused.value)


def test_command_names_what_is_missing(tmp_path: Path) -> None:
    main._load(main._COMMANDS)
    run = tmp_path / "a run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    error = CliRunner().invoke(main.app, ["profile", str(run)]).exception
    assert f"{run} has no traces" in str(error)
    assert f"fix: threefold resume '{run}' --log.profile '[10, 12]'" in str(error)
    (run / PROFILE_FOLDER).mkdir()
    (run / PROFILE_FOLDER / "rank-0000.summary.json").write_text(json.dumps({"steps": 1}))
    error = CliRunner().invoke(main.app, ["profile", str(run)]).exception
    assert "rank-0000.summary.json cannot be read: some of its figures are missing" in str(
        error
    )
