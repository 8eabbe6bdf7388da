"""What was trained for the fixtures: settings and code that hold for every version, so only public names are used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

VERSION = "0.1.0"
KEPT = Path(__file__).parent / f"v{VERSION}"
STEPS, STOPPED_AT = 8, 4

CONFIG = """\
model:
  config: {model_type: llama, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 2, initializer_range: 0.2}
data: {source: corpus, seq_len: 32}
train: {steps: 8, global_batch: 8}
optimizer: {lr: 0.02, warmup_steps: 2}
mesh: {device: cpu}
log: {every: 1, sample_tokens: 0}
"""

# Name to the arguments of `threefold train config.yaml`; each has its folder of that name.
TRAINED = {
    "sharded": ("--mesh.dp", "2", "--mesh.dp_shard", "2"),
    "tensor": (
        *("--mesh.dp", "1", "--mesh.tp", "2", "--data.mixture"),
        "{most: {source: 'corpus/part-[012].txt', weight: 3}, rest: {source: corpus/part-3.txt, weight: 1}}",
    ),
    "packed": (
        *("--mesh.dp", "1", "--data.source", "store"),
        *("--data.packing", "best_fit", "--data.document_mask", "true"),
    ),
}
RANKS = {"sharded": 2, "tensor": 2, "packed": 1}
PREPARE = ("data", "prepare", "--source", "corpus", "--tokenizer", "bytes", "--to", "store")

# Name to (ranks, DistributedConfig's sizes) of the Trainer's checkpoints.
TRAINER = {"trainer": (1, {}), "trainer-sharded": (2, {"fsdp_size": 2})}


def arguments(name: str) -> tuple[str, ...]:
    """The command line of a training; a mixture takes the place of the source of the config."""
    return ("train", "mixture.yaml" if name == "tensor" else "config.yaml", *TRAINED[name], "--log.dir", name)


def prepare(folder: Path) -> None:
    """The corpus and the configs that all of them read."""
    (folder / "corpus").mkdir()
    for number in range(4):
        words = "\n".join(" ".join(f"word{(number * 7 + i * j) % 97}" for i in range(9 + j)) for j in range(9))
        (folder / "corpus" / f"part-{number}.txt").write_text(words + "\n")
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "mixture.yaml").write_text(CONFIG.replace("source: corpus, ", ""))


def train_with_trainer(
    folder: str, sizes: dict[str, int], *, stop: bool = False, resume: bool = False
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of our Trainer on this rank, from the first step on."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import Dataset
    from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback, TrainingArguments
    from transformers.distributed import DistributedConfig

    from threefold.integrations.huggingface import Trainer

    class Sentences(Dataset[dict[str, torch.Tensor]]):
        tokens = torch.randint(64, (21, 8), generator=torch.Generator().manual_seed(0))

        def __len__(self) -> int:
            return len(self.tokens)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            labels = self.tokens[index].clone()
            labels[: 8 - index % 6] = -100
            return {"input_ids": self.tokens[index], "labels": labels}

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if stop and state.global_step == STOPPED_AT:
                control.should_save = control.should_training_stop = True

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    shape = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, **heads)
    begun = f"{folder}-begun"
    model = AutoModelForCausalLM.from_config(shape)
    if sizes:
        model.save_pretrained(begun)  # on the first rank
        dist.barrier()
        model = AutoModelForCausalLM.from_pretrained(begun, distributed_config=DistributedConfig(**sizes))
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=4 // world,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        data_seed=3,
        logging_strategy="steps",
        logging_steps=1,
        save_strategy="steps",
        save_steps=100,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, settings, train_dataset=Sentences(), callbacks=[Stop()])
    trainer.train(resume_from_checkpoint=resume or None)
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "grad_norm" in line]
