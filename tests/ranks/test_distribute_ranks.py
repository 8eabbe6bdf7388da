"""`distribute` on real ranks: exact evaluation, a plain DDP loop, and the loader that is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import DistributedSampler as TorchSampler

import threefold
from ranks.spawn import run_ranks
from threefold.data.sampling.distribute import require_distributed
from threefold.errors import ConfigError

VOCAB, SEQ_LEN = 11, 6


class Sentences(Dataset[dict[str, Tensor]]):
    """Sentence i has i % 7 target tokens, so that the ranks' counts differ and some have none."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.tokens = torch.randint(VOCAB, (size, SEQ_LEN), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[index % (SEQ_LEN + 1) :] = -100
        return {"id": torch.tensor(index), "input_ids": self.tokens[index], "labels": labels}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Tanh(), nn.Linear(8, VOCAB)).double()


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(
        model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )


def mean_over_ranks(model: nn.Module, loader: Any) -> tuple[float, int, int, list[int]]:
    """(mean loss over all target tokens, their number, this rank's steps, numbers of its samples that count)."""
    totals, steps, seen = torch.zeros(2, dtype=torch.float64), 0, []
    with torch.no_grad():
        for batch in loader:
            of_step = torch.stack(
                [loss_sum(model, batch), (batch["labels"] != -100).sum().double()]
            )
            # In every step, as a model that is sharded would: a rank with fewer steps would hang.
            dist.all_reduce(of_step) if dist.is_initialized() else None
            totals += of_step
            steps += 1
            ignored = (batch["labels"] == -100).all(1) & (batch["id"] % (SEQ_LEN + 1) != 0)
            seen += batch["id"][~ignored].tolist()
    return (totals[0] / totals[1].clamp(min=1)).item(), int(totals[1]), steps, seen


def evaluate_all(cases: list[tuple[int, int]]) -> list[tuple[float, int, int, list[int]]]:
    threefold.init_mesh(dp=dist.get_world_size(), device="cpu")
    model = make_model()
    found = []
    for size, batch_size in cases:
        loader = DataLoader(Sentences(size), batch_size=batch_size)
        found.append(mean_over_ranks(model, threefold.distribute(loader, tail="exact")))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_exact_evaluation_is_that_of_one_process(num_ranks: int) -> None:
    cases = [
        (size, batch_size)
        for size in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 29, 31)
        for batch_size in (1, 2, 4)
    ]
    per_rank = run_ranks(evaluate_all, num_ranks, cases)
    model = make_model()
    for case, of_ranks in zip(cases, zip(*per_rank, strict=True), strict=True):
        size, batch_size = case
        mean, targets, _, _ = mean_over_ranks(
            model, DataLoader(Sentences(size), batch_size=batch_size)
        )
        for found, counted, steps, _ in of_ranks:
            assert found == pytest.approx(mean, rel=1e-6), case
            assert counted == targets, case
            assert steps == of_ranks[0][2], case
        # Samples without a target cannot be told from a row without a sample; all others are there once.
        seen = sorted(index for *_, ids in of_ranks for index in ids if index % (SEQ_LEN + 1))
        assert seen == [index for index in range(size) if index % (SEQ_LEN + 1)], case


def train(model: nn.Module, loader: Any, *, epochs: int, world: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for batch in loader:
            targets = (batch["labels"] != -100).sum().double()
            dist.all_reduce(targets) if dist.is_initialized() else None
            optimizer.zero_grad()
            (loss_sum(model, batch) * world / targets).backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_on_ranks() -> list[Tensor]:
    world = dist.get_world_size()
    loader = threefold.distribute(
        DataLoader(Sentences(26), batch_size=12 // world, shuffle=True, drop_last=True), seed=5
    )
    require_distributed(loader)
    return train(DistributedDataParallel(make_model()), loader, epochs=3, world=world)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_plain_ddp_loop_follows_one_process(num_ranks: int) -> None:
    found = run_ranks(train_on_ranks, num_ranks)
    sampler = threefold.DistributedSampler(range(26), 1, 0, seed=5)
    loader = DataLoader(Sentences(26), batch_size=12, sampler=sampler, drop_last=True)
    expected: list[Tensor] = []
    model = make_model()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected = train(model, loader, epochs=1, world=1)
    for of_rank in found:
        for weight, wanted in zip(of_rank, expected, strict=True):
            torch.testing.assert_close(weight, wanted, rtol=1e-9, atol=1e-12)


def refusals() -> list[tuple[str, str, str] | None]:
    """What is refused on a dp 1 x tp 2 mesh, and before it, where the world is the dp axis."""
    data = Sentences(8)
    found = [
        refusal(DataLoader(data, batch_size=2, shuffle=True)),
        refusal([1, 2, 3]),
        refusal(DataLoader(data, sampler=TorchSampler(data))),
        refusal(threefold.distribute(DataLoader(data))),
    ]
    threefold.init_mesh(dp=1, tp=2, device="cpu")
    return [
        *found,
        refusal(DataLoader(data, sampler=TorchSampler(data))),
        refusal(DataLoader(data, sampler=threefold.DistributedSampler(data))),
        refusal(threefold.distribute(DataLoader(data, batch_size=4))),
    ]


def refusal(loader: Any) -> tuple[str, str, str] | None:
    try:
        require_distributed(loader)
    except ConfigError as error:
        (problem,) = error.problems
        return problem.what, problem.expected, problem.fix
    return None


def test_loader_without_a_distributed_sampler_is_refused() -> None:
    for rank, (plain, some_list, torchs, ours, worlds, sampled, distributed) in enumerate(
        run_ranks(refusals, 2)
    ):
        assert plain == (
            "the training loader (DataLoader) has no distributed sampler, and there are 2 ranks",
            f"a loader that reads the share of dp rank {rank} of 2: with this one the ranks would train on the same "
            "rows, or on unrelated orders",
            "loader = threefold.distribute(loader)",
        )
        assert some_list is not None
        assert some_list[0].startswith("the training loader (list) has no distributed sampler")
        assert torchs is None
        assert ours is None
        assert worlds == (
            f"the training loader reads as replica {rank} of 2, but this process is dp rank 0 of 1",
            "the dp axis: cp and tp ranks of one dp rank read the same rows",
            "threefold.distribute(loader) with a plain loader, or num_replicas=mesh.dp_size, rank=mesh.dp_rank",
        )
        assert sampled is None
        assert distributed is None
