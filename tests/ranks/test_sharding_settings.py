"""Offloaded shards and accumulated gradients change where things are and when they move, not what is computed."""

from __future__ import annotations

from typing import Any

import pytest

from ranks.keeping import LLAMA, Miniature, Sizes, write_corpus
from ranks.reference import compare_curves, curve_bounds, require
from ranks.spawn import run_ranks
from threefold.config.schema import Config
from threefold.errors import ConfigError
from threefold.model import data_parallel
from threefold.plan import choices

pytestmark = pytest.mark.ranks

DEEP = {**LLAMA, "num_hidden_layers": 4}


def _steps(sizes: Sizes, folder: str, settings: dict[str, Any]) -> Any:
    choices.UNIT_BYTES = 1  # every layer is gathered by itself, small as it is
    run = Miniature(sizes, folder, model={"config": DEEP}, mesh=settings)
    return [(loss, norm) for loss, norm, _ in run.advance(3)]


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (1, 2, 1, 2)], ids=str)
def test_offloaded_shards_give_the_same_bits(
    sizes: Sizes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder)
    ranks = sizes[0] * sizes[1] * sizes[3]
    plain = run_ranks(_steps, ranks, sizes, str(folder / "plain"), {})[0]
    assert (
        run_ranks(_steps, ranks, sizes, str(folder / "other"), {"cpu_offload": True})[0]
        == plain
    )


def _accumulated(sizes: Sizes, folder: str, micro_batch: int) -> Any:
    """Of two steps of four rows a rank: curve, bytes of gradients before the second micro-batch, reductions, size."""
    import torch.distributed as dist

    choices.UNIT_BYTES = 1
    train = {"global_batch": 4 * sizes[0] * sizes[1], "micro_batch": micro_batch}
    run = Miniature(sizes, folder, micro_batch=micro_batch, model={"config": DEEP}, train=train)
    counts = {"over shards": 0, "over copies": 0}
    copies = run.mesh.group("dp_replicate")
    # torch 2.13 gave it another name.
    name = (
        "reduce_scatter_single"
        if hasattr(dist, "reduce_scatter_single")
        else "reduce_scatter_tensor"
    )
    scatter, reduce, enter = getattr(dist, name), dist.all_reduce, run.step.progress.enter
    held: list[int] = []

    def scattered(*args: Any, **settings: Any) -> Any:
        counts["over shards"] += 1
        return scatter(*args, **settings)

    def reduced(*args: Any, **settings: Any) -> Any:
        counts["over copies"] += copies is not None and settings.get("group") is copies
        return reduce(*args, **settings)

    def entered(phase: Any, **more: Any) -> None:
        if phase == "forward":
            held.append(_held(run.model.module))
        enter(phase, **more)

    setattr(dist, name, scattered)
    dist.all_reduce = reduced
    run.step.progress.enter = entered  # type: ignore[method-assign]
    curve = [(loss, norm) for loss, norm, _ in run.advance(2)]
    return curve, held[1], counts, sum(each.numel() for each in run.model.module.parameters())


def _held(model: Any) -> int:
    """Bytes of gradients on this rank: of shards, whole ones, and shards that wait for the other copies."""
    states = [
        module._get_fsdp_state()
        for module in model.modules()
        if hasattr(module, "_get_fsdp_state")
    ]
    # torch 2.11 has one group for each.
    each_of = [
        getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for state in states
    ]
    groups = [group for found in each_of for group in found if group is not None]
    parameters = [each for group in groups for each in group.fsdp_params]
    whole = [each.unsharded_accumulated_grad for each in parameters]
    whole += [
        each.unsharded_param.grad for each in parameters if hasattr(each, "_unsharded_param")
    ]
    waiting = [group._partial_reduce_output for group in groups]
    shards = [each.sharded_param.grad for each in parameters]
    parts = [each.to_local() for each in shards if each is not None]
    # By their memory: some versions of torch hold a gradient under two names.
    found = {
        each.data_ptr(): each.nbytes
        for each in (*whole, *waiting, *parts)
        if each is not None and each.numel()
    }
    return sum(found.values())


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1), (2, 2, 1, 1)], ids=str)
def test_gradients_accumulate_in_shards(
    sizes: Sizes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder)
    ranks = sizes[0] * sizes[1]
    given = {size: (sizes, str(folder / str(size)), size) for size in (2, 4)}
    found = {size: run_ranks(_accumulated, ranks, *each)[0] for size, each in given.items()}
    # Of four layers, the embedding, and the norm with the head.
    units, steps, copies = (6, 2, int(sizes[0] > 1))
    (curve, held, counts, size), (whole, _, whole_counts, _) = found.values()
    require(
        compare_curves(
            curve, whole, curve_bounds(1e-5, 1e-5, "the same sums, reduced in two parts")
        )
    )
    # Of a matrix with an odd number of rows, one rank has more.
    assert held == pytest.approx(4 * size / 2, rel=2e-3)
    assert counts == {"over shards": 2 * units * steps, "over copies": copies * units * steps}
    assert whole_counts == {"over shards": units * steps, "over copies": copies * units * steps}


def _said(device: str, train: Any = None, **settings: Any) -> str:
    config = Config.model_validate(
        {"mesh": settings, "train": {"global_batch": 8, **(train or {})}}
    )
    found = list(data_parallel.problems(config, device=device))
    return str(ConfigError.of(found)) if found else ""


def test_settings_without_effect_are_refused() -> None:
    assert _said("cuda", cpu_offload=True) == ""
    assert _said("cuda", {"activation_checkpointing": "offload"}) == ""
    assert _said("cpu", cpu_offload=True) == (
        "mesh.cpu_offload = true has no effect on a CPU\n"
        "  expected: an accelerator with memory of its own\n"
        "  fix: leave mesh.cpu_offload out"
    )
    assert _said("cpu", {"activation_checkpointing": "offload"}) == (
        "train.activation_checkpointing = offload has no effect on a CPU\n"
        "  expected: an accelerator with memory of its own\n"
        "  fix: --train.activation_checkpointing full"
    )
