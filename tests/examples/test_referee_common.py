"""The verdicts of docs/referee.md on the programs of examples/common."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.test_referee_programs import REFEREE, TORCHRUN, cold_run, not_judged, refuted, run

pytestmark = pytest.mark.examples

COMMON = Path(__file__).parents[2] / "examples" / "common"
LINEAR = ["gradients"]
TRAINS_7_TIMES = [
    "rows of data ranks",
    "rows of one model copy",
    "rows of an epoch",
    "order of epochs",
]
TRAINS_7_TIMES += ["gradients", "norm of gradients", "updates"]
CASES = [
    (
        "bert_sagemaker.py --plain",
        ["gradients"],
        [],
        "in step 1 each gradient is x2.0000: the number of ranks\n",
    ),
    (
        "bert_sagemaker.py",
        [],
        [],
        "rows of an epoch: each of 192 rows was read once in each epoch, of 2\n",
    ),
    (
        "plain_loader.py~without shuffling",
        ["rows of data ranks"],
        ["rows of an epoch", *LINEAR],
        " in 8 of 8 steps\n",
    ),
    (
        "plain_loader.py~shuffled, each rank with its own seed",
        ["rows of an epoch"],
        ["rows of data ranks", *LINEAR],
        "epoch 1 made 512 reads of 256 rows: 256 more than once\n",
    ),
    (
        "plain_loader.py~weighted classes",
        ["rows of data ranks"],
        ["rows of an epoch", *LINEAR],
        " in 8 of 8 steps\n",
    ),
    (
        "plain_loader.py~threefold.distribute(loader)",
        [],
        LINEAR,
        "each of 256 rows was read once in each epoch, of 1\n",
    ),
    (
        "launches.py runs/plain --plain",
        [],
        [],
        "each of 21 parameters has the gradient of the mean over all targets",
    ),
    (
        "launches.py runs/launched",
        [],
        [],
        "each of 21 parameters has the gradient of the mean over all targets (512 in",
    ),
    (
        "checkpoints.py write saved",
        [],
        ["rows of data ranks", "rows of an epoch", "order of epochs"],
        "each of 21 parameters has the gradient of the mean over all targets (248 in step 1)",
    ),
    (
        "plain_loader.py",
        [],
        TRAINS_7_TIMES,
        "rank 0 trains 7 times, for 8, 8, 8, 4, 8, 4, 4 steps",
    ),
    (
        "context_parallel.py",
        [],
        [*TRAINS_7_TIMES, "exports"],
        "the model has no wrapper and no placement that shows how ranks divide the data",
    ),
]


@pytest.mark.parametrize(
    ("words", "wrong", "unknown", "what"), CASES, ids=[words for words, *_ in CASES]
)
def test_verdict(
    tmp_path: Path, words: str, wrong: list[str], unknown: list[str], what: str
) -> None:
    program, *arguments = re.split("~", words) if "~" in words else words.split()
    # One as a user starts it: seconds of imports in each of four processes.
    start = cold_run if words == "launches.py runs/launched" else run
    watched = start(tmp_path, *REFEREE, "--", *TORCHRUN, str(COMMON / program), *arguments)
    assert refuted(watched.stdout) == wrong, watched.stdout + watched.stderr
    assert not_judged(watched.stdout) == unknown
    assert what in watched.stdout
    assert watched.returncode == (1 if wrong else 3 if unknown else 0)
    told = "refuted" if wrong else "not judged" if unknown else "proved"
    shown = " ".join(
        [program, *(f'"{each}"' if " " in each or "(" in each else each for each in arguments)]
    )
    table = (Path(__file__).parents[2] / "docs" / "referee.md").read_text(encoding="utf-8")
    assert re.search(
        rf"^\| `{re.escape(shown.replace(' saved', ' FOLDER'))}`[^|]*\| {told} \|", table, re.M
    ), shown
