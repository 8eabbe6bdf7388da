"""Imbalanced data: draws rare classes as often as the others, and reads a test set in its own order.

    torchrun --nproc-per-node 2 examples/imbalanced_digits.py

Of the digits 5 to 9, only every twentieth image is kept. The loader has a WeightedRandomSampler, written as for a
single process. `distribute` shares its draws with replacement over the ranks; each rank gets different ones.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import threefold
from threefold.mesh.mesh import Mesh

EPOCHS, ROWS = 12, 64


def train(mesh: Mesh, loader: DataLoader) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(mesh.device)
    if mesh.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        for images, targets in loader:
            loss = nn.functional.cross_entropy(model(images.to(mesh.device)), targets.to(mesh.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def guesses(mesh: Mesh, model: nn.Module, test_set: TensorDataset) -> Tensor:
    """Returns the model's guess for every test image, in the order of the test set, on every rank."""
    # Without shuffling, the ranks take turns: rank r of D reads r, r + D, ... A rank without an image left gets
    # one more row to stay in step. That row comes last and is cut off below, so nothing in it needs to be ignored.
    loader = threefold.distribute(
        DataLoader(test_set, batch_size=50), tail="exact", ignore_last_row=lambda batch: batch
    )
    model.eval()
    with torch.no_grad():
        own = torch.cat([model(images.to(mesh.device)).argmax(dim=-1) for images, _ in loader])
    if mesh.world_size == 1:
        return own[: len(test_set)]
    parts = [torch.empty_like(own) for _ in range(mesh.dp_size)]
    dist.all_gather(parts, own)
    return torch.stack(parts, dim=1).flatten()[: len(test_set)]


def main() -> None:
    mesh = threefold.init_mesh()
    pixels, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    pixels = pixels.float() / 16
    kept = torch.tensor([number % 20 == 0 or label < 5 for number, label in enumerate(labels[:1437].tolist())])
    train_set = TensorDataset(pixels[:1437][kept], labels[:1437][kept])
    test_set, truth = TensorDataset(pixels[1437:], labels[1437:]), labels[1437:].to(mesh.device)
    counts = train_set.tensors[1].bincount(minlength=10)
    weights = (1.0 / counts)[train_set.tensors[1]]

    rows = ROWS // mesh.dp_size
    as_it_is = DataLoader(train_set, batch_size=rows, shuffle=True, drop_last=True)
    balanced = DataLoader(
        train_set, batch_size=rows, sampler=WeightedRandomSampler(weights.tolist(), len(train_set)), drop_last=True
    )
    for name, loader in (("as it is", as_it_is), ("balanced", balanced)):
        model = train(mesh, threefold.distribute(loader, seed=1))
        right = guesses(mesh, model, test_set) == truth
        if mesh.rank == 0:
            rare = truth >= 5
            print(
                f"{name}: {right[~rare].float().mean():.3f} of the frequent digits right, "
                f"{right[rare].float().mean():.3f} of the rare ones; {len(right)} images on {mesh.world_size} ranks",
                flush=True,
            )
    mesh.close()


if __name__ == "__main__":
    main()
