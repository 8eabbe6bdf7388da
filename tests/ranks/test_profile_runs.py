"""Traces of steps: of those that were asked for, on every rank, without another curve."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ranks.runs import command, metrics, prepare


@pytest.mark.timing
def test_traced_steps(tmp_path: Path) -> None:
    prepare(tmp_path)
    mesh = ("train", "config.yaml", "--mesh.dp", "2", "--train.steps", "6")
    assert command(tmp_path, *mesh, "--log.dir", "plain").returncode == 0
    done = command(tmp_path, *mesh, "--log.dir", "run", "--log.profile", "[3, 4]")
    assert done.returncode == 0, done.stderr
    plain, traced = metrics(tmp_path / "plain"), metrics(tmp_path / "run")
    assert [(step, found["loss"]) for step, found in traced.items()] == [
        (step, found["loss"]) for step, found in plain.items()
    ]
    for rank in (0, 1):
        with gzip.open(tmp_path / f"run/profile/rank-000{rank}.json.gz", "rt") as file:
            names = [
                event["name"]
                for event in json.load(file)["traceEvents"]
                if event.get("ph") == "X"
            ]
        assert names.count("threefold:optimizer") == names.count("threefold:data") == 2
        assert "aten::mm" in names and "gloo:all_reduce" in names
    printed = command(tmp_path, "profile", "run").stdout
    assert "rank-0000" in printed and "rank-0001" in printed and "of 2 steps" in printed
    told = [
        json.loads(line)
        for line in command(tmp_path, "profile", "run", "--json").stdout.splitlines()
    ]
    assert [each["rank"] for each in told] == [0, 1]
    for each in told:
        assert sum(
            each[share] for share in ("compute", "communication", "host", "idle")
        ) == pytest.approx(1)
        assert sum(each["phases"].values()) == pytest.approx(each["step_s"], rel=0.05)


def test_trace_ends_with_the_run(tmp_path: Path) -> None:
    prepare(tmp_path)
    done = command(
        tmp_path,
        "train",
        "config.yaml",
        "--mesh.dp",
        "1",
        "--log.profile",
        "[10, 22]",
        "--log.dir",
        "run",
    )
    assert done.returncode == 0, done.stderr
    assert (
        json.loads((tmp_path / "run/profile/rank-0000.summary.json").read_text())["steps"] == 3
    )
