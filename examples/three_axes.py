"""A language model on data x context x tensor ranks from Python, and the check that the ranks read what they should.

torchrun --nproc-per-node 8 examples/three_axes.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import threefold

LENGTH, ROWS, STEPS = 64, 16, 20
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


class Windows:
    """This file's bytes in windows, each with the byte that follows; `number` says which window it is."""

    def __init__(self) -> None:
        self.text = torch.tensor(list(Path(__file__).read_bytes()))

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, number: int) -> dict:
        window = self.text[number * LENGTH : (number + 1) * LENGTH + 1]
        return {"input_ids": window[:-1], "labels": window[1:], "number": number}


def main(dp: int = 2, cp: int = 2, tp: int = 2) -> None:
    mesh = threefold.init_mesh(dp=dp, cp=cp, tp=tp)
    config = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = threefold.load_model(config=config, mesh=mesh, seq_len=LENGTH)
    step = threefold.TrainStep(model, lr=1e-2)
    loader = threefold.distribute(DataLoader(Windows(), batch_size=ROWS // mesh.dp_size, shuffle=True, drop_last=True))
    read, loss = [], 0.0
    while len(read) < STEPS:
        for batch in loader:
            read.append(batch.pop("number").tolist())
            loss, norm = step(batch)
            if mesh.rank == 0 and (len(read) - 1) % 5 == 0:
                print(f"step {len(read)}: loss {loss:.4f}, gradient norm {norm:.3f}", flush=True)

    said: list = [(mesh.dp_rank, read, loss)]
    if mesh.world_size > 1:
        said = [None] * mesh.world_size
        dist.all_gather_object(said, (mesh.dp_rank, read, loss))
    by_dp_rank = {dp_rank: rows for dp_rank, rows, _ in said}
    assert all(rows == by_dp_rank[dp_rank] for dp_rank, rows, _ in said), "cp and tp ranks of a dp rank disagree"
    for rows_of_a_step in zip(*by_dp_rank.values(), strict=True):
        together = [number for rows in rows_of_a_step for number in rows]
        assert len(set(together)) == len(together) == ROWS, "two dp ranks have read the same row"
    assert len({loss for _, _, loss in said}) == 1, "ranks disagree about the loss"
    if mesh.rank == 0:
        print(f"{mesh.topology}: dp ranks read distinct rows, cp and tp ranks the same; loss {loss:.6f} on every rank")
    mesh.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
