"""A rank that fails ends the run at once, although destroying the process groups waits for ranks that never come."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.faults import planted
from ranks.runs import prepare

pytestmark = [pytest.mark.ranks, pytest.mark.timing]


def test_memory_that_runs_out_on_one_rank_ends_all_at_once(tmp_path: Path) -> None:
    prepare(tmp_path)
    # Far more than `planted` waits: by the watchdog's limit alone it ended before.
    keys = ("--train.steps", "50", "--train.timeout_s", "600", "--log.dir", "run")
    done = planted(tmp_path, "memory_used_up_while_groups_wait", *keys, sizes=(4, 1))
    assert done.returncode == 1, done.stderr
    what = "rank 2 has no memory left: CUDA out of memory. Tried to allocate 22.00 MiB"
    assert done.stderr.count(what) == 1
    assert "no progress" not in done.stderr
