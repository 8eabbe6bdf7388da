"""Your own accelerate loop: exact loss over ranks and micro-batches, and a state that any number of ranks can resume.

    torchrun --nproc_per_node 2 examples/trainer_accelerate.py --epochs 2 --stop_after 7
    torchrun --nproc_per_node 4 examples/trainer_accelerate.py --epochs 2 --rows 2      # resumes, on other ranks

Three lines differ from a plain accelerate loop: prepare_loader and prepare_evaluation_loader replace
accelerator.prepare(loader), and exact_loss wraps the sum of the loss.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from threefold.integrations.huggingface import (
    count_targets,
    exact_loss,
    exact_mean,
    prepare_evaluation_loader,
    prepare_loader,
)

MICRO_BATCHES = 2


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


def loss_sum(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), reduction="sum")


def train(accelerator: Accelerator, asked: argparse.Namespace) -> str:
    """Trains, or saves and stops. Returns the line to print."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    training = prepare_loader(accelerator, DataLoader(Counting(0, 301), batch_size=asked.rows, shuffle=True), seed=1)
    held_out = prepare_evaluation_loader(accelerator, DataLoader(Counting(301, 37), batch_size=asked.rows))
    if Path(asked.state).exists():
        accelerator.load_state(asked.state)

    steps = 0
    for _ in range(training.state_dict()["epoch"], asked.epochs):
        batches = iter(training)
        while step := list(itertools.islice(batches, MICRO_BATCHES)):
            targets = count_targets(accelerator, [batch["labels"][:, 1:] for batch in step])
            for number, batch in enumerate(step, start=1):
                with contextlib.nullcontext() if number == len(step) else accelerator.no_sync(model):
                    accelerator.backward(exact_loss(accelerator, loss_sum(model, batch), targets))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == asked.stop_after:
                accelerator.save_state(asked.state)
                return f"stopped after {steps} steps at {training.state_dict()['position']} rows"

    sums, counts = [], []
    with torch.no_grad():
        for batch in held_out:
            sums.append(loss_sum(model, batch))
            counts.append((batch["labels"][:, 1:] != -100).sum())
    loss = exact_mean(accelerator, sums, counts)
    return f"{accelerator.num_processes} ranks, {steps} steps: evaluation loss {loss:.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch on each rank")
    parser.add_argument("--stop_after", type=int, default=0, help="steps after which to save and stop")
    parser.add_argument("--state", default="runs/accelerate")
    asked = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    accelerator.print(train(accelerator, asked))
    # Free the wrapped model before the group that it communicates through. In the other order, ranks may hang at exit.
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
