"""A sequence over two ranks, by hand: `cp_loop.py KIND`.

clean: each rank holds a half of every row, and its queries see the keys of both; twice: gradients of q_norm are
doubled; unnumbered: no positions reach the model; own_count: each rank divides by the targets that it holds.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Qwen3Config,
    Qwen3ForCausalLM,
)

kind = sys.argv[1]
dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()


class Gather(torch.autograd.Function):
    """The keys or values of all ranks; their gradients are summed, and each rank takes its own."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(world, dim=2)[rank]


def attend(module, query, key, value, attention_mask, scaling, **kwargs):
    key, value = Gather.apply(key), Gather.apply(value)
    length = query.shape[2]
    seen = torch.ones(length, key.shape[2]).tril(rank * length).bool()
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, seen, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


AttentionInterface.register("gathered", attend)
AttentionMaskInterface.register("gathered", lambda *args, **kwargs: None)
torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
config = Qwen3Config(vocab_size=97, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
model = DDP(Qwen3ForCausalLM._from_config(config, attn_implementation="gathered"))
if kind == "twice":
    for layer in model.module.model.layers:
        layer.self_attn.q_norm.weight.register_hook(lambda gradient: 2 * gradient)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = [torch.randint(0, 97, (24,)) for _ in range(32)]
# Both ranks read the same rows.
sampler = DistributedSampler(rows, num_replicas=1, rank=0)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for ids in loader:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        targets = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        part, places, targets = (
            each.chunk(world, dim=1)[rank] for each in (ids, positions, targets)
        )
        optimizer.zero_grad()
        given = {} if kind == "unnumbered" else {"position_ids": places}
        logits = model(input_ids=part, **given).logits.float()
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        )
        # DistributedDataParallel averages over the ranks.
        counted = (
            (targets != -100).sum() * world
            if kind == "own_count"
            else len(ids) * (ids.shape[1] - 1)
        )
        (loss * world / counted).backward()
        optimizer.step()
dist.destroy_process_group()
