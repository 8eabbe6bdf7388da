"""BertForSequenceClassification with transformers' Trainer under DDP, in the form of SageMaker's own examples.

torchrun --nproc-per-node 2 examples/common/bert_sagemaker.py [--plain]

Hyperparameters come as arguments and folders as SM_* variables, so that the same file is a job's entry script. The
usual form is transformers' Trainer (`--plain`). BERT's loss is a mean, which that Trainer multiplies by the number of
ranks and never divides: the gradient and the evaluation loss are as many times too large.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

import threefold.integrations.huggingface as threefold_huggingface

PRAISE, BLAME = ("good", "fine", "bright", "kind"), ("bad", "dull", "grim", "cold")
LENGTH = 32


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--train_batch_size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--eval_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    # SageMaker's toolkit hands a hyperparameter true over as the argument True.
    parser.add_argument("--plain", nargs="?", type=str.lower, const="true", default="false", help="transformers' own")
    parser.add_argument("--output_data_dir", default=os.environ.get("SM_OUTPUT_DATA_DIR", "runs/bert/output"))
    parser.add_argument("--model_dir", default=os.environ.get("SM_MODEL_DIR", "runs/bert/model"))
    parser.add_argument("--training_dir", default=os.environ.get("SM_CHANNEL_TRAIN"))
    return parser.parse_known_args()


def reviews(*, first: int, rows: int) -> list[dict[str, Any]]:
    """Sentences with a label, in place of the channel's files."""
    words = [(PRAISE if number % 2 else BLAME)[number // 2 % 4] for number in range(first, first + rows)]
    texts = [f"film {first + index} was {word}" for index, word in enumerate(words)]
    return [{"text": text, "label": int(word in PRAISE)} for text, word in zip(texts, words, strict=True)]


def tokenized(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes for tokens; of a real job, AutoTokenizer's, padded and cut to one length."""
    padded = [list(row["text"].encode()[:LENGTH].ljust(LENGTH, b"\0")) for row in rows]
    return [
        {"input_ids": ids, "attention_mask": [int(each != 0) for each in ids], "labels": row["label"]}
        for ids, row in zip(padded, rows, strict=True)
    ]


def main() -> None:
    args, _ = parse()
    set_seed(0)
    train = (
        [json.loads(line) for path in sorted(Path(args.training_dir).glob("*.jsonl")) for line in path.open()]
        if args.training_dir
        else reviews(first=0, rows=192)
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(
        vocab_size=256, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
    )
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    training_args = TrainingArguments(
        output_dir=f"{args.output_data_dir}/checkpoints",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.train_batch_size // ranks,
        per_device_eval_batch_size=args.eval_batch_size,
        learning_rate=args.learning_rate,
        max_grad_norm=1e9,  # measured, and not clipped
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    kind = transformers.Trainer if args.plain == "true" else threefold_huggingface.Trainer
    trainer = kind(
        BertForSequenceClassification(config),
        training_args,
        train_dataset=tokenized(train),
        eval_dataset=tokenized(reviews(first=192, rows=43)),
        compute_metrics=lambda outcome: {
            "accuracy": float((outcome.predictions.argmax(-1) == outcome.label_ids).mean()),
            "rows": len(outcome.label_ids),
        },
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    result = trainer.evaluate()
    trainer.save_model(args.model_dir)
    if trainer.is_world_process_zero():
        norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
        (Path(args.output_data_dir) / "eval_results.json").write_text(json.dumps(result))
        print(f"gradient norm of the first step {norms[0]:.4f}, on {ranks} ranks")
        print(f"evaluation loss {result['eval_loss']:.6f}, accuracy {result['eval_accuracy']:.3f}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
