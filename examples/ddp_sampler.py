"""The same DDP loop with an explicit sampler, if you keep your own DataLoader. Also resumes in the middle of an epoch.

    torchrun --nproc-per-node 2 examples/ddp_sampler.py

The signature is torch's; only the import differs. With order="torch", the indices are exactly torch's own.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import threefold
from threefold import DistributedSampler  # instead of torch.utils.data.distributed.DistributedSampler

EPOCHS, ROWS = 8, 64


def main() -> None:
    mesh = threefold.init_mesh()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(mesh.device)
    if mesh.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pixels, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    dataset = TensorDataset(pixels.float() / 16, labels)

    sampler = DistributedSampler(dataset, shuffle=True, seed=1, drop_last=True)
    loader = DataLoader(dataset, batch_size=ROWS // mesh.dp_size, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images.to(mesh.device)), targets.to(mesh.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if mesh.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)

    # Stop and resume in the middle of an epoch. The state is a few integers, the same for all ranks and rank counts.
    whole = list(DistributedSampler(dataset, seed=1, drop_last=True))
    first = DistributedSampler(dataset, seed=1, drop_last=True)
    head = [index for _, index in zip(range(100), first, strict=False)]
    rest = DistributedSampler(dataset, seed=1, drop_last=True)
    rest.load_state_dict(first.state_dict())
    assert head + list(rest) == whole
    if mesh.rank == 0:
        print(f"resumes after {len(head)} of {len(whole)} images of this rank: {first.state_dict()}")
    mesh.close()


if __name__ == "__main__":
    main()
