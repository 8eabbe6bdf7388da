"""A loop with DeepSpeed's engine, a model of transformers and rows of other lengths: `deepspeed_loop.py KIND STAGE`.

clean: the mean over all targets of all ranks and micro-batches; own_loss: by the model's own loss with
`num_items_in_batch`, and an optimizer of two groups; bf16: in bfloat16. Each other kind is a fault: a norm's gradient
doubled by a hook, the mean of unequal micro-batches, a loss times the number of ranks.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Qwen3Config, Qwen3ForCausalLM

kind, stage = sys.argv[1], int(sys.argv[2])
# Its operations for CPUs would be compiled first, for a minute.
deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
deepspeed.init_distributed(dist_backend="gloo")
world = dist.get_world_size()
torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
model = Qwen3ForCausalLM(
    Qwen3Config(vocab_size=97, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
)
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
if kind == "q_norm":
    for name, parameter in model.named_parameters():
        if "q_norm" in name:
            parameter.register_hook(lambda gradient: gradient * 2)


def collate(rows):
    longest = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack(
        [nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows]
    )
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), ids, -100),
    }


rows = [torch.randint(0, 97, (length,)) for length in torch.randint(4, 32, (64,)).tolist()]
sampler = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=4, sampler=sampler, collate_fn=collate)
MICRO_BATCHES = 2
settings = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": kind == "bf16"},
}
if kind == "own_loss":
    matrices = {"params": [each for each in model.parameters() if each.ndim >= 2]}
    vectors = {
        "params": [each for each in model.parameters() if each.ndim < 2],
        "weight_decay": 0.0,
    }
    optimizer = torch.optim.AdamW([matrices, vectors], lr=1e-3)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
for epoch in range(2):
    sampler.set_epoch(epoch)
    batches = list(loader)
    for begin in range(0, len(batches), MICRO_BATCHES):
        step = batches[begin : begin + MICRO_BATCHES]
        total = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step))
        dist.all_reduce(total)
        for batch in step:
            # DeepSpeed takes the mean over ranks and micro-batches.
            times = world * MICRO_BATCHES
            if kind == "means":
                loss = engine(**batch).loss
            elif kind == "own_loss":
                loss = engine(**batch, num_items_in_batch=total).loss * times
            else:
                logits = engine(
                    input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
                ).logits
                logits, targets = (
                    logits[:, :-1].float().flatten(0, 1),
                    batch["labels"][:, 1:].flatten(),
                )
                loss = (
                    nn.functional.cross_entropy(logits, targets, reduction="sum")
                    / total
                    * times
                )
            engine.backward(loss * world if kind == "ranks" else loss)
            engine.step()
weights = float(
    sum(value.double().abs().sum() for value in engine.module.state_dict().values())
)
if dist.get_rank() == 0:
    print(f"weights {weights}", flush=True)
dist.destroy_process_group()
