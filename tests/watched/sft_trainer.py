"""TRL's SFTTrainer: `sft_trainer.py KIND` (clean, packed; completion: labels of a part of each row; head: twice)."""

import sys
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

kind = sys.argv[1]
set_seed(0)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, eos_token_id=1, pad_token_id=0, initializer_range=0.2, **sizes)
)
words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, 64)}
backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>"
)
rows = [
    {"input_ids": torch.randint(2, 64, (6 + 5 * (number % 4),)).tolist()}
    for number in range(32)
]
for row in rows:
    row["completion_mask"] = [int(place > 3) for place in range(len(row["input_ids"]))]
if kind == "head":
    model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)
which = {
    "packing": kind == "packed",
    "max_length": 48,
    "completion_only_loss": kind == "completion",
}
with tempfile.TemporaryDirectory() as folder:
    settings = {
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
    }
    args = SFTConfig(
        folder, per_device_train_batch_size=2, num_train_epochs=2, **settings, **which
    )
    SFTTrainer(
        model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    ).train()
