"""What of an evaluation is trained on is named before step 1; what is held out is proved to be in no row."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ranks.runs import command

pytestmark = pytest.mark.ranks

KEYS = (
    "--data.tokenizer",
    "bytes",
    "--data.seq_len",
    "64",
    "--train.steps",
    "2",
    "--train.global_batch",
    "4",
)
RUN = (*KEYS, "--mesh.dp", "1", "--log.sample_tokens", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draws = tmp_path_factory.mktemp("contamination"), random.Random(0)
    texts = ["".join(draws.choices("abcdefgh ", k=150)) for _ in range(100)]
    own = ["".join(draws.choices("ijklmnop ", k=150)) for _ in range(10)]
    planted = [*own[:4], texts[77], f"{own[4][:10]}{texts[20][9:90]}{own[4][:10]}"]
    for name, rows in (("train", texts), ("clean", own), ("planted", planted)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in rows)
        )
    return folder


def test_planted_rows_are_named_before_the_first_step_and_by_the_command(folder: Path) -> None:
    sources = ("--data.source", "train.jsonl", "--eval.source", "planted.jsonl")
    done = command(folder, "train", *RUN, *sources, "--log.dir", "planted")
    assert done.returncode == 0, done.stderr
    lines = [
        "1 of 6 held-out documents trained on, token for token: document 4 (document 77 of source)",
        "1 of 6 held-out documents trained on in part, 64 consecutive tokens or more: document 5 (document 20 of "
        "source, 81 tokens)",
    ]
    head = done.stdout[: done.stdout.index("step 1/2")]
    assert all(f"  warning: {line}\n" in head for line in lines)
    found = command(folder, "data", "overlap", *KEYS, *sources)
    assert (found.returncode, found.stdout.splitlines()) == (1, lines)
    clean = command(
        folder,
        "data",
        "overlap",
        *KEYS,
        "--data.source",
        "train.jsonl",
        "--eval.source",
        "clean.jsonl",
    )
    assert clean.returncode == 0
    assert (
        clean.stdout
        == "none of 10 held-out documents, nor 64 consecutive tokens of one, is trained on\n"
    )


def test_share_of_the_source_is_evaluated_and_proved_to_be_held_out(folder: Path) -> None:
    shared = ("--data.source", "train.jsonl", "--data.eval_share", "0.1", "--log.dir", "share")
    done = command(folder, "train", *RUN, *shared)
    assert done.returncode == 0, done.stderr
    assert (
        "eval   none of 10 held-out documents" in done.stdout
        and "evaluation after step 2: loss" in done.stdout
    )
    proved = command(folder, "data", "audit", "share", "--contents")
    line = "source: 10 of 100 documents are held out, and no row has a token of them (data.eval_share = 0.1)"
    assert proved.returncode == 0 and line in proved.stdout
    other = command(folder, "resume", "share", "--data.eval_share", "0.2", "--train.steps", "3")
    assert other.returncode == 2 and "loss" not in other.stdout
    config = folder / "share" / "config.yaml"
    config.write_text(config.read_text().replace("eval_share: 0.1", "eval_share: 0.2"))
    refused = command(folder, "data", "audit", "share")
    assert (
        refused.returncode == 1
        and "other rows than those that data.eval_share = 0.2 leaves" in refused.stderr
    )
