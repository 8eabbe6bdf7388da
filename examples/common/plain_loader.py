"""DDP with a plain DataLoader, in the forms in which it is written, and the rows that are read in an epoch.

torchrun --nproc-per-node 2 examples/common/plain_loader.py [FORM]

With FORM, as it is printed, that one alone is run.
DDP averages gradients; it divides no data. Without a sampler all ranks read the same rows, and with a seed of its own
each still reads all of them, in another order. `threefold.distribute` around the same loader shares each batch among
the ranks, so that a step holds the rows that it holds on one process. It keeps the loader's own sampler (weighted
classes), which a DistributedSampler in its place would replace.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset, WeightedRandomSampler

import threefold

ROWS, BATCH = 256, 32
# One row in 16 is of the rare class.
RARE = torch.arange(ROWS) % 16 == 0
DATA = TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0)))


def loader(*, seed: int | None = None, sampler: Sampler[int] | None = None) -> DataLoader[Any]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    shuffle = seed is not None and sampler is None
    return DataLoader(
        DATA,
        batch_size=BATCH,
        shuffle=shuffle,
        sampler=sampler,
        generator=generator,
        num_workers=4,
        pin_memory=True,
    )


def weighted() -> WeightedRandomSampler:
    """Draws the rare class as often as the other."""
    weights = torch.where(RARE, 1 / RARE.sum(), 1 / (~RARE).sum())
    return WeightedRandomSampler(weights.tolist(), ROWS, generator=torch.Generator().manual_seed(0))


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


def read_on_all_ranks(batches: Any) -> list[list[int]]:
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, train(batches))
    return of_ranks


def main() -> None:
    # Each of the loaders would warn that there is no GPU to pin memory for, or that a small machine has few cores.
    warnings.filterwarnings("ignore", module="torch.utils.data.dataloader")
    threefold.init_mesh()
    forms: dict[str, Callable[[], Any]] = {
        "without shuffling": loader,
        "shuffled, all ranks with one seed": lambda: loader(seed=0),
        "shuffled, each rank with its own seed": lambda: loader(seed=dist.get_rank()),
        "threefold.distribute(loader)": lambda: threefold.distribute(loader(seed=0)),
    }
    classes: dict[str, Callable[[], Any]] = {
        "weighted classes": lambda: loader(sampler=weighted()),
        "weighted classes, then DistributedSampler": lambda: loader(sampler=DistributedSampler(DATA)),
        "threefold.distribute(weighted classes)": lambda: threefold.distribute(loader(sampler=weighted())),
    }
    chosen = sys.argv[1:] or [*forms, *classes]
    for name, make in ((name, forms[name]) for name in forms if name in chosen):
        of_ranks = read_on_all_ranks(make())
        times = Counter(number for numbers in of_ranks for number in numbers)
        twice = sum(count > 1 for count in times.values())
        first = {number for numbers in of_ranks for number in numbers[: len(numbers) * BATCH // ROWS]}
        if dist.get_rank() == 0:
            print(f"{name}: {len(times)} of {ROWS} rows, {twice} of them twice; {len(first)} rows in the first step")
    for name, make in ((name, classes[name]) for name in classes if name in chosen):
        of_ranks = read_on_all_ranks(make())
        read = [number for numbers in of_ranks for number in numbers]
        rare = int(RARE[read].sum())
        alike = all(numbers == of_ranks[0] for numbers in of_ranks)
        if dist.get_rank() == 0:
            ranks = "the same rows on all ranks" if alike else "other rows on each rank"
            print(f"{name}: {rare / len(read):.0%} of the {len(read)} rows read are rare; {ranks}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
