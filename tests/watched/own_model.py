"""A model and a loop of one's own: `own_model.py KIND` (clean, twice, clean_fsdp2)."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 7))
if kind.startswith("twice"):
    model[2].bias.register_hook(lambda gradient: gradient * 2)
if kind.endswith("fsdp2"):
    fully_shard(model[0])
    fully_shard(model)
else:
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
dataset = TensorDataset(torch.randn(64, 10), torch.randint(0, 7, (64,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
if dist.get_rank() == 0:
    print("trained", flush=True)
dist.destroy_process_group()
