"""However a run ends, `threefold explain RUN` says which rank ended it, in which phase and step, and of what."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ranks.faults import planted
from ranks.hangs import Hang, hanging
from ranks.own_runs import in_a_run
from ranks.plants import STEP
from ranks.runs import prepare, torchrun
from ranks.spawn import run_ranks
from threefold.explain.answer import answer
from threefold.explain.evidence import gather
from threefold.explain.explain import Explanation
from threefold.records.run import RunRecord

pytestmark = [pytest.mark.slow, pytest.mark.timing]

STALLS = ("--log.stall_s", "1.5", "--train.timeout_s", "3", "--mesh.timeout_s", "60")
RUN = (
    "--log.dir",
    "run",
    "--mesh.dp",
    "2",
    "--train.steps",
    "9",
    "--checkpoint.every",
    "4",
    "--log.sample_tokens",
    "0",
)


class Told(NamedTuple):
    """What is to be told: `Ending.how`, the rank (None: no one), phase and step, the page, and a signal or code."""

    how: str
    rank: int | None
    phase: str
    step: int
    page: str
    code: int = 0


def told_of(run: Path) -> tuple[Told, Explanation]:
    found = answer(gather([run])).explanation
    assert found is not None and found.ending is not None
    ending = found.ending
    assert RunRecord(run).ending == ending and found.line.rank == next(iter(ending.ranks), None)
    rank = found.line.rank
    return Told(
        ending.how, rank, ending.phase, ending.step, found.known.name, ending.code
    ), found


# name: (what is planted, further arguments, what is to be told, what else is in the facts)
PLANTED: dict[str, tuple[Hang, tuple[str, ...], Told, str]] = {
    "killed in the backward": (
        Hang("backward", 1, "", step=3, how="kill"),
        (),
        Told("signal", 1, "backward", 3, "killed", 9),
        "was ended by SIGKILL",
    ),
    "killed while it saves": (
        Hang("save", 0, "", step=4, how="kill"),
        (),
        Told("signal", 0, "save", 4, "killed", 9),
        "was ended by SIGKILL",
    ),
    "killed before the run has begun": (
        Hang("loading", 1, "", how="kill"),
        (),
        Told("signal", 1, "loading", 0, "killed", 9),
        "was ended by SIGKILL",
    ),
    "crashed": (
        Hang("forward", 1, "", step=3, how="SIGSEGV"),
        (),
        Told("signal", 1, "forward", 3, "segmentation-fault", 11),
        "was ended by SIGSEGV",
    ),
    "aborted": (
        Hang("optimizer", 0, "", step=5, how="SIGABRT"),
        (),
        Told("signal", 0, "optimizer", 5, "killed", 6),
        "was ended by SIGABRT",
    ),
    "left": (
        Hang("optimizer", 1, "", step=3, how="exit"),
        (),
        Told("exit", 1, "optimizer", 3, "threefold", 3),
        "left with exit code 3, without an error",
    ),
    "left by sys.exit": (
        Hang("data", 1, "", step=3, how="sys.exit"),
        (),
        Told("exit", 1, "data", 3, "threefold", 4),
        "left with exit code 4, without an error",
    ),
    "raised": (
        Hang("forward", 1, "", step=3, how="raise"),
        (),
        Told("exception", 1, "forward", 3, "own-error"),
        "RuntimeError: raised by the test",
    ),
    "raised before the run has begun": (
        Hang("loading", 1, "", how="raise"),
        (),
        Told("exception", 1, "loading", 0, "own-error"),
        "RuntimeError: raised by the test",
    ),
    "a bad row": (
        Hang("data", 0, "", step=3, how="row"),
        (),
        Told("data", 0, "data", 3, "threefold"),
        "row 7 has no text",
    ),
    "without memory": (
        Hang("data", 1, "", step=3, how="memory"),
        (),
        Told("memory", 1, "data", 3, "oom-killed"),
        "MemoryError",
    ),
    "full disk": (
        Hang("writing", 1, "", how="full"),
        (),
        Told("disk", 1, "save", 4, "disk-full"),
        "could not be saved: rank 1: No space left on device",
    ),
    "stopped": (
        Hang("forward", 0, "", step=3, how="stop"),
        STALLS,
        Told("stall", 0, "forward", 3, "threefold"),
        "its process is stopped",
    ),
    "asleep": (
        Hang("data", 1, "", step=3),
        STALLS,
        Told("stall", 1, "data", 3, "threefold"),
        "see the stack above",
    ),
    "asleep in a tracker": (
        Hang("tracker", 0, ""),
        (*STALLS, "--log.trackers", "[tensorboard]"),
        Told("stall", 0, "opening tracker tensorboard", 0, "threefold"),
        "no progress for",
    ),
    "asleep at the end": (
        Hang("closing", 1, ""),
        STALLS,
        Told("stall", 1, "closing", 9, "threefold"),
        "see the stack above",
    ),
}


@pytest.mark.parametrize("ending", PLANTED)
def test_planted_ending_is_explained(tmp_path: Path, ending: str) -> None:
    hang, arguments, told, fact = PLANTED[ending]
    prepare(tmp_path)
    with hanging(tmp_path, [hang], *RUN, *arguments) as run:
        assert run.running.wait(60) not in (0, 75), run.err
        found, explanation = told_of(tmp_path / "run")
        assert found == told, explanation
        assert any(fact in each for each in explanation.facts), explanation.facts
    endings = [
        event for event in RunRecord(tmp_path / "run").events if event["event"] == "ending"
    ]
    assert len(endings) == 1


@pytest.mark.parametrize(
    ("plant", "told", "fact"),
    [
        (
            "not_a_number",
            Told("numbers", 2, "optimizer", STEP, "nan-loss"),
            "not finite on ranks 2 and 3",
        ),
        (
            "infinite_gradient",
            Told("numbers", None, "optimizer", STEP, "nan-loss"),
            "with finite losses on all ranks",
        ),
        (
            "memory_used_up",
            Told("device", 2, "forward", STEP, "out-of-memory"),
            "rank 2 has no memory left",
        ),
    ],
)
def test_failed_step_is_explained_with_its_rows(
    tmp_path: Path, plant: str, told: Told, fact: str
) -> None:
    prepare(tmp_path)
    done = planted(tmp_path, plant, "--log.dir", "run")
    assert done.returncode == 1
    found, explanation = told_of(tmp_path / "run")
    assert found == told
    assert any(fact in each for each in explanation.facts)


SCRIPT = """
import os
import signal
import sys

import torch
import threefold

calls = [0]


def loss(outputs, batch):
    calls[0] += 1
    if os.environ["RANK"] == "1" and calls[0] == 3:
        if sys.argv[1] == "raise":
            raise KeyError("a label")
        os.kill(os.getpid(), signal.SIGKILL)
    kept = batch["labels"] != -100
    logits = outputs.logits if hasattr(outputs, "logits") else outputs
    return (logits.float().logsumexp(-1) * kept).sum(), kept.sum()


if __name__ == "__main__":
    log = {"dir": "run", "every": 1, "sample_tokens": 0}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = {"config": {"model_type": "llama", **sizes}, "admission": "off"}
    data = {"source": "corpus", "seq_len": 32}
    train = {"steps": 9, "global_batch": 8, "micro_batch": 4}
    mesh = {"dp": 2, "device": "cpu"}
    threefold.train({"model": model, "data": data, "train": train, "mesh": mesh, "log": log}, loss=loss)
"""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kill", Told("gone", 1, "forward", 3, "killed")),
        ("raise", Told("exception", 1, "forward", 3, "own-error")),
    ],
)
def test_rank_of_another_launcher_is_named_by_itself_or_by_one_beside_it(
    tmp_path: Path, fault: str, told: Told
) -> None:
    prepare(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = torchrun(tmp_path, 2, "script.py", fault)
    assert done.returncode == 1, done.stderr
    found, explanation = told_of(tmp_path / "run")
    assert found == told, explanation
    if fault == "raise":
        assert "KeyError: 'a label'" in explanation.facts
        assert "script.py" in (explanation.frame or "")


def _raising(folder: str) -> None:
    def act(run: Any, mesh: Any) -> None:
        if run.step == 3 and mesh.rank == 1:
            raise ValueError("raised by the test")

    in_a_run({"dp": 2}, folder, 6, act)


def test_error_of_a_program_is_explained(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_ranks(_raising, 2, str(tmp_path / "run"))
    found, explanation = told_of(tmp_path / "run")
    assert found == Told("exception", 1, "the program", 3, "own-error"), explanation
    assert explanation.ending is not None and explanation.ending.rows
    assert "ValueError: raised by the test" in explanation.facts


def test_rank_that_does_not_end_as_asked_is_told(tmp_path: Path) -> None:
    prepare(tmp_path)
    hang = Hang("optimizer", 1, "", step=3)
    with hanging(tmp_path, [hang], *RUN, "--checkpoint.grace_s", "2") as run:
        run.reach(hang)
        os.kill(run.running.process, signal.SIGTERM)
        assert run.running.wait(30) not in (0, 75), run.err
    found, explanation = told_of(tmp_path / "run")
    assert found == Told("asked", 1, "optimizer", 3, "stopped", 15), explanation
