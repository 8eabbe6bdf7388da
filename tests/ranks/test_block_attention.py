"""Masks by blocks hide and show what masks in memory do, at true positions; forward only, as a CPU has no backward."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from ranks.reference import TINY_LLAMA, make_batches
from ranks.spawn import run_ranks
from threefold.config.loading import validate
from threefold.errors import ConfigError
from threefold.model import load
from threefold.model.context_parallel import flex

pytestmark = pytest.mark.ranks

WINDOW = {**TINY_LLAMA, "model_type": "mistral", "sliding_window": 5}
CAPPED = {
    **TINY_LLAMA,
    "model_type": "gemma2",
    "head_dim": 8,
    "sliding_window": 5,
    "query_pre_attn_scalar": 8,
}
CAPPED |= {"attn_logit_softcapping": 2.0}
SINKS = {**TINY_LLAMA, "model_type": "gpt_oss", "head_dim": 8, "sliding_window": 5}
SINKS |= {"num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = {"causal": TINY_LLAMA, "window": WINDOW, "caps": CAPPED, "sinks": SINKS}


def _losses(cp: int, method: str, traced: bool) -> dict[str, tuple[float, float]]:
    """For each model, with whole rows and with documents, the loss with masks in memory and by blocks.

    Args:
        traced: as torch does by default, flex_attention is traced by dynamo, and run without a compiler.
    """
    import torch
    from torch.nn.attention import flex_attention

    from threefold.mesh.mesh import init_mesh
    from threefold.model.build import build
    from threefold.training.evaluation import EvalStep

    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = not traced
    mesh = init_mesh(cp=cp, device="cpu")
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(67, (3, 33), generator=generator)
    positions = torch.arange(32).expand(3, -1).contiguous()
    batch = {
        "input_ids": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "position_ids": positions,
    }
    documents = {"document_ids": (torch.rand(3, 32, generator=generator) < 0.15).cumsum(1)}
    found: dict[str, list[float]] = {}
    for name, model in MODELS.items():
        for kernel in ("sdpa", "flex"):
            asked = {"config": model, "attention": kernel}
            config = validate(
                {"model": asked, "mesh": {"cp_method": method}, "data": {"seq_len": 32}}
            )
            built = build(config, load.read_config(config.model), mesh)
            for kind, rows in (("whole rows", batch), ("documents", batch | documents)):
                total, count = EvalStep(built)([rows])
                found.setdefault(f"{name}, {kind}", []).append(total / count)
    return {name: (in_memory, by_blocks) for name, (in_memory, by_blocks) in found.items()}


def test_blocks_hide_what_masks_hide() -> None:
    # One process traces all that a mask and a score are made of; ranks only call the same functions at other places.
    alone = run_ranks(_losses, 1, 1, "auto", True)[0]
    for cp, method in ((1, "auto"), (2, "gather"), (2, "ulysses")):
        found = run_ranks(_losses, cp, cp, method, False)[0] if cp > 1 else alone
        for name, (in_memory, by_blocks) in found.items():
            assert abs(by_blocks - in_memory) <= 1e-5, (method, name)
            assert abs(by_blocks - alone[name][0]) <= 1e-5, (method, name)
    for shown, hidden in (
        ("causal, whole rows", "window, whole rows"),
        ("causal, whole rows", "causal, documents"),
    ):
        assert abs(alone[shown][0] - alone[hidden][0]) > 1e-3, (
            f"{hidden} hides nothing: the test shows nothing"
        )


def test_choice_and_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"triton": True}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there.get(name))

    def said(device: str, asked: str = "flex", **extra: Any) -> str:
        architecture = load.read_config(
            validate({"model": {"config": {**TINY_LLAMA, **extra}}}).model
        )
        found = flex.problems(architecture, asked, device=device)
        return str(ConfigError.of(found)) if found else ""

    assert said("cuda") == said("cuda", "varlen") == ""
    assert said("cpu") == (
        "model.attention = flex, but flex_attention has no backward on a CPU\n"
        "  expected: a CUDA device with triton, and a model without attention dropout\n"
        "  fix: --model.attention auto"
    )
    assert said("cpu", "varlen").startswith(
        "model.attention = varlen, but flex_attention has no backward on a CPU\n"
    )
    there.clear()
    assert said("cuda").startswith(
        "model.attention = flex, but triton, which compiles flex_attention, is not installed"
    )
    there["triton"] = True
    assert said("cuda", attention_dropout=0.1).startswith(
        "model.attention = flex, but the model drops attention weights"
    )


def _made(kernel: str, settings: dict[str, Any]) -> tuple[int, int, bool]:
    """How many masks were made, how many of them by blocks, and whether any inside of a graph: two micro-batches."""
    import torch

    from threefold.mesh.mesh import init_mesh
    from threefold.model.build import build
    from threefold.model.context_parallel.local_attention import BatchMasks
    from threefold.optim.build import build_optimizer
    from threefold.training.evaluation import EvalStep
    from threefold.training.step import TrainStep

    made, traced = {"masks": 0, "by blocks": 0}, []

    def counted(kind: str, function: Any) -> Any:
        def count(*arguments: Any, **keywords: Any) -> Any:
            made[kind] += 1
            traced.append(torch.compiler.is_compiling())
            return function(*arguments, **keywords)

        return count

    BatchMasks.mask = counted("masks", BatchMasks.mask)  # type: ignore[method-assign]
    flex.create_block_mask = counted("by blocks", flex.create_block_mask)
    four_layers = {**CAPPED, "num_hidden_layers": 4}
    asked = {"config": four_layers, "attention": kernel}
    config = validate({"model": asked, "data": {"seq_len": 32}, "train": settings})
    model = build(config, load.read_config(config.model), init_mesh(device="cpu"))
    batches = make_batches(steps=2, rows=3, seq_len=32)
    batches = [{**rows, "document_ids": rows["position_ids"] // 9} for rows in batches]
    if kernel == "flex":
        EvalStep(model)(batches)  # without a backward, which a CPU does not have
    else:
        TrainStep(model, build_optimizer(model.module, config.optimizer), grad_clip=1.0).run(
            batches, lr=1e-3
        )
    return made["masks"], made["by blocks"], any(traced)


def test_a_mask_is_made_once_for_a_kind_of_layer_and_outside_of_graphs() -> None:
    """gemma2 has two kinds, in two layers each; what is computed again in the backward takes the mask that it had."""
    kinds, micro_batches = 2, 2
    assert run_ranks(_made, 1, "flex", {})[0] == (
        kinds * micro_batches,
        kinds * micro_batches,
        False,
    )
    for settings in (
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "compile": True},
    ):
        assert run_ranks(_made, 1, "sdpa", settings)[0] == (kinds * micro_batches, 0, False), (
            settings
        )
