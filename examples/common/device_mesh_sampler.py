"""A sampler on the dp part of torch's own 3-D DeviceMesh, and the check that dp ranks do not overlap.

torchrun --nproc-per-node 8 examples/common/device_mesh_sampler.py [--plain]

The usual form is DistributedSampler(dataset) without a mesh (`--plain`, torch's): it takes each of the 8 ranks for a
data rank, so that the tp and cp ranks of one copy of the model read other rows.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

import threefold

GLOBAL_BATCH, LENGTH = 32, 1024


def stories() -> list[dict[str, Any]]:
    """Tokenized rows of at most 1,024 tokens; of a real run, TinyStories and its tokenizer from the Hub."""
    texts = [f"Story {number}: " + "once upon a time, " * (number % 90) for number in range(1000)]
    return [{"number": number, "input_ids": list(text.encode())[:LENGTH]} for number, text in enumerate(texts)]


def unchanged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows


def main() -> None:
    dist.init_process_group("gloo")
    dp, tp, cp = (int(os.environ.get(f"{axis}_SIZE", 2)) for axis in ("DP", "TP", "CP"))
    mesh = init_device_mesh("cpu", (dp, tp, cp), mesh_dim_names=("dp", "tp", "cp"))
    rows = stories()
    if "--plain" in sys.argv:
        sampler: Any = DistributedSampler(rows, shuffle=False)  # type: ignore[arg-type, var-annotated]
    else:
        sampler = threefold.DistributedSampler(rows, mesh=mesh, shuffle=False)
    loader = DataLoader(rows, batch_size=GLOBAL_BATCH // dp, sampler=sampler, collate_fn=unchanged)  # type: ignore[arg-type, var-annotated]
    read = [row["number"] for batch in loader for row in batch]

    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (mesh.get_local_rank("dp"), read))
    if dist.get_rank() == 0:
        check(of_ranks, dp)
    dist.destroy_process_group()


def check(of_ranks: list[Any], dp: int) -> None:
    """Prints what ranks of one copy share, and what dp ranks read twice."""
    by_place = [[read for place, read in of_ranks if place == number] for number in range(dp)]
    alike = all(read == copies[0] for copies in by_place for read in copies)
    print(f"the tp and cp ranks of a dp rank read {'the same rows' if alike else 'different rows'}")
    sets = [set(copies[0]) for copies in by_place]
    overlap = sum(len(a & b) for number, a in enumerate(sets) for b in sets[:number])
    print(f"dp ranks share {overlap} rows, and read {len(set().union(*sets))} of 1,000")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
