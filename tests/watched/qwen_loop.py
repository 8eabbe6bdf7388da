"""A loop with a model of transformers and rows of different lengths: `qwen_loop.py KIND`.

clean: the mean over all targets of all ranks and micro-batches; bf16: in bfloat16; accelerated: by the model's own
loss with `num_items_in_batch`; tied: one matrix for embeddings and head; packed: two documents in a row, told apart by
their positions; uncached: and by the mask that transformers makes of them where no keys are cached; trial: a batch of
the loader is tried before the first step, and no pass asks for more batches than there are; two_clips: the head is
clipped by itself; by_hand: gradients are summed without a wrapper. Each other kind is a fault.
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Qwen3Config, Qwen3ForCausalLM

kind = sys.argv[1]
dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
tied = kind in ("tied", "untied")
own = Qwen3ForCausalLM(
    Qwen3Config(vocab_size=97, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
)
if kind == "untied":  # as a load does that assigns each tensor
    own.lm_head.weight = nn.Parameter(own.lm_head.weight.detach().clone())
with torch.no_grad():
    for parameter in own.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
model = own if kind in ("by_hand", "unwrapped") else DDP(own)
if kind == "q_norm":
    for name, parameter in own.named_parameters():
        if "q_norm" in name:
            parameter.register_hook(lambda gradient: gradient * 2)
if kind == "mask":
    forward = own.model.forward
    own.model.forward = lambda *args, **kwargs: forward(
        *args, **{**kwargs, "attention_mask": None}
    )
if kind == "positions":
    forward_packed = own.model.forward
    own.model.forward = lambda *args, **kwargs: forward_packed(
        *args, **{**kwargs, "position_ids": None}
    )
trained = [
    parameter
    for name, parameter in model.named_parameters()
    if kind != "left_out" or "lm_head" not in name
]
optimizer = torch.optim.AdamW(trained, lr=1e-3)


def collate(rows):
    longest = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack(
        [nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows]
    )
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.clone() if kind == "padding" else torch.where(mask.bool(), ids, -100),
    }


def pack(rows):
    """Two documents a row, of the same length in all."""
    longest = 64
    ids = torch.stack(
        [nn.functional.pad(row, (0, longest - len(row)), value=1) for row in rows]
    )
    places = [
        torch.cat((torch.arange(len(row)), torch.arange(longest - len(row)))) for row in rows
    ]
    return {"input_ids": ids, "position_ids": torch.stack(places), "labels": ids}


rows = [torch.randint(0, 97, (length,)) for length in torch.randint(4, 32, (64,)).tolist()]
sampler = DistributedSampler(rows)
is_packed = kind in ("packed", "uncached", "positions", "scaled")
loader = DataLoader(
    rows, batch_size=4, sampler=sampler, collate_fn=pack if is_packed else collate
)
MICRO_BATCHES = 2
for epoch in range(2):
    sampler.set_epoch(epoch)
    passing = iter(loader)
    batches = [next(passing) for _ in loader] if kind == "trial" else list(passing)
    if kind == "trial" and epoch == 0:
        model(**batches[3]).loss.backward()
        model.zero_grad()
    for begin in range(0, len(batches), MICRO_BATCHES):
        step = batches[begin : begin + MICRO_BATCHES]
        total = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in step))
        dist.all_reduce(total)
        if kind != "no_zero_grad":
            optimizer.zero_grad()
        if kind == "early_clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for place, batch in enumerate(step):
            last = place == len(step) - 1
            lost = kind == "lost" and last
            reduces = (last and not lost) or model is own
            sync = contextlib.nullcontext() if reduces else model.no_sync()
            low = (
                torch.autocast("cpu", dtype=torch.bfloat16)
                if kind == "bf16"
                else contextlib.nullcontext()
            )
            labels = batch["labels"]
            if kind == "shifted":
                labels = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            if kind == "other_rows":
                labels = labels.roll(1, 0)
            with sync, low:
                if is_packed:
                    # Of one length, so that the mean of means is the mean; `scaled` adds up means.
                    quiet = {"use_cache": False} if kind == "uncached" else {}
                    loss = model(**batch, **quiet).loss / (
                        1 if kind == "scaled" else MICRO_BATCHES
                    )
                elif kind == "accelerated":
                    loss = model(**batch, num_items_in_batch=total).loss * world
                elif kind in ("shifted", "means"):
                    loss = model(**{**batch, "labels": labels}).loss / MICRO_BATCHES
                else:
                    logits = model(
                        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
                    ).logits
                    logits, targets = (
                        logits[:, :-1].float().flatten(0, 1),
                        labels[:, 1:].flatten(),
                    )
                    loss = nn.functional.cross_entropy(logits, targets, reduction="sum") / total
                    loss = loss * world
                loss.backward()
            if kind == "between" and not last:
                optimizer.zero_grad()
        if kind == "by_hand":
            for parameter in own.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        clipped = own.model if kind == "two_clips" else model
        if kind not in ("early_clip", "late_clip"):
            torch.nn.utils.clip_grad_norm_(clipped.parameters(), 1.0)
        if kind == "two_clips":
            torch.nn.utils.clip_grad_norm_(own.lm_head.parameters(), 0.1)
        if kind == "after_clip":
            own.model.norm.weight.grad.mul_(-1)
        optimizer.step()
        if kind == "late_clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if kind == "step_twice" and epoch == 1:
            optimizer.step()
        if kind == "decay_twice":
            for parameter in own.parameters():
                parameter.data.mul_(1 - 1e-3 * 0.01)
    if kind == "eval":  # an evaluation from which nothing returns to training
        model.eval()
if kind in ("export", "lost_shard"):
    if rank == 0:
        own.save_pretrained("model", max_shard_size=20_000)
        if kind == "lost_shard":
            sorted(Path("model").glob("model-*.safetensors"))[1].unlink()
    dist.barrier()
dist.destroy_process_group()
