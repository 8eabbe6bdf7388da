"""Runs of the real command for tests: small model, small corpus, nothing outside the test's folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ranks.spawn import run_ranks
from threefold.__main__ import main

CONFIG = """
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
           num_key_value_heads: 2, initializer_range: 0.2}
data: {source: corpus, seq_len: 32}
train: {steps: 12, global_batch: 8}
log: {every: 1, sample_tokens: 0}
"""


def prepare(folder: Path) -> None:
    """A corpus and a config in `folder`, from which `command` runs."""
    (folder / "corpus").mkdir()
    for number in range(4):
        words = " ".join(f"word{(number * 7 + index * index) % 97}" for index in range(900))
        (folder / "corpus" / f"part-{number}.txt").write_text(words + "\n")
    (folder / "config.yaml").write_text(CONFIG)


def environment(folder: Path) -> dict[str, str]:
    """This environment with caches inside `folder` and no launcher's variables."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DP_SIZE", "CP_SIZE", "TP_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**kept, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


def command(folder: Path, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """`threefold ...` run to its end in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "threefold", *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def forked_command(folder: Path, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """As `command`, for runs of one process: forked from the server of the tests' ranks, which has torch imported."""
    code, out, err = run_ranks(_command_here, 1, str(folder), arguments, timeout_s=timeout_s)[0]
    return subprocess.CompletedProcess(list(arguments), code, out, err)


def _command_here(folder: str, arguments: tuple[str, ...]) -> tuple[int, str, str]:
    os.environ.update(environment(Path(folder)))
    os.chdir(folder)
    sys.argv = ["threefold", *arguments]
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        code: Any = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def stop_after(folder: Path, step: int, *arguments: str, number: int = signal.SIGTERM) -> subprocess.Popen[str]:
    """`threefold ...`, sent a signal as soon as it has logged `step`; returned when it has ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "threefold", *arguments],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step") and int(line.split()[1].split("/")[0]) >= step:
            break
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    process.output = "".join(lines) + rest  # type: ignore[attr-defined]
    return process


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """The last line of each step of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def curve(run: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a run, in order."""
    return [(line["loss"], line["grad_norm"]) for _, line in sorted(metrics(run).items())]
