"""A plain DDP loop on images of digits. One line makes it read each image once per epoch, on any number of ranks.

torchrun --nproc-per-node 2 examples/ddp_loop.py
python examples/ddp_loop.py                         # the same loop in one process
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import threefold

EPOCHS, ROWS = 8, 64


def digits() -> tuple[list[dict], list[dict]]:
    """Returns 1,437 images of 8 x 8 for training and 360 for testing."""
    pixels, labels = load_digits(return_X_y=True)
    images = [
        {"pixels": torch.tensor(image, dtype=torch.float32) / 16, "labels": torch.tensor(label)}
        for image, label in zip(pixels, labels, strict=True)
    ]
    return images[:1437], images[1437:]


def main() -> None:
    mesh = threefold.init_mesh()  # under torchrun all ranks are data ranks
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(mesh.device)
    if mesh.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_set, test_set = digits()

    # Your own loader, with the batch size divided by the data ranks. This is the one line:
    loader = threefold.distribute(DataLoader(train_set, batch_size=ROWS // mesh.dp_size, shuffle=True, drop_last=True))
    for epoch in range(EPOCHS):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["pixels"].to(mesh.device)), batch["labels"].to(mesh.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if mesh.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)

    # `exact` repeats nothing and omits nothing. A rank without a row in the last round gets one with labels of -100.
    right_and_all = torch.zeros(2, device=mesh.device)
    model.eval()
    with torch.no_grad():
        for batch in threefold.distribute(DataLoader(test_set, batch_size=50), tail="exact"):
            labels = batch["labels"].to(mesh.device)
            guessed = model(batch["pixels"].to(mesh.device)).argmax(dim=-1)
            right_and_all += torch.stack([(guessed == labels).sum(), (labels != -100).sum()])
    if mesh.world_size > 1:
        dist.all_reduce(right_and_all)
    if mesh.rank == 0:
        right, counted = right_and_all.tolist()
        print(f"accuracy {right / counted:.4f} over {counted:.0f} images on {mesh.world_size} ranks")
    mesh.close()


if __name__ == "__main__":
    main()
