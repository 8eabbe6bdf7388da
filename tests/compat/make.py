"""Writes the fixtures of `tests/compat/v0.1.0`: what version 0.1.0 of Threefold left behind.

They were written by the code of version 0.1.0, commit 6264261. To write them anew (only if a case is added: what is
there stands for what users have), check that commit out and let its code be the one that is imported:

    git worktree add ../threefold-0.1.0 6264261
    PYTHONPATH=../threefold-0.1.0/src:tests .venv/bin/python tests/compat/make.py

In the folder: the corpus and the configs; a store; one folder for each training, stopped after step 4 of 8; and
`expected.json`, the losses and gradient norms of the same trainings without a stop, and what was printed of the rows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compat import cases

ROOT = Path(__file__).parents[2]

# Asks the run to stop so that step 4 is its last: two steps before where ranks have to agree on it.
STOPPED = """
import os, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = [0]
def ask(*ignored):
    steps[0] += 1
    if steps[0] == (2 if os.environ["WORLD_SIZE"] == "2" else 4) and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGTERM)
register_optimizer_step_post_hook(ask)
from threefold.__main__ import main
main()
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True)


def threefold(folder: Path, *arguments: str) -> str:
    done = run(folder, "-m", "threefold", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def curve(run: Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line["loss"], line["grad_norm"]] for line in lines if "loss" in line]


def trained(folder: Path, name: str) -> dict[str, Any]:
    """Trains to the end elsewhere, and to the stop in `folder`."""
    arguments = list(cases.arguments(name))
    threefold(folder, *arguments[:-1], f"whole-{name}")
    (folder / "stopped.py").write_text(STOPPED)
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cases.RANKS[name]}")
    done = run(folder, *torchrun, "stopped.py", *arguments)
    found = sorted(path.name for path in (folder / name / "checkpoints").iterdir())
    assert found == [f"step-{cases.STOPPED_AT:08d}"], (found, done.stdout, done.stderr)
    whole = curve(folder / f"whole-{name}")
    assert curve(folder / name) == whole[: cases.STOPPED_AT], (curve(folder / name), whole)
    shown = threefold(folder, "data", "order", name, "--step", "3", "--show")
    return {"curve": whole, "shown": shown, "audit": threefold(folder, "data", "audit", name, "--contents")}


def with_trainer(folder: Path, name: str) -> dict[str, Any]:
    from ranks.spawn import run_ranks

    num_ranks, sizes = cases.TRAINER[name]
    whole = run_ranks(_with_trainer, num_ranks, str(folder / f"whole-{name}"), sizes, False)[0]
    stopped = run_ranks(_with_trainer, num_ranks, str(folder / name), sizes, True)[0]
    assert stopped == whole[: cases.STOPPED_AT]
    return {"curve": whole, "audit": threefold(folder, "data", "audit", name)}


def _with_trainer(folder: str, sizes: dict[str, int], stop: bool) -> list[tuple[float, float]]:
    return cases.train_with_trainer(folder, sizes, stop=stop)


def main() -> None:
    import threefold as package

    code = Path(str(package.__file__))
    assert package.__version__ == cases.VERSION and not code.is_relative_to(ROOT), f"{code} is not that version"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "made"
        folder.mkdir()
        cases.prepare(folder)
        made = threefold(folder, *cases.PREPARE)
        expected: dict[str, Any] = {"prepared": made}
        for name in cases.TRAINED:
            expected[name] = trained(folder, name)
        for name in cases.TRAINER:
            expected[name] = with_trainer(folder, name)
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        shutil.rmtree(cases.KEPT, ignore_errors=True)
        # A log names processes and machines; the cache, and the runs without a stop, are made by the tests.
        left_out = shutil.ignore_patterns("whole-*", "*-begun", "cache", "logs", "stopped.py", "run.lock")
        shutil.copytree(folder, cases.KEPT, ignore=left_out)


if __name__ == "__main__":
    main()
