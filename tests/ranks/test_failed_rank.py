"""A rank that fails ends the run at once, although destroying the process groups waits for ranks that never come."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranks.runs import prepare

pytestmark = [pytest.mark.ranks, pytest.mark.timing]
# Rank 1 runs out of memory in step 3, and the groups are destroyed as NCCL does it: when all ranks of the node do.
PLANT = """
import os, sys, time

def plant():
    step = sys.modules.get("threefold.training.step")
    if step is None:
        return
    import torch
    import torch.distributed as dist

    plain = step.TrainStep.run

    def run(self, *args, **keys):
        self.calls = getattr(self, "calls", 0) + 1
        if os.environ.get("RANK") == "1" and self.calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has ...")
        return plain(self, *args, **keys)

    step.TrainStep.run = run
    dist.destroy_process_group = lambda *args, **keys: time.sleep(1000)

os.register_at_fork(after_in_child=plant)
"""


def test_memory_that_runs_out_on_one_rank_ends_all_at_once(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    keys = [
        "--mesh.dp",
        "2",
        "--train.steps",
        "50",
        "--train.timeout_s",
        "600",
        "--log.dir",
        "run",
    ]
    command = [sys.executable, "-m", "threefold", "train", "config.yaml", *keys]
    # Far less than the watchdog's limit, by which alone it ended before.
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1, done.stderr
    assert (
        done.stderr.count(
            "rank 1 has no memory left: CUDA out of memory. Tried to allocate 2.00 GiB"
        )
        == 1
    )
    assert "no progress" not in done.stderr
