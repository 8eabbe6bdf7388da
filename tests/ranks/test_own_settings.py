"""What a custom loop may set, on every mesh: frozen parameters, optimizers of its own, prompts of each dp rank."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import loops
from ranks.reference import TINY_LLAMA
from ranks.spawn import run_ranks

pytestmark = pytest.mark.ranks

MESHES = [{"dp": 2}, {"dp": 2, "dp_shard": 2}, {"tp": 2}]


def _frozen(sizes: dict[str, int]) -> Any:
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh)
    names = threefold.freeze(model, ["embed_tokens", r"layers\.0\.", "norm"])
    for name, each in model.named_parameters():
        if "norm" in name and "layers.0" not in name:
            names.remove(name)
            each.requires_grad_(True)
    before = {name: loops.whole(each) for name, each in model.named_parameters()}
    step = threefold.TrainStep(model, lr=1e-2, micro_batch=2)
    numbers = []
    for batch in loops.batches():
        batch.pop("weights")
        numbers.append(tuple(step(loops.share(batch, mesh))))
    moved = [
        n
        for n, each in model.named_parameters()
        if not torch.equal(before[n], loops.whole(each))
    ]
    mesh.close()
    return numbers, sorted(names), sorted(moved)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_what_is_frozen_stays_and_the_rest_is_as_in_one_process(sizes: dict[str, int]) -> None:
    alone, names, moved = run_ranks(_frozen, 1, {})[0]
    assert {name.split(".")[1] for name in names} == {"embed_tokens", "layers"} and not set(
        names
    ) & set(moved)
    for numbers, its_names, its_moved in run_ranks(_frozen, 2, sizes, timeout_s=60):
        assert (its_names, its_moved) == (names, moved)
        for (loss, norm), (one_loss, one_norm) in zip(numbers, alone, strict=True):
            assert loss == pytest.approx(one_loss, rel=1e-4) and norm == pytest.approx(
                one_norm, rel=1e-3
            )


def _unfrozen(sizes: dict[str, int]) -> list[tuple[float, float]]:
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    threefold.freeze(model, [r"layers\.0\."])
    step = threefold.TrainStep(model, optimizer)
    numbers = []
    for number, batch in enumerate([*loops.batches(), *loops.batches()]):
        batch.pop("weights")
        for name, each in model.named_parameters():
            each.requires_grad_("layers.0" not in name if number < 2 else "embed" not in name)
        numbers.append(tuple(step(loops.share(batch, mesh))))
    mesh.close()
    return numbers


@pytest.mark.parametrize("sizes", MESHES[:2], ids=str)
def test_what_is_unfrozen_and_frozen_between_steps_is_as_in_one_process(
    sizes: dict[str, int],
) -> None:
    alone = run_ranks(_unfrozen, 1, {})[0]
    for numbers in run_ranks(_unfrozen, 2, sizes, timeout_s=60):
        assert numbers == [pytest.approx(each, rel=1e-4) for each in alone]


class Rows:
    """An optimizer whose update of a part of a matrix is not that of the whole: by the largest value of all."""

    @staticmethod
    def of(parameters: Any) -> Any:
        import torch

        class ByLargest(torch.optim.Optimizer):
            def __init__(self, parameters: Any, lr: float = 0.1) -> None:
                super().__init__(parameters, {"lr": lr})

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for each in group["params"]:
                        local = each.to_local() if hasattr(each, "to_local") else each
                        gradient = (
                            each.grad.to_local()
                            if hasattr(each.grad, "to_local")
                            else each.grad
                        )
                        local.sub_(group["lr"] * gradient / gradient.abs().max())

        return ByLargest(parameters)


def _tried(sizes: dict[str, int]) -> dict[str, str]:
    import math

    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    said: dict[str, str] = {}
    makers: dict[str, Any] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
        "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
        "parts": Rows.of,
    }
    for name, make in makers.items():
        model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
        batch = loops.share(loops.batches(1)[0], mesh)
        batch.pop("weights")
        try:
            assert math.isfinite(
                threefold.TrainStep(model, make(model.parameters()))(batch).grad_norm
            )
            said[name] = "works"
        except threefold.errors.ConfigError as error:
            (problem,) = error.problems
            said[name] = f"{problem.what.split(':')[0]} / {problem.fix}"
    mesh.close()
    return said


@pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
def test_an_optimizer_works_on_the_mesh_or_is_refused_before_the_first_step(
    sizes: dict[str, int],
) -> None:
    said, other = run_ranks(_tried, 2, sizes, timeout_s=120)
    assert said == other
    assert {said[name] for name in ("adamw", "sgd", "nadam")} == {"works"}
    other_fix = "torch.optim.AdamW(model.parameters(), lr=...)"
    assert said["parts"] == (
        f"ByLargest does not update a part of a matrix as it updates the whole, and this mesh holds parts / {other_fix}"
    )
    assert said["adafactor"] == f"Adafactor cannot step on this mesh / {other_fix}"
    for name in ("fused", "foreach"):
        # On tp some parameters are split and some whole, which one kernel does not take together.
        assert said[name] == (
            "works"
            if "dp" in sizes
            else f"AdamW cannot step on this mesh / leave {name}=True out"
        )


def _written(sizes: dict[str, int], asked: list[list[list[int]]]) -> list[Any]:
    import torch

    import threefold

    mesh = threefold.init_mesh(**sizes)
    model = threefold.load_model(config=TINY_LLAMA, mesh=mesh, admission="off")
    if mesh.world_size > 1:
        asked = [asked[mesh.dp_rank]]
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "do_sample": True,
        "seed": 3,
        "pad_token_id": 0,
    }
    found = [model.generate(torch.tensor(each), **options).tolist() for each in asked]
    mesh.close()
    return found


def test_each_dp_rank_has_its_own_prompts_answered() -> None:
    asked = [[[1, 2, 3, 4, 5]], [[21, 22, 23], [24, 25, 26]]]
    alone = run_ranks(_written, 1, {}, asked)[0]
    assert run_ranks(_written, 2, {"dp": 2}, asked, timeout_s=60) == [[alone[0]], [alone[1]]]
