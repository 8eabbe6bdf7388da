"""action.yml: the referee in a workflow of GitHub, run as its runner runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
# In place of the command: prints its arguments, and the verdict when it judges.
FAKE = """#!/bin/bash
if [ "$2" = judge ]; then echo "verdict of $(basename "$3")"; exit $CODE; fi
printf '%s\\n' "$@" > "$WORDS"; exit 1
"""


@pytest.mark.parametrize(
    ("code", "not_judged", "expected"),
    [
        (0, "fail", 0),
        (1, "fail", 1),
        (1, "allow", 1),
        (3, "fail", 3),
        (3, "allow", 0),
        (2, "allow", 2),
    ],
)
def test_job_ends_as_the_verdict_says(
    tmp_path: Path, code: int, not_judged: str, expected: int
) -> None:
    (tmp_path / "threefold").write_text(FAKE)
    (tmp_path / "threefold").chmod(0o755)
    step = ACTION["runs"]["steps"][-1]
    given = {
        "inputs.command": 'torchrun train.py --name "a b"; $(touch injected)',
        "inputs.steps": "2",
    }
    given["inputs.not-judged"] = not_judged
    values = {name: given[value.strip("${ }")] for name, value in step["env"].items()}
    summary, words = tmp_path / "summary", tmp_path / "words"
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {
        **values,
        "PATH": path,
        "GITHUB_STEP_SUMMARY": str(summary),
        "WORDS": str(words),
        "CODE": str(code),
    }
    # As the runner does.
    shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
    ended = subprocess.run(
        shell, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == expected, ended.stderr
    assert summary.read_text() == "```\nverdict of record\n```\n"
    watched = words.read_text().splitlines()
    assert watched[:4] == ["referee", "--steps", "2", "--record"]
    # One word for a shell of its own: nothing of it is run by the step.
    assert watched[5:] == ["--", "bash", "-c", given["inputs.command"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary", "threefold", "words"]


def test_every_input_reaches_the_step_by_the_environment() -> None:
    step = ACTION["runs"]["steps"][-1]
    assert {
        value.strip("${ }").removeprefix("inputs.") for value in step["env"].values()
    } == set(ACTION["inputs"])
    assert all("${{" not in each["run"] for each in ACTION["runs"]["steps"])
