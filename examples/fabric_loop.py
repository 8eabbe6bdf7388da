"""A loop of Lightning Fabric with our loader: every row once, the exact loss, and a stop that other ranks resume.

    torchrun --nproc_per_node 2 examples/fabric_loop.py --stop_after 7
    torchrun --nproc_per_node 4 examples/fabric_loop.py --rows 2      # resumes, on other ranks
    python examples/fabric_loop.py --rows 8 --state runs/alone

Three things differ from a plain Fabric loop: threefold.init_mesh comes first, threefold.distribute replaces
fabric.setup_dataloaders, and the loss is a sum over a step's targets / their number on all ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import threefold


class Counting(torch.utils.data.Dataset):
    """Rows that count up, each from its own number. The first `index % 5` positions are not targets."""

    def __init__(self, first: int, rows: int) -> None:
        self.first, self.rows = first, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(32) + 7 * (self.first + index)) % 256
        labels = row.clone()
        labels[: index % 5] = -100
        return {"input_ids": row, "labels": labels}


def sum_and_count(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()


def train(fabric: Fabric, asked: argparse.Namespace) -> str:
    """Trains, or saves and stops. Returns the line to print."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)
    with fabric.init_module():
        model = LlamaForCausalLM(config)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    training = threefold.distribute(DataLoader(Counting(0, 301), asked.rows, shuffle=True), seed=1, tail="exact")
    held_out = threefold.distribute(DataLoader(Counting(301, 37), asked.rows), tail="exact")
    state = {"model": model, "optimizer": optimizer, "place": {}}
    if Path(asked.state).exists():
        fabric.load(asked.state, state)
        training.load_state_dict(state["place"])

    steps = 0
    for _ in range(training.state_dict()["epoch"], asked.epochs):
        for batch in training:
            loss, count = sum_and_count(model, fabric.to_device(batch))
            # Fabric averages gradients over the ranks.
            targets = fabric.all_reduce(count, reduce_op="sum")
            fabric.backward(loss * fabric.world_size / targets)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == asked.stop_after:
                fabric.save(asked.state, {**state, "place": training.state_dict()})
                return f"stopped after {steps} steps at {training.state_dict()['position']} rows"

    with torch.no_grad():
        parts = [torch.stack(sum_and_count(model, fabric.to_device(batch))).double() for batch in held_out]
    total, count = fabric.all_reduce(torch.stack(parts).sum(0), reduce_op="sum").tolist()
    return f"{fabric.world_size} ranks, {steps} steps: evaluation loss {total / count:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch on each rank")
    parser.add_argument("--stop_after", type=int, default=0, help="steps after which to save and stop")
    parser.add_argument("--state", default="runs/fabric.ckpt")
    asked = parser.parse_args()
    mesh = threefold.init_mesh()  # joins the ranks that torchrun started; Fabric finds them joined
    ranks = mesh.topology.world_size
    cuda = torch.cuda.is_available()
    fabric = Fabric(accelerator="cuda" if cuda else "cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    fabric.print(train(fabric, asked))
    mesh.close()


if __name__ == "__main__":
    main()
