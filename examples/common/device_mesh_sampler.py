"""A sampler on the dp part of torch's own 3-D DeviceMesh, and the check that dp ranks do not overlap.

torchrun --nproc-per-node 8 examples/common/device_mesh_sampler.py

The usual forms are torch's: DistributedSampler(rows), which takes all 8 ranks for data ranks, so that the tp and cp
ranks of one copy of the model read other rows; and the same with the dp part's size and rank, which gives a row twice
where the rows do not divide. TinyStories and the tokenizer come from the Hub by name; stand_ins.py makes small ones.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from datasets import disable_progress_bars, load_dataset
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoTokenizer

import threefold

GLOBAL_BATCH, LENGTH = 32, 1024


def stories() -> Any:
    """The first stories as tokens, at most 1,024 of each; rows keep their own lengths."""
    tokenizer = AutoTokenizer.from_pretrained("HuggingFaceTB/SmolLM2-1.7B")
    rows = load_dataset("roneneldan/TinyStories", split="train[:1001]")

    def tokenize(row: dict[str, Any], number: int) -> dict[str, Any]:
        ids = tokenizer(row["text"], truncation=True, max_length=LENGTH)["input_ids"]
        return {"number": number, "input_ids": ids}

    # In memory: eight ranks would write one cache file.
    return rows.map(tokenize, with_indices=True, remove_columns=["text"], keep_in_memory=True)


def unchanged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return rows


def main() -> None:
    dist.init_process_group("gloo")
    disable_progress_bars()
    dp, tp, cp = (int(os.environ.get(f"{axis}_SIZE", 2)) for axis in ("DP", "TP", "CP"))
    mesh = init_device_mesh("cpu", (dp, tp, cp), mesh_dim_names=("dp", "tp", "cp"))
    rows = stories()
    dp_rank = mesh.get_local_rank("dp")
    forms: dict[str, Any] = {
        "torch's DistributedSampler(rows)": DistributedSampler(rows, shuffle=False),
        "torch's, of the dp part": DistributedSampler(rows, dp, dp_rank, shuffle=False),
        "threefold.DistributedSampler(rows, mesh=mesh)": threefold.DistributedSampler(
            rows, mesh=mesh, shuffle=False, tail="exact"
        ),
    }
    for name, sampler in forms.items():
        loader = DataLoader(rows, batch_size=GLOBAL_BATCH // dp, sampler=sampler, collate_fn=unchanged)
        read = [row for batch in loader for row in batch]
        assert max(len(row["input_ids"]) for row in read) <= LENGTH
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (dp_rank, [row["number"] for row in read]))
        if dist.get_rank() == 0:
            print(f"{name}: {overlap(of_ranks, dp)}", flush=True)
    dist.destroy_process_group()


def overlap(of_ranks: list[Any], dp: int) -> str:
    """What the ranks of one copy of the model share, and what dp ranks read twice."""
    copies = [[numbers for place, numbers in of_ranks if place == dp_rank] for dp_rank in range(dp)]
    alike = all(numbers == ranks[0] for ranks in copies for numbers in ranks)
    once = [number for ranks in copies for number in ranks[0]]
    twice = len(once) - len(set(once))
    return f"tp and cp ranks read {'the same' if alike else 'other'} rows; {len(set(once))} read, {twice} of them twice"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
