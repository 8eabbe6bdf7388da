"""Trackers: what each keeps of a run and of its resume, that none can stop training, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from ranks.runs import command, prepare
from threefold.config import loading
from threefold.errors import ConfigError
from threefold.integrations.trackers import Guarded, RunDescription, open_trackers, problems
from threefold.jsonl import MetricsFile

ALL = "[tensorboard, wandb, trackio]"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path


def train(folder: Path, steps: int, trackers: str, *more: str) -> str:
    """What a run of one process prints."""
    arguments = (
        "train", "config.yaml", "--mesh.dp", "1", "--log.dir", "run", "--train.steps", str(steps),
        "--optimizer.schedule", "constant", "--log.trackers", trackers, *more,
    )  # fmt: skip
    done = command(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_run_and_its_resume_are_one_run_everywhere(folder: Path) -> None:
    first = train(
        folder, 3, ALL, "--log.project", "tests", "--eval.source", "corpus/part-0.txt"
    )
    train(folder, 5, ALL, "--log.project", "tests", "--eval.source", "corpus/part-0.txt")
    lines = [
        json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()
    ]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert sorted(losses) == [1, 2, 3, 4, 5]

    found = scalars(folder / "run/tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in found["train/loss"]] == pytest.approx(
        [losses[step] for step in range(1, 6)]
    )
    assert [step for step, _ in found["eval/loss"]] == [3, 5]
    events = b"".join(path.read_bytes() for path in (folder / "run/tensorboard").iterdir())
    assert (
        b"global_batch: 8" in events
        and b"dp=1 x cp=1 x tp=1" in events
        and b"transformers: " in events
    )

    number = json.loads((folder / "run/trackers.json").read_text())["wandb"]
    offline = [
        path for path in (folder / "run/wandb").iterdir() if path.name.startswith("offline-run")
    ]
    assert len(offline) == 2 and all(path.name.split("-")[3] == number for path in offline)
    kept = b"".join((path / f"run-{number}.wandb").read_bytes() for path in offline)
    assert (
        b"grad_norm" in kept
        and b"eval_loss" in kept
        and b"global_batch" in kept
        and b"dp=1 x cp=1" in kept
    )

    with sqlite3.connect(folder / "trackio/tests.db") as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by id"
        ).fetchall()
    steps = [step for run, step, metrics in rows if "grad_norm" in json.loads(metrics)]
    # One run, by a name that no other folder called `run` gets.
    assert {run for run, *_ in rows} == {
        json.loads((folder / "run/trackers.json").read_text())["trackio"]
    }
    assert re.fullmatch("run-[0-9a-f]{8}", rows[0][0]) and steps == [1, 2, 3, 4, 5]
    assert not any(word in first.lower() for word in ("wandb:", "trackio", "tensorboard"))


def test_tracker_that_cannot_open_is_said_once_and_training_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(folder))
    said = train(folder, 2, "[wandb]")
    assert said.count("tracker wandb did not open: ") == 1
    assert "done: 2 steps" in said
    assert "Traceback" in (folder / "run/logs/rank-0000.log").read_text()


@pytest.mark.examples
def test_mlflow_keeps_a_run_and_its_resume_as_one(folder: Path) -> None:
    pytest.importorskip(
        "mlflow", reason="pip install mlflow-skinny   (make test-examples does)"
    )
    train(folder, 3, "[mlflow]", "--log.project", "tests", "--eval.source", "corpus/part-0.txt")
    train(folder, 5, "[mlflow]", "--log.project", "tests", "--eval.source", "corpus/part-0.txt")
    lines = [
        json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()
    ]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    number = json.loads((folder / "run/trackers.json").read_text())["mlflow"]
    (place,) = (folder / "run/mlflow").glob(f"*/{number}")
    kept = [line.split() for line in (place / "metrics/loss").read_text().splitlines()]
    assert {int(step): float(value) for _, value, step in kept} == losses and sorted(
        losses
    ) == [1, 2, 3, 4, 5]
    assert [
        line.split()[2] for line in (place / "metrics/eval_loss").read_text().splitlines()
    ] == ["3", "5"]
    assert (place / "params/train.global_batch").read_text() == "8"
    assert "dp=1 x cp=1 x tp=1" in (place / "tags/mesh").read_text()
    assert "status: 3" in (place / "meta.yaml").read_text()  # finished
    assert "name: tests" in (place.parent / "meta.yaml").read_text()


@pytest.mark.examples
def test_mlflow_without_its_server_stops_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "mlflow", reason="pip install mlflow-skinny   (make test-examples does)"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    said = train(folder, 2, "[mlflow]")
    assert said.count("tracker mlflow did not open: ") == 1
    assert "done: 2 steps" in said


class Failing:
    def __init__(self, at: str) -> None:
        self.at, self.works, self.got = at, True, list[int]()

    def log(self, metrics: dict[str, Any]) -> None:
        if not self.works:
            raise OSError("the disk is full\nand more")
        self.got.append(metrics["step"])

    def close(self) -> None:
        if self.at == "close":
            raise SystemExit(1)


def test_tracker_that_fails_is_tried_again_and_misses_nothing() -> None:
    said: list[str] = []
    inner, now, tried = Failing("log"), [0.0], list[float]()

    def opened() -> Failing:
        tried.append(now[0])
        if len(tried) == 1:
            raise SystemExit("no network")
        return inner

    guarded = Guarded("mine", opened, said.append, lambda: now[0])
    for step in range(40):
        now[0] += 20.0
        inner.works = not 7 <= step < 20
        guarded.log({"step": step})
    assert tried == [0.0, 60.0]  # not at every step: the other ranks wait for a try
    assert inner.got == [*range(40)]
    inner.works = False
    guarded.log({"step": 40})
    inner.works = True
    guarded.close()
    assert inner.got == [*range(41)]
    again = "(training continues, and it is retried; see the rank's log)"
    assert said == [
        f"tracker mine did not open: no network {again}",
        "tracker mine works again, and received what it had missed",
        f"tracker mine failed: the disk is full {again}",
        "tracker mine works again, and received what it had missed",
        f"tracker mine failed: the disk is full {again}",
        "tracker mine works again, and received what it had missed",
    ]


def _kept(tracker: str, folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, loss) of each run that a tracker has."""
    found: dict[str, list[tuple[int, float]]] = {}
    if tracker == "trackio":
        with sqlite3.connect(folder / "trackio/p.db") as database:
            for run, step, metrics in database.execute(
                "select run_name, step, metrics from metrics order by id"
            ):
                found.setdefault(run, []).append((step, json.loads(metrics)["loss"]))
        return found
    for place in (folder / "run/mlflow").glob("*/*/metrics/loss"):
        if "lifecycle_stage: active" in (place.parents[1] / "meta.yaml").read_text():
            lines = (line.split() for line in place.read_text().splitlines())
            found[place.parents[1].name] = [
                (int(step), float(value)) for _, value, step in lines
            ]
    return found


@pytest.mark.parametrize(
    "tracker", ["trackio", pytest.param("mlflow", marks=pytest.mark.examples)]
)
def test_steps_that_were_gone_back_over_are_kept_once(tracker: str, folder: Path) -> None:
    pytest.importorskip(tracker, reason=f"pip install {tracker}   (make test-examples does)")
    (folder / "run").mkdir()
    for first, last, number in ((1, 6, 1.0), (7, 8, 2.0), (5, 9, 3.0), (10, 10, 4.0)):
        run = RunDescription(folder / "run", "p", {"train": {"steps": 9}}, {}, first_step=first)
        file = MetricsFile(folder / "run/metrics.jsonl", timed=True)
        (opened,) = open_trackers((tracker,), run, pytest.fail)
        for step in range(first, last + 1):
            for each in (file, opened):
                each.log({"step": step, "loss": number})
        file.close()
        opened.close()
    name = json.loads((folder / "run/trackers.json").read_text())[tracker]
    values = [1.0] * 4 + [3.0] * 5 + [4.0]
    assert _kept(tracker, folder) == {name: [*enumerate(values, start=1)]}


def test_tracker_that_leaves_the_process_does_not_take_training_along() -> None:
    said: list[str] = []
    guarded = Guarded("mine", lambda: Failing("close"), said.append)
    guarded.close()
    assert said == ["tracker mine did not close: 1 (training continues; see the rank's log)"]


def test_tracker_is_opened_with_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDescription(tmp_path / "run-a", "p", {"train": {"steps": 3}}, {"mesh": "dp=2"})
    assert run.name == "run-a"
    assert run.values == {"train": {"steps": 3}, "run": {"mesh": "dp=2"}}
    run.folder.mkdir()
    assert [
        run.id_of("wandb", lambda: "a"),
        run.id_of("wandb", lambda: "b"),
        run.id_of("trackio", lambda: "c"),
    ] == ["a", "a", "c"]
    assert open_trackers((), run, print) == []


def test_missing_package_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else object()
    )
    assert [str(problem) for problem in problems(("tensorboard", "wandb"))] == [
        "log.trackers has wandb, and the package wandb is not installed\n"
        "  expected: a tracker that is installed when training begins\n"
        "  fix: pip install 'threefold[wandb]', or leave wandb out of log.trackers"
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"trackers": ["tensorbord"]},
            "tensorbord in log.trackers is not a supported tracker; near: tensorboard\n"
            "  expected: one of tensorboard, wandb, trackio, mlflow; metrics.jsonl is always written\n"
            "  fix: --log.trackers '[tensorboard]'",
        ),
        (
            {"trackers": "wandb"},
            "log.trackers = wandb is not accepted\n"
            "  expected: a list of names: [tensorboard, wandb]\n"
            "  fix: --log.trackers '[wandb]'",
        ),
        (
            {"trackers": ["wandb", "wandb"]},
            "log.trackers names wandb twice\n  expected: each tracker once\n  fix: --log.trackers '[wandb]'",
        ),
        (
            {"trackers": ["tensorboard"], "project": "mine"},
            "log.project = mine has no effect without a tracker that has projects\n"
            "  expected: wandb, trackio or mlflow among log.trackers\n"
            "  fix: --log.trackers '[wandb]'   (or leave log.project out)",
        ),
    ],
)
def test_request_that_makes_no_sense_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        loading.validate({"log": values})
    assert str(error.value) == text
