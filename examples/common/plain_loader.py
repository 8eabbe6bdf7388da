"""DDP with a plain DataLoader, in the forms in which it is written, and the rows that are read in an epoch.

torchrun --nproc-per-node 2 examples/common/plain_loader.py

DDP averages gradients; it divides no data. Without a sampler all ranks read the same rows, and with a seed of their own
they draw from all of them: some rows are read twice, others never. `threefold.distribute` around the same loader shares
each batch among the ranks, so that a step holds the rows that it holds on one process.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import threefold

ROWS, BATCH = 256, 32


def loader(*, seed: int | None = None) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0)))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(data, batch_size=BATCH, shuffle=seed is not None, generator=generator, num_workers=2)


def train(batches: Any) -> list[int]:
    """An epoch; returns the numbers of the rows that this rank read."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read: list[int] = []
    for numbers, inputs in batches:
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        read += numbers.tolist()
    return read


def main() -> None:
    threefold.init_mesh()
    forms = {
        "without shuffling": lambda: loader(),
        "shuffled, all ranks with one seed": lambda: loader(seed=0),
        "shuffled, each rank with its own seed": lambda: loader(seed=dist.get_rank()),
        "threefold.distribute(loader)": lambda: threefold.distribute(loader(seed=0)),
    }
    for name, batches in forms.items():
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, train(batches()))
        if dist.get_rank() == 0:
            times = Counter(number for read in of_ranks for number in read)
            twice = sum(count > 1 for count in times.values())
            first = {number for read in of_ranks for number in read[: len(read) * BATCH // ROWS]}
            print(f"{name}: {len(times)} of {ROWS} rows, {twice} of them twice; {len(first)} rows in the first step")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
