"""DeepSpeed's ZeRO under transformers.Trainer's loop, with threefold's data order and loss weights.

    pip install 'threefold[deepspeed]'
    torchrun --nproc_per_node 2 examples/deepspeed_zero.py --stage 2
    torchrun --nproc_per_node 2 examples/deepspeed_zero.py --stage 3

On a CPU, DeepSpeed compiles a kernel on first use, which takes a minute or more. TORCH_EXTENSIONS_DIR says where to
keep it. Do not set ACCELERATE_USE_CPU there: transformers would train with plain DDP (threefold's Trainer refuses).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

from threefold.integrations.huggingface import Trainer


class Counting(torch.utils.data.Dataset):
    """Rows that count up, each from its own number. The first `index % 5` positions are not targets."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(32) + 7 * index) % 256
        labels = row.clone()
        labels[: index % 5] = -100
        return {"input_ids": row, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3), help="stage of ZeRO")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output_dir", default="runs/deepspeed")
    asked = parser.parse_args()
    args = TrainingArguments(
        output_dir=f"{asked.output_dir}/zero-{asked.stage}",
        max_steps=asked.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=5,
        save_steps=10,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        deepspeed={
            "zero_optimization": {"stage": asked.stage},
            # Use torch's AdamW: DeepSpeed's own for CPUs would have to be compiled too.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        },
    )
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=Counting(301), eval_dataset=Counting(37))
    trainer.train(resume_from_checkpoint=any(Path(args.output_dir).glob("checkpoint-*")))
    engine = trainer.model_wrapped
    assert isinstance(engine, deepspeed.DeepSpeedEngine), f"trained with {type(engine).__name__}, not with DeepSpeed"
    assert engine.zero_optimization_stage() == asked.stage
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(
            f"{type(engine).__name__}, ZeRO-{asked.stage}, {args.world_size} ranks, step {trainer.state.global_step}: "
            f"evaluation loss {loss:.6f}"
        )
    del engine
    trainer.end()


if __name__ == "__main__":
    main()
