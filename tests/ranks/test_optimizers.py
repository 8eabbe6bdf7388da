"""Every optimizer follows one process on a mesh, and goes on from its checkpoint: bit for bit, or on another mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranks.keeping import LLAMA, Miniature, Sizes, write_corpus
from ranks.reference import compare_curves, require
from ranks.spawn import run_ranks
from threefold.check.compare import (
    Bound,
    Comparison,
    Difference,
    compare_tensors,
)

pytestmark = pytest.mark.ranks

ALONE: Sizes = (1, 1, 1, 1)
# dp_replicate, dp_shard, cp, tp
MESHES: list[Sizes] = [(1, 2, 1, 2), (2, 1, 1, 1), (2, 2, 1, 1), (1, 1, 2, 2)]
EXPERTS = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
EXPERTS |= {"moe_intermediate_size": 16}
GROUPS = [{"match": "embed", "lr": 1e-4}, {"match": "norm", "weight_decay": 1.0}]
# What differs from the miniature run's config.
CASES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": {"name": "muon"}},
    "sgd": {"optimizer": {"name": "sgd", "options": {"momentum": 0.9}}},
    "nadam": {"optimizer": {"name": "torch.optim.NAdam"}},
    "rmsprop": {"optimizer": {"name": "torch.optim.RMSprop", "options": {"momentum": 0.9}}},
    "amsgrad": {"optimizer": {"name": "adamw", "options": {"amsgrad": True}}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "narrow": {"optimizer": {"moments": "bfloat16"}},
    "groups": {"optimizer": {"ema": 0.5, "groups": GROUPS}},
    "muon, experts": {"optimizer": {"name": "muon"}, "model": {"config": EXPERTS}},
    "adafactor, experts": {"optimizer": {"name": "adafactor"}, "model": {"config": EXPERTS}},
}
# Of weights, where 1e-5 is too little: what is rounded to bfloat16 may fall on either side, and RMSprop's first steps
# are ten times the rate, whatever the size of the gradient: of rounding noise too.
WEIGHTS_BOUND = {"narrow": 1e-4, "rmsprop": 1e-3}
FIRST = ["muon", "adafactor", "groups"]
OTHERS = [name for name in CASES if name not in FIRST]


def _begin(sizes: Sizes, parent: str, names: list[str]) -> Any:
    """For each optimizer three steps, a save, and the three steps that an uninterrupted run makes then."""
    found = {}
    for name in names:
        run = Miniature(sizes, f"{parent}/{name}", **CASES[name])
        before = run.advance(3)
        run.checkpointer.save(3, None, True)
        found[name] = before + run.advance(3), _weights(run)
        run.checkpointer.saver.wait()
    return found


def _go_on(sizes: Sizes, parent: str, names: list[str]) -> Any:
    found = {}
    for name in names:
        run = Miniature(sizes, f"{parent}/{name}", **CASES[name])
        assert run.done == 3
        found[name] = run.advance(3), _weights(run)
    return found


def _weights(run: Miniature) -> dict[str, Any]:
    named = [
        *run.model.module.named_parameters(),
        *(run.ema.state() if run.ema is not None else {}).items(),
    ]
    return {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each)
        .detach()
        .numpy()
        .copy()
        for name, each in named
    }


def _equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return Comparison(compare_tensors(SAME, found, wanted)).holds


SAME = Bound("weight", 0.0, "bit for bit", relative=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], tuple[str, Any]]:
    """The folder of runs in one process, each saved after step 3, and what they saw."""
    parent = tmp_path_factory.mktemp("alone")
    write_corpus(parent)
    begun: dict[str, Any] = {}

    def of(names: list[str]) -> tuple[str, Any]:
        if missing := [name for name in names if name not in begun]:
            begun.update(run_ranks(_begin, 1, ALONE, str(parent), missing)[0])
        return str(parent), begun

    return of


@pytest.mark.parametrize(
    "names", [FIRST, pytest.param(OTHERS, marks=pytest.mark.examples)], ids=len
)
def test_one_process_goes_on_bit_for_bit(
    names: list[str], alone: Callable[[list[str]], tuple[str, Any]]
) -> None:
    parent, begun = alone(names)
    then = run_ranks(_go_on, 1, ALONE, parent, names)[0]
    for name in names:
        curve, weights = begun[name]
        assert then[name][0] == curve[3:], name
        assert _equal(then[name][1], weights), name


# On shards and tp ranks together: what an optimizer does with copies or cp ranks is what it does with one process.
SHORT = [(MESHES[0], FIRST), pytest.param(MESHES[0], OTHERS, marks=pytest.mark.examples)]
LONG = [pytest.param(sizes, [*CASES], marks=pytest.mark.long) for sizes in MESHES[1:]]


@pytest.mark.parametrize(("sizes", "names"), [*SHORT, *LONG])
def test_every_mesh_follows_one_process_and_goes_on(
    sizes: Sizes,
    names: list[str],
    alone: Callable[[list[str]], tuple[str, Any]],
    tmp_path: Path,
) -> None:
    write_corpus(tmp_path)
    ranks = run_ranks(_begin, math.prod(sizes), sizes, str(tmp_path), names)
    then = run_ranks(_go_on, math.prod(sizes), sizes, str(tmp_path), names)[0]
    back = run_ranks(_go_on, 1, ALONE, str(tmp_path), names)[0]
    _, begun = alone(names)
    for name in names:
        curve, weights = ranks[0][name]
        assert all(_equal(rank[name][1], weights) for rank in ranks), (
            f"{name}: the ranks have different weights"
        )
        assert then[name][0] == curve[3:] and _equal(then[name][1], weights), (
            f"{name} did not go on bit for bit"
        )
        wanted, wanted_weights = begun[name]
        bound = Bound(
            "weight",
            WEIGHTS_BOUND.get(name, 1e-5),
            "rounding, which updates carry on",
            relative=False,
        )
        require(compare_tensors(bound, weights, wanted_weights), (name, sizes))
        require(compare_curves(curve, wanted), (name, sizes))
        require(compare_curves(curve[:3] + back[name][0], wanted), (name, "then one process"))


def _skipped(sizes: Sizes, parent: str, names: list[str]) -> dict[str, bool]:
    """For each optimizer whether a step with a loss that is not finite on one rank alone has changed anything."""
    import torch

    from threefold.checkpoint.state import state_of
    from threefold.training.step import TrainStep

    found = {}
    for name in names:
        for steps in (0, 1):
            run = Miniature(sizes, f"{parent}/{name} {steps}", **CASES[name])
            run.advance(steps)

            def loss(logits: Any, batch: Any, run: Miniature = run) -> Any:
                wrong = float("nan") if run.mesh.rank in (0, run.mesh.topology.tp - 1) else 1.0
                return logits.square().sum() * wrong, batch["labels"].numel()

            step = TrainStep(run.model, run.optimizer, loss=loss, ema=run.ema)

            def state(run: Miniature = run) -> dict[str, Any]:
                whole = state_of(run.model.module, run.optimizer) | (
                    run.ema.state() if run.ema is not None else {}
                )
                return {
                    key: (each.to_local() if hasattr(each, "to_local") else each)
                    for key, each in whole.items()
                }

            before = {key: value.clone() for key, value in state().items()}
            batch = {
                key: value for key, value in next(run._batches).items() if key != "indices"
            }
            assert not math.isfinite(step.run([batch], lr=1.0).grad_norm.item())
            after = state()
            same = before.keys() == after.keys() and all(
                torch.equal(value, after[key]) for key, value in before.items()
            )
            found[f"{name} {steps}"] = same
    return found


@pytest.mark.parametrize(
    "sizes", [MESHES[0], pytest.param(ALONE, marks=pytest.mark.examples)], ids=str
)
def test_a_step_that_is_not_finite_changes_nothing(sizes: Sizes, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    for rank in run_ranks(_skipped, math.prod(sizes), sizes, str(tmp_path), FIRST):
        assert rank == dict.fromkeys(rank, True) and len(rank) == 2 * len(FIRST)


def _many_at_a_time() -> dict[str, float]:
    """Of each optimizer: the largest difference after three steps on shards, to one tensor at a time."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from threefold.optim.classes import kernel_of

    kinds = (
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.RAdam,
    )
    found: list[Difference] = []
    for kind in (*kinds, torch.optim.Adamax, torch.optim.ASGD, torch.optim.Adadelta):
        weights = []
        for arguments in ({"foreach": False}, kernel_of(kind, device="cuda", sharded=True)):
            torch.manual_seed(0)
            module = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
            fully_shard(module)
            optimizer: Any = kind(module.parameters(), lr=0.01, weight_decay=0.1, **arguments)
            for _ in range(3):
                module(torch.randn(5, 8)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(
                torch.cat([each.full_tensor().flatten() for each in module.parameters()])
            )
        bound = Bound("weight", 1e-6, "a rounding of float32", relative=False)
        found += compare_tensors(
            bound, {kind.__name__: weights[1]}, {kind.__name__: weights[0]}
        )
    return found


def test_operations_on_many_shards_are_those_on_single_ones() -> None:
    require(run_ranks(_many_at_a_time, 2)[0])
