"""Compiled layers: no graph breaks in a step, one graph for the layers of a kind, the numbers of uncompiled ones.

Not by torch's inductor, which takes a minute here: `aot_eager` traces forward and backward, and runs what it traced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.reference import compare_curves, curve_bounds, require
from ranks.shared_memory import as_if_shared
from ranks.spawn import run_ranks
from threefold.config.loading import validate
from threefold.model.compiled import MANY, Recompiled
from threefold.plan.choices import Device, compiled

pytestmark = pytest.mark.ranks

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "initializer_range": 0.2,
}
LLAMA, QWEN3 = {"model_type": "llama", **SIZES}, {"model_type": "qwen3", **SIZES}
GEMMA2 = {"model_type": "gemma2", "sliding_window": 8, **SIZES}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTRAL, QWEN3_MOE = (
    {"model_type": "mixtral", "num_local_experts": 4, **SIZES},
    {"model_type": "qwen3_moe", **SIZES},
)
QWEN3_MOE |= EXPERTS
# Mesh, model, activation checkpointing, and how many graphs: one for each kind of layer.
Case = tuple[dict[str, Any], dict[str, Any], str, int]
ALONE: list[Case] = [
    ({}, LLAMA, "none", 1),
    ({}, QWEN3, "full", 1),
    ({}, GEMMA2, "selective", 2),
    ({}, MIXTRAL, "none", 1),
    ({}, QWEN3_MOE, "full", 1),
    ({}, LLAMA, "offload", 1),
]
CASES: list[Case] = [
    ({"dp": 2}, LLAMA, "full", 1),
    ({"dp": 2, "dp_shard": 2}, LLAMA, "selective", 1),
    ({"dp": 2, "dp_shard": 2}, MIXTRAL, "full", 1),
    ({"tp": 2}, LLAMA, "none", 1),
    ({"tp": 2, "sequence_parallel": True}, LLAMA, "full", 1),
    ({"tp": 2, "sequence_parallel": "async"}, LLAMA, "none", 1),
    ({"tp": 2}, QWEN3, "full", 1),
    ({"tp": 2}, MIXTRAL, "selective", 1),
    ({"cp": 2}, LLAMA, "full", 1),
    ({"cp": 2}, GEMMA2, "none", 2),
    ({"cp": 2, "cp_method": "ulysses"}, LLAMA, "none", 1),
]
# One of each mechanism: copies, shards, experts on shards, split products in both forms, keys of cp ranks and windows.
SPLIT = [CASES[number] for number in (0, 2, 4, 5, 9, 10)]


def _losses(config: Any, mesh: Any, documents: bool) -> list[tuple[float, float]]:
    import torch

    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep, mean_loss

    model = build(config, load.read_config(config.model), mesh)
    step = TrainStep(model, build_optimizer(model.module, config.optimizer))
    draws = torch.Generator().manual_seed(5)
    found = []
    for _ in range(2):
        tokens = torch.randint(67, (4, 33), generator=draws)
        batch = {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(32).expand(4, -1),
        }
        if documents:
            batch["document_ids"] = (torch.arange(32) // 10).expand(4, -1)
        rows = slice(mesh.dp_rank, None, mesh.dp_size)
        result = step.run([{name: values[rows] for name, values in batch.items()}], lr=1e-2)
        found.append((mean_loss(result, mesh), result.grad_norm.item()))
    return found


def _traced(cases: list[Case]) -> list[tuple[dict[str, int], int, list[Any], list[Any]]]:
    """Of each case: graph breaks, graphs, and the losses and norms of compiled layers and of the layers as they are."""
    import torch
    import torch._dynamo

    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh

    # The backend of a test: there is no setting for it.
    by_function = torch.compile
    torch.compile = lambda function: by_function(function, backend="aot_eager")  # type: ignore[assignment]
    found = []
    kernels = as_if_shared()
    for sizes, model, recomputed, _ in cases:
        axes = ("dp", "dp_shard", "cp", "tp")
        mesh = init_mesh(
            device="cpu", **{name: size for name, size in sizes.items() if name in axes}
        )
        train = {"activation_checkpointing": recomputed}
        values: dict[str, Any] = {"model": {"config": model}, "data": {"seq_len": 32}}
        values["mesh"] = {name: value for name, value in sizes.items() if name not in axes}
        documents = model is GEMMA2
        plain = _losses(
            Config.model_validate({**values, "train": {**train, "compile": False}}),
            mesh,
            documents,
        )
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        own = _losses(
            Config.model_validate({**values, "train": {**train, "compile": True}}),
            mesh,
            documents,
        )
        counters = torch._dynamo.utils.counters
        found.append(
            (dict(counters["graph_break"]), counters["stats"]["unique_graphs"], own, plain)
        )
    del kernels
    return found


@pytest.mark.parametrize(
    "cases",
    [
        ALONE,
        pytest.param(SPLIT, marks=pytest.mark.examples),
        pytest.param(CASES, marks=pytest.mark.long),
    ],
    ids=["one process", "two ranks", "two ranks, every case"],
)
def test_no_graph_breaks_in_a_step(cases: list[Case]) -> None:
    ranks = 1 if cases is ALONE else 2
    for case, (breaks, graphs, own, plain) in zip(
        cases, run_ranks(_traced, ranks, cases)[0], strict=True
    ):
        assert (breaks, graphs) == ({}, case[3]), case
        require(
            compare_curves(own, plain, curve_bounds(1e-5, 1e-4, "the same operations, fused")),
            case,
        )


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    def choice(asked: bool | str, device: str, **mesh: int) -> tuple[bool, str]:
        return compiled(
            validate({"train": {"compile": asked}, "mesh": mesh}), Device.here(device)
        )

    assert choice(True, "cpu") == (True, "as given")
    assert choice(False, "cuda") == (False, "as given")
    assert choice("auto", "cpu") == (False, "on a cpu it takes longer than a short run gains")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choice("auto", "cuda") == (
        False,
        "triton, which compiles for CUDA, is not installed",
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choice("auto", "cuda") == (True, "on CUDA, one layer at a time")
    assert not choice("auto", "cuda", ep=2, tp=2)[0]


def _again(lengths: list[int]) -> tuple[int, list[str]]:
    import torch

    said: list[str] = []
    watch = Recompiled(said.append)

    def doubled(values: torch.Tensor, factor: str) -> torch.Tensor:
        return values * len(factor)

    compiled = torch.compile(doubled, backend="eager", dynamic=False)
    torch._dynamo.config.recompile_limit = 32
    for length in lengths:
        compiled(torch.ones(length), "x" * length)
    watch.look()
    return watch.look(), said


def test_what_is_compiled_again_is_counted_and_said_once() -> None:
    assert run_ranks(_again, 1, [3, 3, 3])[0] == (0, [])
    assert run_ranks(_again, 1, [2, 3, 4])[0] == (2, [])
    count, said = run_ranks(_again, 1, list(range(2, 2 + MANY + 2)))[0]
    assert count == MANY + 1
    (line,) = said
    assert (
        f"doubled was compiled again {MANY + 1} times" in line
        and "--train.compile false" in line
    )


def _kept(cache: str, own: str | None) -> str:
    import os

    from threefold.mesh.environment import keep_compiled

    os.environ["XDG_CACHE_HOME"] = cache
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    if own is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own
    keep_compiled()
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR", "torch's own")


def test_what_was_compiled_is_kept_in_the_users_cache(tmp_path: Path) -> None:
    cache = str(tmp_path)
    assert run_ranks(_kept, 1, cache, None)[0] == f"{cache}/threefold/compiled"
    assert run_ranks(_kept, 1, cache, "/elsewhere")[0] == "/elsewhere"
    (tmp_path / "file").touch()
    assert run_ranks(_kept, 1, f"{cache}/file", None)[0] == "torch's own"


@pytest.mark.parametrize("model", [MIXTRAL, QWEN3_MOE])
def test_experts_in_float32_are_not_compiled_on_cuda(model: dict[str, Any]) -> None:
    import torch

    from threefold.model import load
    from threefold.model.compiled import compile_layers, waiting_layers

    def outline(values: dict[str, Any]) -> Any:
        return load.outline(load.read_config(validate({"model": {"config": values}}).model))

    experts, dense = outline({**model, "num_hidden_layers": 2}), outline(LLAMA)
    layers = load.layers_of(experts)
    assert waiting_layers(experts, dtype=torch.float32, device="cuda") == layers
    assert waiting_layers(experts, dtype=torch.bfloat16, device="cuda") == []
    assert waiting_layers(experts, dtype=torch.float32, device="cpu") == []
    assert waiting_layers(dense, dtype=torch.float32, device="cuda") == []
    compile_layers(experts, left_out=layers[:1])
    assert [each._compiled_call_impl is not None for each in layers] == [False, True]
