"""The example of fine-tuning: its conversations are those of its script, and it learns to answer."""

from __future__ import annotations

import io
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

from ranks import warm
from ranks.runs import environment, run

ROOT = Path(__file__).parents[2]


def _hear(said: str) -> None:
    sys.stdin = io.StringIO(said)


def threefold(folder: Path, *arguments: str, said: str = "") -> str:
    """What a command prints that is started in the repository, as the example's first lines say."""
    done = run(warm.threefold, ROOT, arguments, environment(folder), first=partial(_hear, said))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_conversations_are_those_of_the_script() -> None:
    made = runpy.run_path(str(ROOT / "examples/sft/make_conversations.py"))["texts"]()
    assert sorted(made) == ["conversations.jsonl", "held-out.jsonl"]
    for name, text in made.items():
        assert (ROOT / "examples/sft" / name).read_text() == text


@pytest.mark.examples
def test_loss_falls_on_conversations_that_were_not_seen(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    said = threefold(
        tmp_path, *("train", "examples/sft.yaml", "--train.steps", "40", "--log.every", "5"),
        *("--eval.every", "20", "--log.dir", run),
    )  # fmt: skip
    assert (
        "  format chat (messages), trained on: assistant: 7,486 of 26,306 tokens (28.5 %); after packing: "
        in said
    )
    losses = [float(loss) for loss in re.findall(r"step +\d+/40  loss ([\d.]+)", said)]
    held_out = [
        float(loss) for loss in re.findall(r"evaluation after step \d+: loss ([\d.]+)", said)
    ]
    assert losses[0] > 5 and losses[-1] < 2.5
    assert len(held_out) == 2 and held_out[1] < held_out[0] < 4
    shown = threefold(tmp_path, "data", "show", run, "--row", "0")
    assert "  | <user>\n" in shown and "[[" in shown
    assert threefold(
        tmp_path, "sample", run, "--chat", "--tokens", "20", said="What is 7 plus 5?\n"
    ).strip()
