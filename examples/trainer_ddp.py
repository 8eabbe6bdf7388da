"""transformers.Trainer's loop on several ranks, with threefold's promises: a small language model of Python code.

    torchrun --nproc_per_node 2 examples/trainer_ddp.py --max_steps 20
    torchrun --nproc_per_node 2 examples/trainer_ddp.py --max_steps 40          # resumes where that one ended
    threefold data audit runs/trainer                                           # proves what the whole run read

You can give every argument of TrainingArguments as --key value. Inside SageMaker's containers, the example reads the
job's hyperparameters from SM_HPS. It keeps checkpoints in /opt/ml/checkpoints (which survives a restart) and saves the
model to SM_MODEL_DIR.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from threefold.integrations.huggingface import Trainer


@dataclass
class Sizes:
    """Arguments of this example besides TrainingArguments."""

    seq_len: int = field(default=128, metadata={"help": "bytes per row"})
    rows: int = field(default=1001, metadata={"help": "rows to train on"})
    eval_rows: int = field(default=101, metadata={"help": "rows to evaluate on"})
    hidden_size: int = field(default=64, metadata={"help": "hidden size of the model"})


class Bytes(torch.utils.data.Dataset):
    """Rows of `seq_len` bytes of the standard library's modules, starting at row `first`."""

    def __init__(self, *, first: int, rows: int, seq_len: int) -> None:
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        wanted, text = (first + rows) * seq_len, b""
        for module in modules:
            if len(text) >= wanted:
                break
            text += module.read_bytes()
        self.tokens = torch.frombuffer(bytearray(text[first * seq_len : wanted]), dtype=torch.uint8).view(-1, seq_len)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index].long()
        return {"input_ids": row, "labels": row}


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Sizes, TrainingArguments]:
    """Returns the arguments: this example's defaults, then SageMaker's hyperparameters, then the command line."""
    hyperparameters = json.loads(environ.get("SM_HPS", "{}"))
    in_container = "SM_HPS" in environ
    defaults = {
        "output_dir": "/opt/ml/checkpoints" if in_container else "runs/trainer",
        "max_steps": 20,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "logging_steps": 5,
        "save_steps": 10,
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "ddp_find_unused_parameters": False,
    }
    given = {key: value for key, value in hyperparameters.items() if not key.startswith("sagemaker_")}
    words = [word for key, value in {**defaults, **given}.items() for word in (f"--{key}", str(value))]
    return HfArgumentParser((Sizes, TrainingArguments)).parse_args_into_dataclasses([*words, *argv])


def main() -> None:
    sizes, args = parse(sys.argv[1:], os.environ)
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=sizes.hidden_size,
        intermediate_size=4 * sizes.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=sizes.seq_len,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        args,
        train_dataset=Bytes(first=0, rows=sizes.rows, seq_len=sizes.seq_len),
        eval_dataset=Bytes(first=sizes.rows, rows=sizes.eval_rows, seq_len=sizes.seq_len),
    )
    begun = any(Path(args.output_dir).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=begun)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(os.environ.get("SM_MODEL_DIR", f"{args.output_dir}/model"))
    if trainer.is_world_process_zero():
        print(f"{args.world_size} ranks, step {trainer.state.global_step}: evaluation loss {loss:.6f}")
    trainer.end()


if __name__ == "__main__":
    main()
