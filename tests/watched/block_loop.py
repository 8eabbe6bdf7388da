"""A loop that has the referee inside of it: `block_loop.py KIND RECORD` (ddp, fsdp2, twice, raises)."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

import threefold

kind, record = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes))
wrapped = fully_shard(model) if kind == "fsdp2" else DistributedDataParallel(model)
if kind == "twice":
    model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: 2 * gradient)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
critic = torch.nn.Linear(4, 4)
other = torch.optim.SGD(critic.parameters(), lr=0.1)
rows = [torch.randint(0, 97, (24,)) for _ in range(32)]
sampler = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
with threefold.Referee(wrapped, optimizer, record=record) as referee:
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids in loader:
            optimizer.zero_grad()
            wrapped(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            critic(torch.ones(2, 4)).sum().backward()
            torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            other.step()
        if kind == "raises":
            raise RuntimeError("the loop fails")
if referee.verdict is not None:
    print("code", referee.verdict.exit_code, "rank", dist.get_rank())
dist.destroy_process_group()
