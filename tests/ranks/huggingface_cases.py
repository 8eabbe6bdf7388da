"""Small models, data with unequal numbers of targets, and Trainers for them, on real ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from ranks.spawn import run_ranks

VOCAB, LENGTH = 64, 8


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentence i has i % 6 targets at its end, after the model's own shift; the others are ignored."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.tokens = torch.randint(VOCAB, (size, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[: LENGTH - index % 6] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Reviews(Dataset[dict[str, Tensor]]):
    """Token rows of one of three classes."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.tokens = torch.randint(VOCAB, (size, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index, 0] % 3}


def causal_model(seed: int = 0, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **settings}))


def classifier(seed: int = 0, **settings: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    return BertForSequenceClassification(
        BertConfig(
            **{
                **sizes,
                "num_attention_heads": 2,
                "num_labels": 3,
                "initializer_range": 0.3,
                **settings,
            }
        )
    )


def on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """What each rank returns; one rank is this process."""
    return [function(*args)] if num_ranks == 1 else run_ranks(function, num_ranks, *args)


def join_launcher() -> None:
    """The variables of a launcher, for ranks whose process group is there already."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }


def arguments(folder: str, **settings: Any) -> Any:
    from transformers import TrainingArguments

    join_launcher()
    quiet = {
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
    }
    return TrainingArguments(
        output_dir=folder,
        **{"use_cpu": True, **quiet, "dataloader_pin_memory": False, **settings},
    )


def mean_by_hand(model: Any, rows: Any) -> float:
    """Sum of the loss over all targets / their number, row by row in this process."""
    total, count = 0.0, 0
    model.eval()
    with torch.no_grad():
        for index in range(len(rows)):
            row = rows[index]
            logits = model(input_ids=row["input_ids"][None]).logits.double()
            if logits.ndim == 3:
                labels, logits = row["labels"][None, 1:], logits[:, :-1]
            else:
                labels = row["labels"][None]
            total += F.cross_entropy(
                logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=-100
            ).item()
            count += int((labels != -100).sum())
    return total / count if count else float("nan")
