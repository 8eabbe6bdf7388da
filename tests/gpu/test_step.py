"""A step on a CUDA device: nothing waits for it; compiled layers and products in 8 bits stay near the plain ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.reference import require
from ranks.spawn import run_ranks
from threefold.check.compare import Bound, compare_numbers
from threefold.training.progress import DeviceForward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device: whether a step waits for one is not run",
    ),
]
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "output_router_logits": True,
}


# Of bfloat16 in another order of sums; and of products whose factors have 3 bits of mantissa.
COMPILED = Bound("loss", 2e-2, "fused kernels round bfloat16 elsewhere", relative=False)
FLOAT8 = Bound("loss", 5e-2, "products of 8 bits", relative=False)


def _step(model: dict[str, Any], settings: dict[str, Any], documents: bool) -> float:
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep, mean_loss

    mesh = init_mesh(device="cuda")
    config = validate({"model": {"config": model, **settings}, "data": {"seq_len": 256}})
    built = build(config, load.read_config(config.model), mesh)
    step = TrainStep(built, build_optimizer(built.module, config.optimizer))
    tokens = torch.randint(4096, (4, 257))
    batch = {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(256).expand(4, -1),
    }
    if documents:
        batch["document_ids"] = (torch.arange(256) // 60).expand(4, -1)
    for _ in range(2):  # what is made once may wait
        step.run([batch, batch], lr=1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step.run([batch, batch], lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return mean_loss(result, mesh)


def _kept(folder: str, device: str) -> tuple[float, float]:
    """The mean loss of a step by its rows, kept while the device may not be waited for, and by the step itself."""
    from threefold.audit.record import Segment, SegmentLine
    from threefold.audit.row_losses import read
    from threefold.config.loading import validate
    from threefold.data.order.order import Order, Place
    from threefold.mesh.mesh import init_mesh
    from threefold.mesh.topology import Topology
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.row_losses import KeptRows
    from threefold.training.step import TrainStep, mean_loss

    mesh = init_mesh(device=device)
    config = validate(
        {"model": {"config": {"model_type": "llama", **SIZES}}, "data": {"seq_len": 256}}
    )
    built = build(config, load.read_config(config.model), mesh)
    step = TrainStep(built, build_optimizer(built.module, config.optimizer))
    tokens = torch.randint(4096, (4, 257))
    batch = {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(256).expand(4, -1),
    }
    kept = KeptRows(Path(folder), mesh, segment=1)
    step.run([batch, batch], lr=1e-3)  # what is made once may wait
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        result = step.run([batch, batch], lr=1e-3)
        kept.after(1, result, [batch, batch], now=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = mean_loss(result, mesh)
    kept.close()
    order = Order(8, 8, seed=0, shuffle=False)
    start = SegmentLine.of(order, Place(0, 0), first_step=1, topology=Topology(), every=1)
    losses = read(Path(folder), [Segment(start, (), None)]).of(1)
    assert losses is not None and len(losses.sums) == 8
    return float(losses.sums.sum() / losses.counts.sum()), expected


def test_losses_of_rows_are_kept_without_a_wait(tmp_path: Path) -> None:
    ((found, expected),) = run_ranks(_kept, 1, str(tmp_path), "cuda")
    assert found == pytest.approx(expected, rel=1e-6)


def test_device_time_is_that_of_forwards() -> None:
    clock = DeviceForward(partial(torch.cuda.Event, enable_timing=True))
    factor = torch.randn(4096, 4096, device="cuda")
    factor @ factor  # what is made once
    torch.cuda.synchronize()
    for products in (1, 40):
        clock.enter("forward")
        for _ in range(products):
            factor @ factor
        clock.enter("backward")
        factor @ factor
        found = clock.take_s()
        assert 0 < found < 5
        if products == 1:
            once = found
    assert found > 5 * once


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize(
    "kind", [{"model_type": "llama"}, {"model_type": "qwen3_moe", **EXPERTS}], ids=str
)
def test_a_step_waits_for_no_device(kind: dict[str, Any], documents: bool, dtype: str) -> None:
    assert run_ranks(_step, 1, {**SIZES, **kind}, {"dtype": dtype}, documents)[0] > 0


def _curve(train: dict[str, Any]) -> tuple[list[float], int]:
    """The losses of some steps of a Llama whose layers are large enough for 8 bits, and how often was recompiled."""
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.model.compiled import Recompiled
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep, mean_loss

    mesh = init_mesh(device="cuda")
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
    }
    model = {"config": {"model_type": "llama", **SIZES, **sizes}, "dtype": "bfloat16"}
    config = validate({"model": model, "data": {"seq_len": 256}, "train": train})
    built = build(config, load.read_config(config.model), mesh)
    step = TrainStep(built, build_optimizer(built.module, config.optimizer))
    draws = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(6):
        tokens = torch.randint(4096, (4, 257), generator=draws)
        batch = {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(256).expand(4, -1),
        }
        losses.append(mean_loss(step.run([batch], lr=1e-3), mesh))
    return losses, Recompiled(print).look()


def test_compiled_layers_follow_the_plain_ones_and_are_compiled_once() -> None:
    (plain, _), (compiled, again) = (
        run_ranks(_curve, 1, {"compile": compile})[0] for compile in (False, True)
    )
    require(compare_numbers(COMPILED, compiled, plain))
    assert again == 0


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_distance_of_float8(recipe: str) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("products in 8 bits need capability 8.9")
    exact, rounded = (run_ranks(_curve, 1, {"float8": each})[0][0] for each in ("none", recipe))
    assert exact != rounded
    require(compare_numbers(FLOAT8, rounded, exact))
