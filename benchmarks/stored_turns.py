"""Trains the default model from a disk and from a store, in turns of five steps; started by stored_data.py --turns.

Shown is the ratio of tokens/s, store to disk: of each turn's pair of steps, the median and the middle half of all.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

import threefold
from stored_data import loader_of
from threefold.config.schema import EMBEDDED_DEFAULT, Config

STEPS, WARM_TURNS = 5, 2


def main(turns: int, disk: str, store: str, cache: str) -> None:
    torch.set_num_threads(1)
    mesh, config = threefold.init_mesh(dp=2, cp=2, tp=2), Config()
    model = threefold.load_model(
        config={**EMBEDDED_DEFAULT, "vocab_size": 257}, mesh=mesh, seq_len=config.data.seq_len
    )
    step = threefold.TrainStep(model, lr=1e-3)
    loaders = {
        name: loader_of(
            source,
            Path(cache),
            global_batch=config.train.global_batch,
            dp_rank=mesh.dp_rank,
            dp_size=mesh.dp_size,
        )
        for name, source in (("disk", disk), ("store", store))
    }
    batches, ratios = {name: iter(loader) for name, loader in loaders.items()}, list[float]()
    for turn in range(turns):
        seconds = dict.fromkeys(batches, 0.0)
        for name in sorted(batches, reverse=turn % 2 == 1):
            begun = time.perf_counter()
            for _ in range(STEPS):
                step(next(batches[name]))
            seconds[name] = time.perf_counter() - begun
        if turn >= WARM_TURNS:
            ratios.append(seconds["disk"] / seconds["store"])
    if mesh.rank == 0:
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"store : disk = {middle:.3f} ({low:.3f} to {high:.3f}), in {len(ratios)} turns of {STEPS} steps"
        )
        print(loaders["store"].ahead.counts)
    for each in batches.values():
        each.close()
    mesh.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
