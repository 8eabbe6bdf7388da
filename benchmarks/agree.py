"""Measures what ranks pay to compare a step before they make it: `Mesh.agree` on gloo ranks of this machine.

    python benchmarks/agree.py                  2, 8 and 32 ranks, one row of docs/plan.md each
    python benchmarks/agree.py --ranks 4 --calls 500

A call is that of a training step: the count of its targets, and one gather of six integers. On data ranks nothing is
digested; cp and tp ranks digest their rows too, 8 x 1,024 tokens here. The time is that of rank 0, from the moment at
which all ranks are there; the row says how many processes wanted a core when it began.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

_WARM_UP = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--calls", type=int, default=200)
    asked = parser.parse_args()
    print(
        "| ranks | data ranks: median, 95 of 100 | tp ranks: median, 95 of 100 | cores, load before |"
    )
    print("|---|---|---|---|")
    for ranks in asked.ranks:
        load, cells = os.getloadavg()[0], []
        for axis in ("dp", "tp"):
            times = sorted(_times(ranks, axis, asked.calls))
            cells.append(
                f"{statistics.median(times):.2f} ms, {times[int(0.95 * len(times))]:.2f} ms"
            )
        print(f"| {ranks} | {' | '.join(cells)} | {os.cpu_count()}, {load:.0f} |", flush=True)


def _times(ranks: int, axis: str, calls: int) -> list[float]:
    """Milliseconds of each call."""
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        __file__,
        axis,
        str(calls),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def measure(axis: str, calls: int) -> None:
    """On each rank; rank 0 prints."""
    import torch

    from threefold.mesh.environment import current
    from threefold.mesh.mesh import init_mesh

    sizes = {"dp": 1, "tp": 1, axis: current().world_size}
    mesh = init_mesh(dp=sizes["dp"], tp=sizes["tp"], device="cpu")
    rows = torch.arange(8 * 1024).reshape(8, 1024)
    batch = {"input_ids": rows, "labels": rows}
    times = []
    for number in range(_WARM_UP + calls):
        mesh.barrier()
        begun = time.perf_counter()
        mesh.agree("step", number + 1, lambda: ([batch], int((rows != -100).sum())))
        times.append(1000 * (time.perf_counter() - begun))
    if mesh.rank == 0:
        print(json.dumps(times[_WARM_UP:]))
    mesh.close()


if __name__ == "__main__":
    if os.environ.get("LOCAL_RANK") is not None:
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        main()
