"""The referee on programs as people write them, on two real ranks: faults refuted, their clean twins proved."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import warm_referee

pytestmark = pytest.mark.examples

WATCHED = Path(__file__).parents[1] / "watched"
TORCHRUN = (*warm_referee.TORCHRUN, "--standalone", "--nproc-per-node", "2")
COPIES = "copies of weights"
REFEREE = warm_referee.REFEREE


def environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")
    }


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A program, or the referee and what it watches, forked from the server of the tests' ranks where they can be."""
    return warm_referee.run(folder, environment(), *words) or cold_run(folder, *words)


def cold_run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )


def refuted(printed: str) -> list[str]:
    return re.findall(r"^refuted +([^:]+):", printed, re.M)


def not_judged(printed: str) -> list[str]:
    return re.findall(r"^not judged +([^:]+): (?!checkpoints)", printed, re.M)


CASES = [
    ("ddp_loop.py", "plain", 1, ["rows of data ranks"]),
    ("ddp_loop.py", "sampler", 3, []),
    ("ddp_loop.py", "no_set_epoch", 1, ["order of epochs"]),
    ("fsdp2_loop.py", "rank_seed", 1, ["rows of an epoch", "order of epochs"]),
    ("fsdp2_loop.py", "one_seed", 3, []),
    (
        "tp_loop.py",
        "by_rank",
        1,
        ["rows of one model copy", "rows of an epoch", "order of epochs", "copies of weights"],
    ),
    # transformers' Trainer with DistributedDataParallel and a model whose loss does not take `num_items_in_batch`.
    ("bert_trainer.py", "", 1, ["gradients"]),
]


@pytest.mark.parametrize(
    ("program", "kind", "code", "parts"), CASES, ids=lambda value: str(value)
)
def test_programs(tmp_path: Path, program: str, kind: str, code: int, parts: list[str]) -> None:
    words = (*TORCHRUN, str(WATCHED / program), *filter(None, [kind]))
    watched = run(tmp_path, *REFEREE, "--", *words)
    assert watched.returncode == code, watched.stdout + watched.stderr
    assert refuted(watched.stdout) == parts
    assert "proved      record: every line of ranks 0 and 1 is intact" in watched.stdout
    # A loss that is no cross-entropy does not show what it trains on.
    of_one_value = {"norm of gradients", "updates"} if COPIES in parts else set()
    assert (
        set(not_judged(watched.stdout))
        <= {"gradients", "rows of an epoch", "rows of data ranks"} | of_one_value
    )
    assert list(tmp_path.iterdir()) == []
    if "weights" in (alone := run(tmp_path, *words)).stdout:
        assert re.findall("weights .*", watched.stdout) == re.findall(
            "weights .*", alone.stdout
        )


def test_ranks_of_one_model_copy_may_read_the_same_rows(tmp_path: Path) -> None:
    watched = run(
        tmp_path, *REFEREE, "--json", "--", *TORCHRUN, str(WATCHED / "tp_loop.py"), "same_rows"
    )
    verdict = json.loads(watched.stdout)
    statuses = {part["name"]: part["status"] for part in verdict["parts"]}
    assert statuses["rows of one model copy"] == "proved" and watched.returncode == 3, verdict
    assert [name for name, status in statuses.items() if status == "not judged"] == [
        "gradients"
    ]
    assert statuses["rows of data ranks"] == "none"


def test_trainer_of_one_process_and_under_accelerate(tmp_path: Path) -> None:
    trainer = str(WATCHED / "bert_trainer.py")
    alone = run(tmp_path, *REFEREE, "--", sys.executable, trainer)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    launch = (
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--cpu",
        "--num_processes",
        "2",
    )
    port = ("--main_process_port", "0")
    launched = run(tmp_path, *REFEREE, "--", *launch, *port, trainer)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    assert "each of 46 rows was read once in each epoch, of 2" in launched.stdout


def test_ranks_that_die_in_the_first_step(tmp_path: Path) -> None:
    program = tmp_path / "dies.py"
    text = (WATCHED / "ddp_loop.py").read_text()
    program.write_text(
        text.replace(
            "        optimizer.step()\n", "        optimizer.step()\n        sys.exit(4)\n"
        )
    )
    watched = run(
        tmp_path, *REFEREE, "--record", "record", "--", *TORCHRUN, str(program), "sampler"
    )
    assert watched.returncode == 3, watched.stdout + watched.stderr
    assert "not judged  record: the command ended with exit code 1" in watched.stdout
    again = run(tmp_path, *REFEREE, "judge", "record")
    assert (again.returncode, again.stdout) == (
        3,
        watched.stdout[watched.stdout.index("referee: ") :],
    )
