"""Runs of the real command for tests: small model, small corpus, nothing outside the test's folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ranks import warm

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
    launcher = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "DP_SIZE",
        "CP_SIZE",
        "TP_SIZE",
    )
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    # What was admitted in one test is admitted in all of them.
    admitted, cache = (
        folder / "cache/threefold/admission",
        os.environ.get("XDG_CACHE_HOME", folder / "shared"),
    )
    shared = Path(cache) / "threefold/admission"
    if not admitted.is_symlink():
        admitted.parent.mkdir(parents=True, exist_ok=True)
        shared.mkdir(parents=True, exist_ok=True)
        admitted.symlink_to(shared)
    return {
        **kept,
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TERM": "dumb",
    }


def command(
    folder: Path,
    *arguments: str,
    timeout_s: float = 300,
    first: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`threefold ...` run to its end in `folder`, forked from the server of the tests' ranks.

    Args:
        first: a function that its process calls before.
    """
    return run(
        warm.threefold, folder, arguments, environment(folder), timeout_s=timeout_s, first=first
    )


def cold_command(
    folder: Path, *arguments: str, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """As `command`, started by a new interpreter: where the start itself is what is tested."""
    return subprocess.run(
        [sys.executable, "-m", "threefold", *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def torchrun(
    folder: Path,
    num_ranks: int,
    script: str,
    *arguments: str,
    timeout_s: float = 300,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """`torchrun --standalone --nproc-per-node NUM_RANKS SCRIPT ARGUMENTS...` in `folder`.

    Its agent and its ranks are forked from that server.

    Args:
        variables: environment variables beside those of this process.
    """
    warm_ranks = ("--standalone", "--start-method", "forkserver", "--run-path")
    words = ("--nproc-per-node", str(num_ranks), *warm_ranks, str(folder / script), *arguments)
    return run(
        warm.torchrun, folder, words, {**environment(folder), **variables}, timeout_s=timeout_s
    )


def script(
    folder: Path, path: str, *arguments: str, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """`python PATH ARGUMENTS...` in `folder`, forked from that server."""
    return run(
        warm.script,
        folder,
        (str(folder / path), *arguments),
        environment(folder),
        timeout_s=timeout_s,
    )


def run(
    main: Callable[[], Any],
    folder: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    timeout_s: float = 300,
    first: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A program of `ranks.warm` run to its end."""
    with warm.Running(main, folder, arguments, environ, first=first) as running:
        code = running.wait(timeout_s)
        return subprocess.CompletedProcess(list(arguments), code, running.out(), running.err())


def stop_after(
    folder: Path, step: int, *arguments: str, number: int = signal.SIGTERM
) -> subprocess.CompletedProcess[str]:
    """`threefold ...`, sent a signal as soon as it has logged `step`; both outputs, when it has ended, are `stdout`."""
    with warm.Running(
        warm.threefold, folder, arguments, environment(folder), one_output=True
    ) as running:

        def logged() -> bool:
            steps = [
                line.split()[1]
                for line in running.out().split("\n")[:-1]
                if line.startswith("step")
            ]
            return any(int(each.split("/")[0]) >= step for each in steps)

        running.wait_for(logged, f"step {step}", 120)
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.process, number)
        code = running.wait(60)
        return subprocess.CompletedProcess(list(arguments), code, running.out(), "")


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """The last line of each step of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def curve(run: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a run, in order."""
    return [(line["loss"], line["grad_norm"]) for _, line in sorted(metrics(run).items())]
