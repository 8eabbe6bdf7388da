"""The referee on a program that saves and is started again, on two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.test_referee_programs import REFEREE, TORCHRUN, WATCHED, refuted, run

pytestmark = pytest.mark.examples

FAULTS = [
    ("stale", ["resume"], "start 2 resumes from step 4 with the moments of step 2\n"),
    (
        "no_schedule",
        ["resume"],
        "with other learning rates: in step 6 they were 0.000166667 and 0.0005\n",
    ),
    ("local_names", ["resume"], "with 11 of 25 weights that are not as saved: model.layers.1."),
    (
        "rows",
        ["rows of an epoch", "resume"],
        "and reads different rows from start 1: 8 of 8 in step 5\n",
    ),
]


def resumed(
    folder: Path, kind: str, *, ranks: int = 2, first: str = "6 2 4"
) -> tuple[int, str]:
    """The steps of a program and after which it saves, and a second start from there."""
    program = f"{' '.join(TORCHRUN[:-1])} {{}} {WATCHED / 'resume_loop.py'} {kind}"
    both = f"{program.format(2)} {first} && {program.format(ranks)} 16"
    watched = run(folder, *REFEREE, "--steps", "1", "--", "sh", "-c", both)
    return watched.returncode, watched.stdout


def test_program_that_goes_on_as_it_was_is_proved(tmp_path: Path) -> None:
    code, printed = resumed(tmp_path, "clean")
    assert refuted(printed) == []
    assert (
        "proved      resume: start 2 resumes from step 4: 25 weights and 75 values of the optimizer as they"
        in printed
    )
    assert "in 2 steps the learning rates and rows of start 1\n" in printed
    # Two checked steps in a row would prove the updates too.
    assert code == 3 and "each of 64 rows was read once in each epoch, of 2" in printed


@pytest.mark.parametrize(("kind", "parts", "what"), FAULTS)
def test_program_that_goes_on_otherwise_is_refuted(
    tmp_path: Path, kind: str, parts: list[str], what: str
) -> None:
    code, printed = resumed(tmp_path, kind)
    assert code == 1 and refuted(printed) == parts
    assert what in printed


@pytest.mark.parametrize("kind", ["clean", "next_epoch"])
def test_save_at_the_end_of_an_epoch(tmp_path: Path, kind: str) -> None:
    code, printed = resumed(tmp_path, kind, first="10 8")
    assert refuted(printed) == (["resume"] if kind == "next_epoch" else []), printed
    assert code == (1 if kind == "next_epoch" else 3)
    assert (
        "start 2 resumes from step 8 and reads different rows from start 1: " in printed
    ) == (kind == "next_epoch")


def test_other_ranks_go_on_with_the_same_state(tmp_path: Path) -> None:
    """The parts of two ranks and the whole of one have the same sums; the rows of a step are half as many."""
    code, printed = resumed(tmp_path, "fsdp2", ranks=1)
    assert code == 1 and refuted(printed) == ["resume"]
    assert (
        "start 2 resumes from step 4 and reads different rows from start 1: 4 of 8 in step 5\n"
        in printed
    )
