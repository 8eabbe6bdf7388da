"""A loop as people write it, with DistributedDataParallel: `ddp_loop.py KIND` (plain, sampler, no_set_epoch)."""

import hashlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(40, 10), torch.randn(40, 1))
sampler = None if kind == "plain" else DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=5, sampler=sampler)
for epoch in range(3):
    if kind == "sampler":
        sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
if dist.get_rank() == 0:
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
dist.destroy_process_group()
