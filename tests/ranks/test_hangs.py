"""Whatever a rank hangs in, from the ranks' meeting to their end, the others name it, and its place."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from ranks import warm
from ranks.faults import alive, last_step, rank_processes, wait_for
from ranks.hangs import Hang, hanging
from ranks.runs import environment, prepare
from threefold.explain.answer import answer
from threefold.explain.evidence import gather

pytestmark = pytest.mark.timing

LIMITS = ("--log.stall_s", "2", "--mesh.timeout_s", "120", "--log.sample_tokens", "0")
RUN = (
    "--train.steps",
    "14",
    "--checkpoint.every",
    "6",
    "--eval.every",
    "4",
    "--eval.source",
    "corpus",
    *LIMITS,
)


def ways(last: int) -> list[Hang]:
    """A hang in each place, on ranks from 0 to `last`, in the order in which a run comes to them."""
    stopped, held = "its process is stopped", "one call holds Python's lock"
    return [
        Hang("connecting", last, "rendezvous", how="stop", said=stopped),
        Hang("admission", 0, "admission"),
        Hang("preparation", last, "data preparation", how="lock"),
        Hang("loading", 1, "loading"),
        Hang("data", 0, "data", step=2),
        Hang("forward", last, "forward", step=3),
        Hang("backward", 1, "backward", step=4),
        Hang("evaluation", 0, "evaluation"),
        Hang("optimizer", last, "optimizer", step=5, how="lock"),
        Hang("save", 1, "save", step=6),
        Hang("forward", 0, "forward", step=8, how="stop", said=stopped),
        Hang("data", last, "data", step=9, how="stop", said=stopped),
        Hang("backward", 0, "backward", step=10),
        Hang("optimizer", 1, "optimizer", step=11, how="gil", said=held),
        Hang("forward", 0, "forward", step=14, how="gil", said=held),
        Hang("closing", last, "closing"),
    ]


def check(found: list[str], hang: Hang) -> None:
    """What was said names that rank and no other, and its place."""
    assert found
    for line in found:
        assert re.findall(r"rank (\d+) of host", line) == [str(hang.rank)], (hang, found)
    assert re.search(rf"\bin {hang.phase}(,| of) ", found[0]), (hang, found)
    assert hang.said in found[-1], (hang, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "last"),
    [
        # The same places on fewer ranks, of which the test below has a sample.
        pytest.param(("--mesh.dp", "2"), 1, marks=pytest.mark.long),
        (("--mesh.dp", "2", "--mesh.dp_shard", "2", "--mesh.tp", "2"), 3),
    ],
)
def test_every_hang_is_named(tmp_path: Path, mesh: tuple[str, ...], last: int) -> None:
    prepare(tmp_path)
    hangs = ways(last)
    # Four ranks on two busy cores have pauses of five seconds, in their admission and at an evaluation.
    with hanging(tmp_path, hangs, "--log.dir", "run", *mesh, *RUN, "--log.stall_s", "8") as run:
        for hang in hangs:
            check(run.named(hang, within_s=40), hang)
        assert run.running.wait(30) == 0, run.err


def test_first_ranks_that_hang_are_named(tmp_path: Path) -> None:
    """A sample of the whole, for every day."""
    prepare(tmp_path)
    hangs = [
        hang for hang in ways(1) if (hang.place, hang.step) in (("backward", 4), ("forward", 8))
    ]
    steps = ("--train.steps", "9", "--checkpoint.every", "0", *LIMITS, "--log.stall_s", "1.5")
    with hanging(tmp_path, hangs, "--log.dir", "run", "--mesh.dp", "2", *steps) as run:
        for hang in hangs:
            check(run.named(hang), hang)
        assert run.running.wait(30) == 0, run.err
    kept = list((tmp_path / "run/logs").glob("flight_recorder_rank_*.json"))
    assert kept and all(path.read_text().startswith('{"') for path in kept)


ENDING = (
    "--log.stall_s",
    "1.5",
    "--train.timeout_s",
    "3",
    "--mesh.timeout_s",
    "60",
    "--log.sample_tokens",
    "0",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hang",
    [
        Hang("closing", 1, "closing"),
        Hang("forward", 0, "forward", step=4, how="stop", said="its process is stopped"),
        Hang(
            "optimizer", 1, "optimizer", step=4, how="gil", said="one call holds Python's lock"
        ),
    ],
    ids=lambda hang: hang.name,
)
def test_hang_that_lasts_ends_the_run(tmp_path: Path, hang: Hang) -> None:
    prepare(tmp_path)
    with hanging(
        tmp_path, [hang], "--log.dir", "run", "--mesh.dp", "2", "--train.steps", "6", *ENDING
    ) as run:
        process = run.reach(hang)
        assert run.running.wait(40) == 1, run.err  # before the collectives' limit of 60 s
        named = re.findall(r"^no progress for \d+ s: (.*)$", run.err, re.MULTILINE)
        assert len(named) == 2, run.err  # once for the stall, once for the end
        for line in named:
            check([line], hang)
        assert (
            "  expected: progress within train.timeout_s = 3 s; the run ends here, and its"
            in run.err
        )
        assert ("innermost call is the last" in run.err) == (hang.how != "stop")
        assert "Traceback" not in run.err
        assert not alive(process)


@pytest.mark.slow
def test_rank_that_hangs_in_the_compiler_is_named(tmp_path: Path) -> None:
    prepare(tmp_path)
    hang, steps = (
        Hang("compile", 1, r"admission at full size \(compiling\)"),
        ("--train.steps", "2", "--train.compile", "true"),
    )
    with hanging(
        tmp_path, [hang], "--log.dir", "run", "--mesh.dp", "2", *steps, *LIMITS
    ) as run:
        check(run.named(hang), hang)
        assert run.running.wait(60) == 0, run.err


@pytest.mark.slow
def test_rank_whose_save_in_the_background_hangs_is_named(tmp_path: Path) -> None:
    """All ranks wait for their own threads: those of the others wait for the one that writes."""
    prepare(tmp_path)
    steps = ("--train.steps", "4", "--checkpoint.every", "2")
    hang = Hang("writing", 1, "save", said="")
    with hanging(
        tmp_path, [hang], "--log.dir", "run", "--mesh.dp", "2", *steps, *LIMITS
    ) as run:
        check(run.named(hang), hang)
        assert "saver.py" in run.err and "in _until" in run.err
        assert run.running.wait(60) == 0, run.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", r"rank 1 \(process \d+\) was ended by SIGKILL"),
        ("raise", "RuntimeError: raised by the test"),
    ],
)
@pytest.mark.parametrize("place", ["loading", "backward"])
def test_rank_that_is_killed_or_raises_is_named_once(
    tmp_path: Path, place: str, how: str, said: str
) -> None:
    prepare(tmp_path)
    hang = Hang(place, 1, place, step=0 if place == "loading" else 3, how=how)
    with hanging(
        tmp_path, [hang], "--log.dir", "run", "--mesh.dp", "2", "--train.steps", "6", *LIMITS
    ) as run:
        assert run.running.wait(40) == 1, run.err
        assert len(re.findall(rf"^{said}", run.err, re.MULTILINE)) == 1, run.err
        assert "no progress" not in run.err


@pytest.mark.slow
def test_ranks_end_with_a_sentence_when_the_launcher_is_frozen(tmp_path: Path) -> None:
    """It keeps the store of the ranks that it has started."""
    prepare(tmp_path)
    with hanging(
        tmp_path, [], "--log.dir", "run", "--mesh.dp", "2", "--train.steps", "100000", *ENDING
    ) as run:
        wait_for(lambda: last_step(tmp_path / "run") >= 3, "step 3")
        os.kill(run.running.process, signal.SIGSTOP)
        ranks = rank_processes(tmp_path / "run")
        wait_for(
            lambda: not any(alive(process) for process in ranks.values()), run.err, within_s=20
        )
        gone = r"^(rank 0 of host|  expected: progress within train)"
        assert len(re.findall(gone, run.err, re.MULTILINE)) == 3, run.err
        assert "has not reached the run's store" in run.err
        assert "Traceback" not in run.err
        os.kill(run.running.process, signal.SIGCONT)
        assert run.running.wait(20) == 1


@pytest.mark.slow
def test_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    prepare(tmp_path)
    hang = Hang("meeting", 1, "rendezvous")
    limits = ("--mesh.timeout_s", "4", "--log.stall_s", "1.5")
    with hanging(tmp_path, [hang], "--log.dir", "run", "--mesh.dp", "2", *limits) as run:
        assert run.running.wait(40) == 1, run.err
        assert "rank 1" in run.err.splitlines()[0], run.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda number: number.name
)
def test_ranks_end_with_a_sentence_when_rank_0_takes_the_store_with_it(
    tmp_path: Path, number: int
) -> None:
    """As mpirun and srun start ranks: rank 0's process keeps the store."""
    prepare(tmp_path)
    environ = environment(tmp_path) | {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
    }
    environ["MASTER_PORT"] = str(_free_port())
    words = (
        "train",
        "config.yaml",
        "--mesh.dp",
        "4",
        "--log.dir",
        "run",
        "--train.steps",
        "100000",
        *ENDING,
    )
    with contextlib.ExitStack() as stack:
        first, *others = [
            stack.enter_context(
                warm.Running(
                    warm.threefold,
                    tmp_path,
                    words,
                    environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for rank in range(4)
        ]
        wait_for(lambda: last_step(tmp_path / "run") >= 3, "step 3")
        process = rank_processes(tmp_path / "run")[0]
        os.kill(process, number)
        assert [other.wait(30) for other in others] == [1, 1, 1]
        if number == signal.SIGSTOP:
            os.kill(process, signal.SIGCONT)
            first.wait(30)
        said = "".join(other.err() for other in others)
        assert others[0].err() == said  # by the lowest of those that are left
        assert "Traceback" not in said
        stopped = r"^no progress for \d+ s: rank 0 of host \S+ \(process \d+\) has given no sign of life for \d+ s, in "
        stopped += r"\w+ of step \d+: its process is stopped"
        assert len(re.findall(stopped, said, re.MULTILINE)) == (
            2 if number == signal.SIGSTOP else 0
        ), said
        # Which rank notices first depends on whom it exchanges with.
        if number == signal.SIGKILL:
            assert (
                "rank 1 lost its connection to another rank" in said
                or "its process is gone" in said
            ), said
        found = answer(gather([tmp_path / "run"])).explanation
        assert found is not None and found.ending is not None and found.line.rank == 0, found
        assert (
            found.ending.how == ("gone" if number == signal.SIGKILL else "stall")
            and found.ending.step >= 3
        )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
