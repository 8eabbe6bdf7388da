"""`make gpu` on a CPU, with tiny models: its pieces run, leave their figures, and the page is made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOME = ["environment", "8b-quarter-full", "trainer-1b-eager", "test-step"]


def pieces(to: Path, *words: str) -> str:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--tiny",
        "--to",
        str(to),
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.examples
def test_some_pieces(tmp_path: Path) -> None:
    said = pieces(tmp_path, "--only", *SOME)
    assert said.count(": done in ") == len(SOME), said
    results = {
        name: json.loads((tmp_path / "tiny" / f"{name}.json").read_text()) for name in SOME
    }
    assert results["8b-quarter-full"]["figures"]["tokens_per_s"] > 0
    assert "skipped" in results["test-step"]["figures"]["said"]
    assert "8b-quarter-full " in pieces(tmp_path, "--list")
    late = pieces(tmp_path, "--only", "1b-eager", "--limit", "1")
    assert "1b-eager: late in" in late
    assert "not begun" in pieces(
        tmp_path, "--only", "1b-eager", "--limit", "30", "--seconds", "20"
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_pieces(tmp_path: Path) -> None:
    said = pieces(tmp_path, "--seconds", "3600")
    results = [
        json.loads(path.read_text()) for path in sorted((tmp_path / "tiny").glob("*.json"))
    ]
    others = {
        result["piece"]: result.get("error", "")
        for result in results
        if result["ending"] != "done"
    }
    assert others == {} and len(results) > 25, said
    (bits,) = (result["figures"] for result in results if result["piece"] == "bits")
    assert bits == {"steps": 6, "same_in_a_second_run": 6, "same_when_resumed": 6}
    assert "the time of this call" not in said and pieces(tmp_path) == ""  # nothing is left
