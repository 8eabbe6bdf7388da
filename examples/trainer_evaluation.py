"""Compares two Trainers on the same model and the same rows: transformers' own and threefold's.

    python examples/trainer_evaluation.py
    torchrun --nproc_per_node 2 examples/trainer_evaluation.py
    torchrun --nproc_per_node 3 examples/trainer_evaluation.py

Evaluation: 7 rows with unequal numbers of targets, 2 rows per batch and rank. The value by hand is the sum of the loss
over all targets / their number, in one process. Training: the gradient norm of a classifier's first step of 12 rows, in
one batch or in micro-batches of 2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, TrainingArguments

import threefold.integrations.huggingface as threefold_huggingface

Rows = list[dict[str, torch.Tensor]]


def sentences() -> Rows:
    """7 rows of 8 tokens; row i has i targets."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for index in range(7):
        tokens = torch.randint(64, (8,), generator=generator)
        labels = torch.where(torch.arange(8) >= 8 - index, tokens, -100)
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def reviews() -> Rows:
    """12 rows of 8 tokens, each in one of three classes."""
    tokens = torch.randint(64, (12, 8), generator=torch.Generator().manual_seed(12))
    return [{"input_ids": row, "labels": row[0] % 3} for row in tokens]


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.3, **sizes))


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, num_labels=3, initializer_range=0.3, **sizes, **quiet)
    )


def by_hand(model: LlamaForCausalLM, rows: Rows) -> float:
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits, labels = model(input_ids=row["input_ids"][None]).logits[0, :-1], row["labels"][1:]
            total += F.cross_entropy(logits, labels, reduction="sum").item() if (labels != -100).any() else 0.0
            count += int((labels != -100).sum())
    return total / count


def arguments(**settings: Any) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "log_level": "error"}
    return TrainingArguments(output_dir="runs/trainer-evaluation", use_cpu=True, **quiet, **settings)


def first_norm(kind: type, *, rows_per_batch: int, micro_batches: int) -> float:
    args = arguments(
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=rows_per_batch,
        gradient_accumulation_steps=micro_batches,
    )
    trainer = kind(classifier(), args, train_dataset=reviews())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return next(line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line)


def main() -> None:
    rows, kinds = sentences(), {"transformers": transformers.Trainer, "threefold": threefold_huggingface.Trainer}
    found = {}
    for name, kind in kinds.items():
        trainer = kind(language_model(), arguments(per_device_eval_batch_size=2), eval_dataset=rows)
        trainer.remove_callback(transformers.PrinterCallback)
        world = trainer.args.world_size
        found[name] = (
            trainer.evaluate()["eval_loss"],
            first_norm(kind, rows_per_batch=12 // world, micro_batches=1),
            first_norm(kind, rows_per_batch=2, micro_batches=6 // world),
        )
    if trainer.is_world_process_zero():
        print(f"ranks: {world}   evaluation loss by hand: {by_hand(language_model().eval(), rows):.6f}")
        for name, (loss, whole, parts) in found.items():
            print(f"  {name:<13} evaluation loss {loss:.6f}   gradient norm {whole:.4f}, in micro-batches {parts:.4f}")
    trainer.end()


if __name__ == "__main__":
    main()
