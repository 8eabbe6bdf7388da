"""Measures the audit's share of the default run's step time, inside that run.

    python benchmarks/audit.py                          the default run: 8 ranks on a CPU, 40 steps (about 2 minutes)
    python benchmarks/audit.py --ranks 1 -- --mesh.dp 1 --data.seq_len 1024     with arguments of `threefold train`

Every rank times each call of the audit: CPU time of the calling thread, and wall-clock time. The CPU share is what the
audit takes from the step if ranks share cores. The wall-clock share also includes the time that `check` waits for ranks
that are behind; without the audit, the next collective would wait for them instead. Comparing two runs, with and
without the audit, would not work: they would differ by less than they vary.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOAL = 0.01
_WARM_UP_STEPS = 10


def main() -> int:
    if "THREEFOLD_AUDIT_TIMES" in os.environ:
        return _run_timed(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "train", nargs="*", help="further arguments of `threefold train`, after --"
    )
    asked = parser.parse_args()
    train = asked.train or ["--mesh.dp", "2", "--mesh.cp", "2", "--mesh.tp", "2"]
    with tempfile.TemporaryDirectory() as folder:
        times, step_s = _measure(Path(folder), asked.ranks, asked.steps, train)
    return _report(times, step_s, asked.ranks, train)


def _measure(
    folder: Path, ranks: int, steps: int, train: list[str]
) -> tuple[list[dict[str, Any]], float]:
    """(times of each rank, seconds per step) of one run."""
    common = [
        "--log.dir",
        str(folder / "run"),
        "--train.steps",
        str(steps),
        "--log.sample_tokens",
        "0",
    ]
    subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nproc_per_node={ranks}",
                __file__,
            ),
            *(*common, *train),
        ],
        env={**os.environ, "THREEFOLD_AUDIT_TIMES": str(folder), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    times = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return times, statistics.median(
        line["step_time_s"] for line in lines if line["step"] > _WARM_UP_STEPS
    )


def _run_timed(train: list[str]) -> int:
    """Runs one rank, with a clock around the audit's calls."""
    from threefold.__main__ import main as command
    from threefold.audit.compare import Audit
    from threefold.training.row_losses import KeptRows

    spent: dict[str, list[tuple[float, float]]] = {"observe": [], "check": [], "after": []}

    def timed(cls: type, name: str) -> None:
        call: Callable[..., None] = getattr(cls, name)

        def around(self: Any, *arguments: Any, **options: Any) -> None:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                call(self, *arguments, **options)
            finally:
                spent[name].append((time.perf_counter() - wall, time.thread_time() - cpu))

        setattr(cls, name, around)

    timed(Audit, "observe")
    timed(Audit, "check")
    timed(KeptRows, "after")
    sys.argv = ["threefold", "train", *train]
    try:
        command()
    finally:
        path = Path(os.environ["THREEFOLD_AUDIT_TIMES"]) / f"rank-{os.environ['RANK']}.json"
        path.write_text(json.dumps(spent))
    return 0


def _report(times: list[dict[str, Any]], step_s: float, ranks: int, train: list[str]) -> int:
    num_steps = len(times[0]["observe"])
    print(
        f"\nthreefold train {' '.join(train)}: {ranks} ranks, {num_steps} steps, {step_s * 1e3:.1f} ms a step (median)"
    )
    print(f"{'a rank, a step':<32}{'CPU, ms':>10}{'clock, ms':>12}")
    totals = [0.0, 0.0]
    parts = {
        "observe": "hash and compare each row",
        "check": "send and compare digests",
        "after": "keep losses of rows",
    }
    for name, what in parts.items():
        # The first calls build tables, and read files into memory that the loader would read anyway.
        calls = [rank[name][1:] for rank in times]
        wall, cpu = (
            statistics.mean(_per_step(rank, column, num_steps) for rank in calls)
            for column in (0, 1)
        )
        print(f"{what:<32}{cpu * 1e3:>10.3f}{wall * 1e3:>12.3f}")
        totals = [totals[0] + cpu, totals[1] + wall]
    cores = min(ranks, len(os.sched_getaffinity(0)))
    share = totals[0] * ranks / cores / step_s
    print(f"{'together':<32}{totals[0] * 1e3:>10.3f}{totals[1] * 1e3:>12.3f}")
    print(
        f"share of the step by CPU: {share:.2%} ({ranks} ranks on {cores} cores; goal {GOAL:.0%} at most)"
    )
    print(
        f"share of the step by the clock, waiting for other ranks included: {totals[1] / step_s:.2%}"
    )
    return 0 if share <= GOAL else 1


def _per_step(calls: list[list[float]], column: int, num_steps: int) -> float:
    return sum(call[column] for call in calls) / max(1, num_steps - 1)


if __name__ == "__main__":
    sys.exit(main())
