"""What goes wrong in a run: stalls, kills, numbers that are not finite, and being asked twice to stop."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks.faults import MESH, alive, last_step, planted, rank_processes, started, wait_for
from ranks.keeping import write_corpus
from ranks.plants import STEP
from ranks.runs import command, curve, environment, metrics, prepare
from ranks.spawn import run_ranks
from threefold.checkpoint.checkpoint_folder import CheckpointFolder
from threefold.mesh.local_ranks import STOPS
from threefold.training.stop_request import _ONE_REQUEST_S

pytestmark = [pytest.mark.slow, pytest.mark.timing]

# Enough to be killed in the midst of it.
LONG = ("--train.steps", "40", "--checkpoint.every", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run of dp 2 x tp 2 that nothing interrupted."""
    done = command(folder, "train", "config.yaml", *MESH, *LONG, "--log.dir", "whole")
    assert done.returncode == 0, done.stderr
    return folder / "whole"


# --- stalls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plant", "phase", "function"),
    [("stall_in_data", "data", "planted"), ("stall_in_forward", "forward", "planted")],
)
def test_stalled_rank_is_named_with_phase_and_stack(
    folder: Path, plant: str, phase: str, function: str
) -> None:
    limits = ("--log.stall_s", "2", "--train.timeout_s", "4")
    done = planted(folder, plant, "--log.dir", plant, *limits)
    assert done.returncode == 1
    late = rf"no progress for \d+ s: rank 2 of host \S+ \(process \d+\) is in {phase} of step {STEP}"
    # Once for the stall, once for the end.
    assert len(re.findall(rf"^{late}$", done.stderr, re.MULTILINE)) == 2
    waiting = re.findall(
        rf"^  ranks? ([\d, and]+) waits? in \w+ of step {STEP}$", done.stderr, re.MULTILINE
    )
    assert sorted(re.findall(r"\d", " ".join(waiting))) == ["0", "1", "3"], done.stderr
    stack = done.stderr.partition("rank 2 is at (the innermost call is the last):\n")[
        2
    ].partition("no progress")[0]
    assert f"in {function}\n" in stack and "time.sleep(1000)" in stack
    assert "loop.py" in stack.splitlines()[0]
    assert (
        "  expected: progress within train.timeout_s = 4 s; the run ends here, and its checkpoints are kept\n"
        in done.stderr
    )
    assert "  fix: see the stack above for what the late rank is doing; " in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(metrics(folder / plant)) == list(range(1, STEP))


def test_another_rank_names_rank_0_when_that_is_frozen(folder: Path) -> None:
    run, limits = (
        folder / "frozen",
        ("--log.stall_s", "2", "--train.timeout_s", "4", "--checkpoint.every", "0"),
    )
    with started(
        folder,
        "train",
        "config.yaml",
        *MESH,
        "--log.dir",
        "frozen",
        "--train.steps",
        "100000",
        *limits,
    ) as going:
        wait_for(lambda: last_step(run) >= 3, lambda: f"step 3: {going.output()}")
        ranks, before = rank_processes(run), len(going.output())
        os.kill(ranks[0], signal.SIGSTOP)
        assert going.wait(60) == 1
        silent = r"^no progress for \d+ s: rank 0 of host \S+ \(process \d+\) has given no sign of life for \d+ s, in "
        # Once for the stall, once for the end.
        assert len(re.findall(silent, going.output(), re.MULTILINE)) == 2
        # A slow start is told too, if it takes as long as a stall does here.
        waiting = re.findall(
            r"^  ranks? ([\d, andto]+) waits? in", going.output()[before:], re.MULTILINE
        )
        assert set(" ".join(waiting).replace("1 to 3", "1 2 3").replace(",", "").split()) - {
            "and"
        } == {"1", "2", "3"}
        assert "Traceback" not in going.output()
        assert "cut off, or rank 0" not in going.output()
        assert not any(alive(process) for process in ranks.values())


def test_rank_that_others_wait_for_in_every_step_is_the_slowest_and_told_once(
    folder: Path,
) -> None:
    steps = (
        "--train.steps",
        "150",
        "--log.every",
        "3",
        "--checkpoint.every",
        "0",
        "--log.sample_tokens",
        "0",
    )
    done = planted(folder, "late_in_every_forward", "--log.dir", "late", *steps)
    assert done.returncode == 0, done.stderr
    found = [line for step, line in metrics(folder / "late").items() if step > 10]
    late = [line for line in found if line["slowest_rank"] == 2]
    # In single ones another may have lacked a core for as long.
    assert len(late) > 0.8 * len(found)
    lost = [line["slowest_share"] * line["step_time_s"] for line in late]
    assert 0.6 < sum(lost) / len(lost) / 0.1 < 1.3, lost
    told = r"^rank 2 of host \S+ has been the slowest since step \d+: a step would take about \d+% less if it were as "
    told += r"fast as the others; it is blocked in the kernel for \d+% of the time, the others for \d+%: a file, a lock"
    assert len(re.findall(told, done.stdout, re.MULTILINE)) == 1, done.stdout


# --- kills -------------------------------------------------------------------------------------------------------


def test_killed_rank_restarts_and_the_run_ends_with_the_same_losses(
    folder: Path, whole: Path
) -> None:
    run = folder / "killed"
    shutil.rmtree(run, ignore_errors=True)  # of a first attempt
    with started(
        folder,
        "train",
        "config.yaml",
        *MESH,
        *LONG,
        "--log.dir",
        "killed",
        "--max-restarts",
        "3",
    ) as going:
        for step in (8, 22):
            wait_for(lambda step=step: last_step(run) >= step, f"step {step}: {going.output()}")  # type: ignore[misc]
            before = rank_processes(run)
            os.kill(before[3], signal.SIGKILL)
            # Each of them: a rank that has not yet begun to log would be known by its process of before.
            wait_for(
                lambda old=before: not rank_processes(run).items() & old.items(), "a restart"
            )  # type: ignore[misc]
        assert going.wait(120) == 0, going.output()
        assert "restart 2 of 3: a rank had failed" in going.output()
        assert (
            len(re.findall(r"rank 3 \(process \d+\) was ended by SIGKILL", going.output())) == 2
        )
        # One of the others for each kill, or none where the launcher was faster.
        lost = r"rank [012] lost its connection to another rank: .*\n  expected: all ranks to run until the"
        assert len(re.findall(lost, going.output())) <= 2
        assert "Traceback" not in going.output()
    assert curve(run) == curve(whole)
    assert (run / "audit.jsonl").read_text().count('"segment": 3') > 0


def test_killed_launcher_takes_its_ranks_with_it(folder: Path, whole: Path) -> None:
    run = folder / "orphans"
    with started(folder, "train", "config.yaml", *MESH, *LONG, "--log.dir", "orphans") as going:
        wait_for(lambda: last_step(run) >= 3, lambda: f"step 3: {going.output()}")
        ranks = rank_processes(run)
        assert len(ranks) == 4 and all(alive(process) for process in ranks.values())
        # One that nobody answers, so that no error of a peer ends it: it must not wait for ever.
        os.kill(ranks[3], signal.SIGSTOP)
        stopped = ranks.pop(3)
        os.kill(going.launcher, signal.SIGKILL)
        wait_for(
            lambda: not any(alive(process) for process in ranks.values()),
            "the end of all ranks",
            within_s=20,
        )
        os.kill(stopped, signal.SIGCONT)
        wait_for(lambda: not alive(stopped), "the end of the rank that was frozen", within_s=20)
    done = command(folder, "train", "config.yaml", *MESH, *LONG, "--log.dir", "orphans")
    assert done.returncode == 0, done.stderr
    assert curve(run) == curve(whole)


def test_wrong_request_is_not_started_again(folder: Path, whole: Path) -> None:
    again = (
        "--log.dir",
        "whole",
        "--train.steps",
        "41",
        "--train.seed",
        "1",
        "--max-restarts",
        "2",
    )
    refused = command(folder, "train", "config.yaml", *MESH, *again)
    assert refused.returncode == 2
    assert refused.stderr.count("train.seed = 0, not 1") == 1


# --- memory ------------------------------------------------------------------------------------------------------


def test_rank_without_memory_says_what_would_fit_and_leaves_a_snapshot(folder: Path) -> None:
    done = planted(folder, "memory_used_up", "--log.dir", "full", "--train.micro_batch", "4")
    assert done.returncode == 1
    path = folder / "full" / "memory" / "rank-0002.pickle"
    said = re.search(
        r"^rank 2 has no memory left: CUDA out of memory\. Tried to allocate 22\.00 MiB\n"
        r"  expected: about 0\.0 GiB to fit in its device, as estimated for the loss: 0\.0 GiB of weights, gradients "
        rf"and moments, together with activations and gathered weights; what it holds is in {re.escape(str(path))}, "
        r"for pytorch\.org/memory_viz\n"
        r"  fix: --train\.micro_batch 1$",
        done.stderr,
        re.MULTILINE,
    )
    assert said is not None, done.stderr
    assert path.read_text() == "what the allocator holds"
    assert "Traceback" not in done.stderr
    # Rank 0 is ended before it writes the last ones.
    assert {*metrics(folder / "full")} <= {*range(1, STEP)}
    assert (
        "a GPU's memory is used up"
        in command(folder, "explain", "full/logs/rank-0002.log").stdout
    )


# --- numbers that are not finite ---------------------------------------------------------------------------------


def test_rank_with_a_loss_that_is_no_number_is_named_with_its_rows(folder: Path) -> None:
    done = planted(folder, "not_a_number", "--log.dir", "nan")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("step")]
    named = re.fullmatch(
        rf"step {STEP}: the loss is not finite on ranks 2 and 3: rows ([\d, ]+)", line
    )
    assert named is not None, done.stderr
    assert (
        f"  expected: finite numbers; the weights are as step {STEP - 1} left them, and nothing is saved\n"
        f"  fix: look at the rows: threefold data order nan --step {STEP} --show; leave them out: "
        f"--data.skip '[[{STEP}, {STEP}]]'; or --train.nonfinite skip\n"
    ) in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(metrics(folder / "nan")) == list(range(1, STEP))
    shown = command(folder, "data", "order", "nan", "--step", str(STEP))
    assert f"dp rank 1 (ranks 2 and 3): rows {named[1]}" in shown.stdout


def test_gradient_that_overflows_on_one_rank_is_seen_by_all(folder: Path) -> None:
    done = planted(folder, "infinite_gradient", "--log.dir", "overflow")
    assert done.returncode == 1
    found = (
        rf"step {STEP}: the gradient's norm is (nan|inf), with finite losses on all "
        rf"ranks; the step read rows [\d, ]+"
    )
    assert re.search(found, done.stderr), done.stderr


def test_skipped_step_leaves_the_weights_and_is_counted(folder: Path, whole: Path) -> None:
    done = planted(folder, "not_a_number", "--log.dir", "skip", "--train.nonfinite", "skip")
    assert done.returncode == 0, done.stderr
    assert f"step {STEP}: the loss is not finite on ranks 2 and 3: rows" in done.stdout
    found = metrics(folder / "skip")
    assert sorted(found) == list(range(1, 13))
    assert [found[step]["skipped_steps"] for step in (STEP - 1, STEP, 12)] == [0, 1, 1]
    assert found[12]["loss"] < found[1]["loss"]


def _steps_with_a_bad_one_between(folder: str, bad: bool) -> list[bytes]:
    """The weights and the optimizer's state after two steps; `bad`: with a step between them that goes wrong."""
    import torch

    from ranks.keeping import Miniature
    from ranks.plants import change_loss
    from threefold.training import step

    run = Miniature((1, 2, 1, 2), f"{folder}/mini-{bad}")
    run.advance(1)
    if bad:
        plain = step.forward_sums
        change_loss(run.mesh.rank == 3, range(1, 10))
        ((_, norm, _),) = run.advance(1)
        assert math.isnan(norm)
        step.forward_sums = plain
    else:
        next(run._batches)
    run.advance(1)
    state = [
        *run.model.module.parameters(),
        *(v for each in run.optimizer.state.values() for v in each.values()),
    ]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in state]
    assert all(bool(torch.isfinite(value).all()) for value in local)
    return [value.detach().contiguous().numpy().tobytes() for value in local]


def test_weights_and_moments_are_as_if_the_skipped_step_had_not_been(folder: Path) -> None:
    write_corpus(folder)
    with_it = run_ranks(_steps_with_a_bad_one_between, 4, str(folder), True)
    without = run_ranks(_steps_with_a_bad_one_between, 4, str(folder), False)
    assert with_it == without


def test_too_many_skipped_steps_in_a_row_end_the_run(folder: Path) -> None:
    asked = ("--train.nonfinite", "skip", "--train.steps", "20")
    done = planted(folder, "not_a_number_again_and_again", "--log.dir", "limit", *asked)
    assert done.returncode == 1
    assert f"step {STEP + 9}: the loss is not finite on ranks 2 and 3" in done.stderr
    assert "the 10th step in a row without an update\n" in done.stderr
    assert "  expected: fewer than 10 in a row: skipping does not help\n" in done.stderr
    assert f"threefold data order limit --step {STEP + 9} --show" in done.stderr


# --- being asked to stop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_whose_output_nobody_reads_saves_and_ends_without_a_word(
    folder: Path, ranks: int
) -> None:
    arguments = (
        "--log.dir",
        f"head-{ranks}",
        "--mesh.dp",
        str(ranks),
        "--train.steps",
        "100000",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "threefold", "train", "config.yaml", *arguments],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith(b"threefold ")
    process.stdout.close()
    assert process.wait(60) == 75
    assert process.stderr.read() == b""
    process.stderr.close()
    saved = CheckpointFolder(folder / f"head-{ranks}").newest()
    assert saved is not None and saved.step == last_step(folder / f"head-{ranks}")


@pytest.fixture
def hang_ups_are_heard() -> Iterator[None]:
    """By what is started here, though nohup started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_ups_are_heard")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_run_saves_and_ends_when_all_its_processes_are_asked_to(
    folder: Path, number: int, workers: int
) -> None:
    """As a terminal or a scheduler asks: workers, and the servers that they and ranks are forked from, hear it too."""
    run = folder / f"all-{number}-{workers}"
    asked = (
        "--log.dir",
        run.name,
        "--train.steps",
        "100000",
        "--data.num_workers",
        str(workers),
    )
    with started(folder, "train", "config.yaml", *MESH, *asked) as going:
        wait_for(lambda: last_step(run) >= 3, lambda: f"step 3: {going.output()}")
        going.signal_all(number)
        assert going.wait(60) == 75, going.output()
        saved = CheckpointFolder(run).newest()
        assert saved is not None and saved.step == last_step(run) and saved.damage() is None
        assert (
            f"stopped by a signal after step {saved.step}; the checkpoint is saved"
            in going.output()
        )
        assert "Traceback" not in going.output() and "Warning" not in going.output()


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_whose_terminal_is_closed_saves_and_ends(folder: Path, ranks: int) -> None:
    """The terminal's SIGHUP reaches all of its processes, and what they write from then on is an error."""
    master, terminal = os.openpty()
    run, asked = (
        folder / f"closed-{ranks}",
        ("--mesh.dp", str(ranks), "--train.steps", "100000"),
    )

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "threefold",
            "train",
            "config.yaml",
            *asked,
            "--mesh.tp",
            "1",
            "--log.dir",
            run.name,
        ],
        cwd=folder,
        env=environment(folder),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(terminal)
    try:
        reader = threading.Thread(
            target=lambda: [None for _ in iter(lambda: _read(master), b"")], daemon=True
        )
        reader.start()
        wait_for(lambda: last_step(run) >= 3, "step 3")
        closing, master = master, -1
        os.close(closing)
        assert process.wait(60) == 75
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        if master >= 0:
            os.close(master)
    saved = CheckpointFolder(run).newest()
    assert saved is not None and saved.step == last_step(run) and saved.damage() is None


def _read(master: int) -> bytes:
    with contextlib.suppress(OSError):
        return os.read(master, 1 << 16)
    return b""


@pytest.mark.parametrize("ranks", [1, 2])
def test_signals_after_the_last_save_do_not_change_the_exit_code(
    folder: Path, ranks: int
) -> None:
    """To the end of the process: Python gives its signals back to the system long before."""
    run, asked = folder / f"late-{ranks}", ("--mesh.dp", str(ranks), "--train.steps", "100000")
    with started(
        folder, "train", "config.yaml", *asked, "--mesh.tp", "1", "--log.dir", run.name
    ) as going:
        wait_for(lambda: last_step(run) >= 2, lambda: f"step 2: {going.output()}")
        os.kill(going.launcher, signal.SIGTERM)
        wait_for(lambda: "resume: threefold resume" in going.output(), "the last line")
        for number in itertools.cycle((signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(going.launcher, number)
            time.sleep(0.4)  # three of a kind within a second would be a wish to end at once
            if not going.running():
                break
        assert going.wait(1) == 75, going.output()


def test_server_of_the_ranks_that_is_killed_is_named_and_leaves_no_rank(folder: Path) -> None:
    run = folder / "no-server"
    with started(
        folder, "train", "config.yaml", *MESH, "--log.dir", run.name, "--train.steps", "100000"
    ) as going:
        wait_for(lambda: last_step(run) >= 3, lambda: f"step 3: {going.output()}")
        ranks = rank_processes(run)
        (server,) = {
            int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0])
            for process in ranks.values()
        }
        os.kill(server, signal.SIGKILL)
        assert going.wait(60) == 1
        assert going.output().count("the process that the ranks are forked from was ended") == 1
        assert not any(map(alive, ranks.values()))


def test_second_ctrl_c_leaves_at_once(folder: Path) -> None:
    """The first one cannot be followed: one rank is frozen, so no step ends."""
    run = folder / "impatient"
    with started(
        folder,
        "train",
        "config.yaml",
        *MESH,
        "--log.dir",
        "impatient",
        "--train.steps",
        "100000",
    ) as going:
        wait_for(lambda: last_step(run) >= 2, lambda: f"step 2: {going.output()}")
        ranks = rank_processes(run)
        os.kill(ranks[1], signal.SIGSTOP)
        going.signal_all(signal.SIGINT)
        begun = time.monotonic()
        wait_for(lambda: time.monotonic() - begun > _ONE_REQUEST_S + 0.5, "", within_s=10)
        assert going.running() and alive(ranks[0])
        going.signal_all(signal.SIGINT)
        # After the signal: else the step could end, and the last save begin.
        os.kill(ranks[1], signal.SIGCONT)
        assert going.wait(20) == 130
        wait_for(
            lambda: not any(alive(process) for process in ranks.values()),
            "the end of all ranks",
            within_s=20,
        )
