"""Whole runs of train.epochs: rows decide where they end, whatever the batches were, and the record proves it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ranks.runs import CONFIG, command, metrics, stop_after

pytestmark = pytest.mark.ranks

ROWS, EPOCHS = 43, 3
LAST_STEP = 65  # of 2 rows each: 129 reads, the last step has one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 43 rows, and a run over 2 ranks that was stopped in its first epoch."""
    folder = tmp_path_factory.mktemp("epochs")
    words = " ".join(f"word{number * number % 97}" for number in range(400))
    (folder / "corpus.txt").write_text(words[: ROWS * 32])
    config = CONFIG.replace("source: corpus", "source: corpus.txt").replace(
        "steps: 12, global_batch: 8", "epochs: 3"
    )
    (folder / "config.yaml").write_text(config + "optimizer: {warmup_steps: 2}\n")
    stopped = stop_after(folder, 4, *RUN, "--log.dir", "run", "--mesh.dp", "2")
    assert stopped.returncode == 75, stopped.stdout
    assert f"  steps  1 to {LAST_STEP}, 2 rows each\n" in stopped.stdout
    assert "  epochs 3 of 43 rows, each of them once; the last step has 1\n" in stopped.stdout
    return folder


RUN = ("train", "config.yaml", "--train.global_batch", "2", "--mesh.device", "cpu")


@pytest.mark.parametrize(("global_batch", "dp"), [(20, 4), (3, 1), (60, 2)])
def test_another_global_batch_ends_at_the_same_row(
    folder: Path, global_batch: int, dp: int
) -> None:
    run = Path(shutil.copytree(folder / "run", folder / f"to-{global_batch}"))
    done = max(metrics(run))
    left = ROWS * EPOCHS - 2 * done
    last = done + -(-left // global_batch)
    again = command(
        folder,
        "resume",
        run.name,
        "--train.global_batch",
        str(global_batch),
        "--mesh.dp",
        str(dp),
    )
    assert again.returncode == 0, again.stderr
    assert f"  steps  {done + 1} to {last}, {global_batch} rows each\n" in again.stdout
    assert (
        f"  schedule: cosine over {last} steps, not {LAST_STEP}: the rate of step {done + 1} is "
        in again.stdout
    )
    assert "\nread: 129 rows, 3.00 epochs of 43; none is left\n" in again.stdout
    lines = metrics(run)
    assert max(lines) == last and lines[last]["samples"] == ROWS * EPOCHS
    assert lines[last]["lr"] == 0, "the schedule ends with the run"
    assert [lines[step]["epoch"] for step in range(done + 1, last + 1)] == [
        (2 * done + step * global_batch) // ROWS for step in range(last - done)
    ]
    proved = command(folder, "data", "audit", run.name, "--contents")
    assert proved.returncode == 0, proved.stderr
    assert "  epoch 2: 43 of 43 rows, each exactly once\n" in proved.stdout
    assert "  train.epochs 3: 129 of 129 reads: every sample exactly 3 times\n" in proved.stdout
    once_more = command(folder, "resume", run.name)
    assert (
        f"nothing to do: step {last} of {last} is done. To train more: --train.epochs N\n"
        in once_more.stdout
    )
    more = command(folder, "resume", run.name, "--train.epochs", "4")
    assert (
        more.returncode == 0
        and "\nread: 172 rows, 4.00 epochs of 43; none is left\n" in more.stdout
    )
    proved = command(folder, "data", "audit", run.name)
    assert (
        "  train.epochs 4: 172 of 172 reads: every sample exactly 4 times\n" in proved.stdout
    ), proved.stderr
    where = command(folder, "data", "order", run.name, "--sample", "7")
    assert [
        line.partition(" (")[2].partition(",")[0] for line in where.stdout.splitlines()
    ] == [f"epoch {epoch}" for epoch in range(4)]


def test_step_of_two_epochs_is_shown(folder: Path) -> None:
    shown = command(
        folder,
        "train",
        "config.yaml",
        "--log.dir",
        "shown",
        "--train.global_batch",
        "40",
        "--mesh.dp",
        "1",
    )
    assert shown.returncode == 0, shown.stderr
    step = command(folder, "data", "order", "shown", "--step", "2")
    assert step.stdout.startswith(
        "step 2: epoch 0, positions from 40 on, epoch 1, positions from 0 on, dp=1"
    )
    last = command(folder, "data", "order", "shown", "--step", "4")
    assert len(last.stdout.splitlines()[1].split(",")) == 9, "129 = 3 x 40 + 9"


def test_dropped_rows_are_said_and_a_run_keeps_its_tail(folder: Path) -> None:
    drops = (
        "--train.epochs",
        "1",
        "--data.tail",
        "drop",
        "--train.global_batch",
        "10",
        "--mesh.dp",
        "1",
    )
    done = command(folder, "train", "config.yaml", "--log.dir", "drops", *drops)
    assert done.returncode == 0, done.stderr
    assert (
        "  epochs 1 of 43 rows, 3 of them in none: they fill no batch (data.tail: drop)\n"
        in done.stdout
    )
    said = "read: 40 rows, 0.93 epochs of 43; 3 rows of each epoch fill no batch and were left out (data.tail: drop)"
    assert f"\n{said}\n" in done.stdout
    audit = command(folder, "data", "audit", "drops").stdout
    assert (
        "; 3 not: they do not fill a batch at the end (rows " in audit
        and "not yet" not in audit
    )
    other = command(folder, "resume", "drops", "--train.epochs", "2", "--data.tail", "carry")
    assert other.returncode == 2 and other.stderr.startswith(
        "the saved state has tail = drop, but here tail = carry\n"
    )
    config = folder / "drops" / "config.yaml"
    assert "  tail: drop\n" in config.read_text()
    config.write_text(config.read_text().replace("  tail: drop\n", ""))
    lost = command(folder, "resume", "drops", "--train.epochs", "2")
    assert (
        lost.returncode == 2
        and "\n  fix: pass the tail that the run began with (--data.tail drop)" in lost.stderr
    )
    more = command(folder, "resume", "drops", "--train.epochs", "2", "--data.tail", "drop")
    assert more.returncode == 0, more.stderr
    assert (
        json.loads((folder / "drops" / "audit.jsonl").read_text().splitlines()[-1])["last"] == 8
    )
    assert "  tail: drop\n" in config.read_text(), "as the run began"
