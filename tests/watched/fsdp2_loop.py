"""A loop with FSDP2 whose sampler is seeded by the rank, or not: `fsdp2_loop.py KIND` (rank_seed, one_seed)."""

import hashlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
fully_shard(model[0])
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
dataset = TensorDataset(torch.randn(64, 10), torch.randn(64, 1))
sampler = DistributedSampler(dataset, seed=rank if sys.argv[1] == "rank_seed" else 0)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
weights = b"".join(
    value.full_tensor().detach().numpy().tobytes() for value in model.parameters()
)
if rank == 0:
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
dist.destroy_process_group()
