"""Tensor parallelism over all ranks, which must read the same rows: `tp_loop.py KIND` (same_rows, by_rank)."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
dataset = TensorDataset(torch.randn(40, 10), torch.randn(40, 1))
shares = {} if sys.argv[1] == "by_rank" else {"num_replicas": 1, "rank": 0}
sampler = DistributedSampler(dataset, **shares)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(dataset, batch_size=5, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
