"""What the real command hands to a shell: keys, the words of a key, and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def completed(folder: Path, line: str) -> list[str]:
    """What bash would offer at the end of a line."""
    words = line.split(" ")
    variables = {
        "_THREEFOLD_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    code = "import sys; sys.argv = ['threefold']; from threefold.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("runs/first", "runs/second", "elsewhere/third"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "no-run").mkdir()
    return tmp_path


def test_keys_and_their_words(folder: Path) -> None:
    assert completed(folder, "threefold train --model.lora.r") == [
        "--model.lora.r",
        "--model.lora.rslora",
    ]
    assert completed(folder, "threefold train job.yaml --train.objective ") == [
        "next_token",
        "dpo",
    ]
    assert completed(folder, "threefold resume runs/first --data.packing b") == ["best_fit"]
    assert completed(folder, "threefold train --accept") == ["--accept-changes"]
    assert completed(folder, "threefold train --log.dir ") == []


def test_runs(folder: Path) -> None:
    assert completed(folder, "threefold resume ") == ["runs/first", "runs/second"]
    assert completed(folder, "threefold why runs/s") == ["runs/second"]
    assert completed(folder, "threefold data audit elsewhere/") == ["elsewhere/third"]
