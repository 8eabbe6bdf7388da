"""Loops of accelerate's on real ranks: one process' losses, every sample once, a state for any ranks."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from ranks.huggingface_cases import (
    Reviews,
    Sentences,
    causal_model,
    classifier,
    join_launcher,
    mean_by_hand,
    on_ranks,
)
from ranks.spawn import run_ranks
from threefold.data.order.permutation import Permutation

SIZE, GLOBAL_BATCH = 27, 8


class NumberedSentences(Sentences):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "number": torch.tensor(index)}


def summed(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return F.cross_entropy(
        logits.flatten(0, 1),
        batch["labels"][:, 1:].flatten(),
        ignore_index=-100,
        reduction="sum",
    )


def loop(
    folder: str, batch_size: int, epochs: int, stop_after: int, resume: bool
) -> tuple[list[float], list[int]]:
    """(loss of each step, samples that this rank read); with stop_after it saves there and ends."""
    from accelerate import Accelerator

    from threefold.integrations.huggingface import count_targets, exact_loss, prepare_loader

    join_launcher()
    accelerator = Accelerator(cpu=True)
    model = causal_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    loader = prepare_loader(
        accelerator,
        DataLoader(NumberedSentences(SIZE), batch_size=batch_size, shuffle=True),
        seed=3,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    if resume:
        accelerator.load_state(folder)
    losses, read, steps = [], [], 0
    for _ in range(loader.state_dict()["epoch"], epochs):
        batches = iter(loader)
        while micro_batches := list(itertools.islice(batches, 2)):
            targets = count_targets(
                accelerator, [batch["labels"][:, 1:] for batch in micro_batches]
            )
            of_step = torch.zeros(())
            for number, batch in enumerate(micro_batches, start=1):
                alone = (
                    contextlib.nullcontext()
                    if number == len(micro_batches)
                    else accelerator.no_sync(model)
                )
                with alone:
                    loss_sum = summed(model, batch)
                    accelerator.backward(exact_loss(accelerator, loss_sum, targets))
                of_step += loss_sum.detach()
                read += batch["number"][(batch["labels"] != -100).any(1)].tolist()
            optimizer.step()
            optimizer.zero_grad()
            losses.append((accelerator.reduce(of_step) / targets).item())
            steps += 1
            if steps == stop_after:
                accelerator.save_state(folder)
                return losses, read
    return losses, read


def by_hand(epochs: int) -> list[float]:
    model, rows = causal_model(), Sentences(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for epoch in range(epochs):
        order = Permutation(SIZE, seed=3, epoch=epoch).at(np.arange(SIZE))
        for first in range(0, SIZE, GLOBAL_BATCH):
            batch = [rows[int(index)] for index in order[first : first + GLOBAL_BATCH]]
            whole = {
                name: torch.stack([row[name] for row in batch])
                for name in ("input_ids", "labels")
            }
            loss = summed(model, whole) / (whole["labels"][:, 1:] != -100).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("num_ranks", "batch_size"), [(1, 4), pytest.param(4, 1, marks=pytest.mark.examples)]
)
def test_a_loop_follows_one_process_and_goes_on_on_other_ranks(
    num_ranks: int, batch_size: int, tmp_path: Path
) -> None:
    wanted = by_hand(2)
    first = run_ranks(loop, 2, str(tmp_path), 2, 2, 3, False)
    rest = on_ranks(loop, num_ranks, str(tmp_path), batch_size, 2, 0, True)
    losses = first[0][0] + rest[0][0]
    assert losses == pytest.approx(wanted, abs=1e-5)
    # A sample without targets cannot be told from a row that keeps a rank in step.
    read = sorted(index for _, own in (*first, *rest) for index in own)
    assert read == sorted([index for index in range(SIZE) if index % 6] * 2)


def evaluate(size: int, batch_size: int) -> tuple[float, Any, Any]:
    from accelerate import Accelerator

    from threefold.integrations.huggingface import exact_mean, prepare_evaluation_loader

    join_launcher()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(classifier().eval())
    loader = prepare_evaluation_loader(
        accelerator, DataLoader(Reviews(size), batch_size=batch_size)
    )
    assert accelerator.prepare(loader) is loader
    sums, counts, predictions, labels = [], [], [], []
    with torch.no_grad():
        for batch in loader:
            logits = model(input_ids=batch["input_ids"]).logits
            sums.append(F.cross_entropy(logits, batch["labels"], reduction="sum"))
            counts.append((batch["labels"] != -100).sum())
            gathered = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            predictions += gathered[0].tolist()
            labels += gathered[1].tolist()
    return exact_mean(accelerator, sums, counts), predictions, labels


def evaluate_all() -> list[tuple[float, Any, Any]]:
    return [evaluate(size, batch_size) for size, batch_size in EVALUATED]


EVALUATED = ((7, 2), (5, 4), (9, 1), (1, 2), (8, 2))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_evaluation_counts_every_row_once_in_order(num_ranks: int) -> None:
    model = classifier().eval()
    for of_rank in run_ranks(evaluate_all, num_ranks):
        for (size, _), (found, predictions, labels) in zip(EVALUATED, of_rank, strict=True):
            rows = Reviews(size)
            with torch.no_grad():
                wanted = model(input_ids=rows.tokens).logits.argmax(-1).tolist()
            assert found == pytest.approx(mean_by_hand(model, rows), abs=1e-6)
            assert predictions == wanted
            assert labels == [int(rows[index]["labels"]) for index in range(size)]
