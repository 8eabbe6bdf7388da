"""Compares orders of samples: time to the first index, time per index, and memory.

    python benchmarks/order.py            n = 10^6, 10^7, 10^8 for all, ours to 10^12 (about 10 minutes, 6 GiB)
    python benchmarks/order.py --quick    n = 10^5, 10^6 for all, ours to 10^12

Every cell runs in its own process, as rank 3 of 8, shuffled. Times are CPU seconds of that process after its imports,
so other programs on the machine hardly matter. Memory is the peak above what the imports took (Linux). Cells of less
than a second are run three times, and the median is shown.

- first index: from a fresh start to the first index of the epoch.
- one by one: `deque(islice(iterator, 10**6), maxlen=0)` after the first index (Grain 10^5: it is slow).
- blocks: 100 blocks of 64k positions, if there is such an interface; for numpy's table, this is slicing.
- resume: from a fresh start to the next index in the middle of the epoch.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK, REPLICAS = 3, 8
BLOCK = 2**16
NUM_BLOCKS = 100
SLOW_CELL_S = 1.0


@dataclass(frozen=True)
class Peer:
    """One way to order samples. `begin(n, skip)` iterates over the rank's share without its first `skip` indices."""

    modules: tuple[str, ...]
    begin: Callable[[int, int], Iterator[int]]
    blocks: Callable[[int], Callable[[int], Any]] | None = None
    """n -> function that returns the indices of block k of the global order."""
    one_by_one: int = 10**6


def torch_sampler(n: int, skip: int) -> Iterator[int]:
    from torch.utils.data import DistributedSampler

    # It has no state: a loop skips what was read.
    return itertools.islice(iter(DistributedSampler(range(n), REPLICAS, RANK)), skip, None)


def torchdata_sampler(n: int, skip: int) -> Iterator[int]:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(range(n), REPLICAS, RANK)
    if skip:
        sampler.load_state_dict({"yielded": skip})
    return iter(sampler)


def accelerate_sampler(n: int, skip: int) -> Iterator[int]:
    from accelerate.data_loader import (
        BatchSamplerShard,
        SeedableRandomSampler,
        SkipBatchSampler,
    )
    from torch.utils.data import BatchSampler

    batch_size = 50
    batches = BatchSampler(
        SeedableRandomSampler(range(n), data_seed=0), batch_size, drop_last=False
    )
    shard = BatchSamplerShard(batches, REPLICAS, RANK)
    return itertools.chain.from_iterable(SkipBatchSampler(shard, skip // batch_size))


def grain_shuffle(n: int, skip: int) -> Iterator[int]:
    import grain

    order = grain.MapDataset.range(n).shuffle(seed=0)[RANK::REPLICAS]
    return (order[place] for place in range(skip, len(order)))


def numpy_permutation(n: int, skip: int) -> Iterator[int]:
    import numpy as np

    share = np.random.default_rng(0).permutation(n)[RANK + skip * REPLICAS :: REPLICAS]
    return itertools.chain.from_iterable(
        share[k : k + BLOCK].tolist() for k in range(0, len(share), BLOCK)
    )


def numpy_blocks(n: int) -> Callable[[int], Any]:
    import numpy as np

    order = np.random.default_rng(0).permutation(n)
    return lambda k: order[k * BLOCK : (k + 1) * BLOCK].copy()


def threefold_sampler(n: int, skip: int, order: Any = "threefold") -> Iterator[int]:
    from threefold.data.sampling.sampler import DistributedSampler

    sampler = DistributedSampler(range(n), REPLICAS, RANK, order=order)
    if skip:
        sampler.load_state_dict({**sampler.state_dict(), "position": skip * REPLICAS})
    return iter(sampler)


def threefold_torch_order(n: int, skip: int) -> Iterator[int]:
    return threefold_sampler(n, skip, order="torch")


def threefold_blocks(n: int) -> Callable[[int], Any]:
    import numpy as np

    from threefold.data.order.permutation import Permutation

    order = Permutation(n)
    return lambda k: order.at(np.arange(k * BLOCK, (k + 1) * BLOCK))


PEERS = {
    "torch DistributedSampler": Peer(("torch",), torch_sampler),
    "torchdata StatefulDistributedSampler": Peer(
        ("torchdata.stateful_dataloader.sampler",), torchdata_sampler
    ),
    "accelerate seedable + shard": Peer(("accelerate.data_loader",), accelerate_sampler),
    "Grain shuffle()[r::w]": Peer(("grain",), grain_shuffle, one_by_one=10**5),
    "numpy permutation": Peer(("numpy",), numpy_permutation, numpy_blocks),
    "threefold order=torch": Peer(("threefold.data.sampling.sampler",), threefold_torch_order),
    "threefold": Peer(
        ("threefold.data.sampling.sampler", "threefold.mesh.mesh"),
        threefold_sampler,
        threefold_blocks,
    ),
}


def measure(peer: Peer, n: int) -> dict[str, float]:
    """Returns all figures of one cell; runs in its own process."""
    imported = forget_peak()
    began = time.process_time()
    iterator = peer.begin(n, 0)
    next(iterator)
    figures = {"first_s": time.process_time() - began}

    count = min(peer.one_by_one, n // REPLICAS - 1)
    began = time.process_time()
    deque(itertools.islice(iterator, count), maxlen=0)
    figures["one_by_one_per_s"] = count / (time.process_time() - began)
    figures["memory_mib"] = (memory_kib("VmHWM") - imported) / 1024
    del iterator

    began = time.process_time()
    next(peer.begin(n, n // (2 * REPLICAS)))
    figures["resume_s"] = time.process_time() - began

    if peer.blocks is not None:
        block, num_blocks = peer.blocks(n), max(min(NUM_BLOCKS, n // BLOCK), 1)
        block(0)
        began = time.process_time()
        for k in range(num_blocks):
            block(k)
        figures["blocks_per_s"] = num_blocks * BLOCK / (time.process_time() - began)
    return figures


def forget_peak() -> int:
    """Returns resident memory now, KiB, and restarts the count of the peak."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_kib("VmRSS")


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def cell(name: str, n: int) -> dict[str, float]:
    """Returns the median figures of one peer at one n, from fresh processes."""
    runs: list[dict[str, float]] = []
    while len(runs) < 3 and (not runs or runs[0]["first_s"] < SLOW_CELL_S):
        command = [sys.executable, __file__, "--cell", name, str(n)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} at n = {n} failed:\n{done.stderr[-2000:]}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}


def missing_module(peer: Peer) -> str | None:
    """Returns the first module of a peer that cannot be imported; checked in its own process."""
    for module in peer.modules:
        if subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True
        ).returncode:
            return module
    return None


def row(name: str, n: int, figures: dict[str, float]) -> str:
    blocks = f"{figures['blocks_per_s'] / 1e6:.1f}" if "blocks_per_s" in figures else "-"
    return (
        f"| {name} | 10^{len(str(n)) - 1} | {figures['first_s'] * 1e3:,.2f} | {figures['memory_mib']:,.1f} "
        f"| {figures['one_by_one_per_s'] / 1e6:.1f} | {blocks} | {figures['resume_s'] * 1e3:,.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small n only")
    parser.add_argument(
        "--peer", action="append", choices=list(PEERS), help="only this peer (may be repeated)"
    )
    parser.add_argument("--cell", nargs=2, metavar=("PEER", "N"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        peer = PEERS[asked.cell[0]]
        for module in peer.modules:
            importlib.import_module(module)
        print(json.dumps(measure(peer, int(asked.cell[1]))))
        return

    print(
        f"Rank {RANK} of {REPLICAS}, shuffled; CPU time; Python {platform.python_version()}, {platform.machine()}\n"
    )
    print(
        "| order | n | first index, ms | memory, MiB | one by one, M/s | blocks of 64k, M/s | resume, ms |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    sizes = [10**5, 10**6] if asked.quick else [10**6, 10**7, 10**8]
    skipped = []
    for name in asked.peer or PEERS:
        module = missing_module(PEERS[name])
        if module:
            skipped.append(f"{name} is left out: {module} cannot be imported")
            continue
        for n in [*sizes, 10**9, 10**12] if name == "threefold" else sizes:
            print(row(name, n, cell(name, n)), flush=True)
    print("\nnumpy's blocks are slices of a finished table; making it is in its first index.")
    for reason in skipped:
        print(f"\n{reason}")


if __name__ == "__main__":
    main()
