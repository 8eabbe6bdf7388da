"""However a run ends, `threefold explain RUN` says which rank ended it, in which phase and step, and of what."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from ranks.faults import planted
from ranks.hangs import Hang, hanging
from ranks.plants import STEP
from ranks.runs import prepare
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
    return Told(ending.how, rank, ending.phase, ending.step, found.known.name, ending.code), found


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
    endings = [event for event in RunRecord(tmp_path / "run").events if event["event"] == "ending"]
    assert len(endings) == 1


@pytest.mark.parametrize(
    ("plant", "told", "fact"),
    [
        ("not_a_number", Told("numbers", 2, "optimizer", STEP, "nan-loss"), "not finite on ranks 2 and 3"),
        ("infinite_gradient", Told("numbers", None, "optimizer", STEP, "nan-loss"), "with finite losses on all ranks"),
        ("memory_used_up", Told("device", 2, "forward", STEP, "out-of-memory"), "rank 2 has no memory left"),
    ],
)
def test_failed_step_is_explained_with_its_rows(tmp_path: Path, plant: str, told: Told, fact: str) -> None:
    prepare(tmp_path)
    done = planted(tmp_path, plant, "--log.dir", "run")
    assert done.returncode == 1
    found, explanation = told_of(tmp_path / "run")
    assert found == told
    assert any(fact in each for each in explanation.facts)
