"""The example of preferences: its pairs are those of its script, and it learns which answers are preferred."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from examples.test_sft import ROOT, threefold


def test_pairs_are_those_of_the_script() -> None:
    made = runpy.run_path(str(ROOT / "examples/dpo/make_pairs.py"))["texts"]()
    assert sorted(made) == ["held-out.jsonl", "pairs.jsonl"]
    for name, text in made.items():
        assert (ROOT / "examples/dpo" / name).read_text() == text
    rows = {
        name: {json.loads(line)["prompt"] for line in text.splitlines()}
        for name, text in made.items()
    }
    assert not rows["pairs.jsonl"] & rows["held-out.jsonl"]


@pytest.mark.examples
def test_answers_to_other_questions_are_told_apart(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = threefold(tmp_path, "train", "examples/dpo.yaml", "--log.dir", str(run))
    assert "  dpo    sigmoid, beta 0.1; reference: the initial model, as kept in " in said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if "eval_loss" in line]
    assert [line["eval_pairs"] for line in evaluated] == [40, 40]
    assert evaluated[-1]["eval_loss"] < 0.05 and evaluated[-1]["eval_reward_accuracy"] == 1
    assert "40 pairs" in threefold(tmp_path, "eval", str(run))
