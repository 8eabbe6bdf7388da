"""What only a CUDA device shows: kernels and types that a CPU does not have. Skipped, with the reason, without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranks.reference import compare_curves, curve_bounds, require
from ranks.spawn import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: kernels for it are not run"
    ),
]
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "mistral": {"model_type": "mistral", "sliding_window": 200, **SIZES},
    "gemma2": {"model_type": "gemma2", "sliding_window": 200, "head_dim": 64, **SIZES},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "sliding_window": 128,
        "head_dim": 64,
        "num_local_experts": 4,
        **SIZES,
    },
}
STEPS, ROWS, SEQ_LEN = 8, 4, 512
# Of bfloat16 against float32 over a few steps: 8 bits of mantissa in every product (docs/models.md).
BF16_LOSS, BF16_NORM = 2e-2, 5e-2


def _curve(
    name: str, settings: dict[str, Any], documents: bool, **sections: Any
) -> list[tuple[float, float]]:
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep, mean_loss

    mesh = init_mesh(device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    config = validate(
        {
            "model": {"config": MODELS[name], **settings},
            "optimizer": {"lr": 1e-3},
            "data": {"seq_len": SEQ_LEN},
            "train": sections.get("train", {}),
            "mesh": sections.get("mesh", {}),
        }
    )
    model = build(config, load.read_config(config.model), mesh)
    step = TrainStep(model, build_optimizer(model.module, config.optimizer), grad_clip=1.0)
    generator = torch.Generator().manual_seed(3)
    curve = []
    for _ in range(STEPS):
        tokens = torch.randint(4096, (ROWS, SEQ_LEN + 1), generator=generator)
        batch = {
            "input_ids": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": torch.arange(SEQ_LEN).expand(ROWS, -1).contiguous(),
        }
        if documents:
            batch["document_ids"] = (
                torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.01
            ).cumsum(1)
        result = step.run([batch], lr=1e-3)
        curve.append((mean_loss(result, mesh), result.grad_norm.item()))
    return curve


@pytest.mark.parametrize("documents", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_give_the_gradients_of_masks_in_memory(name: str, documents: bool) -> None:
    in_memory = run_ranks(_curve, 1, name, {"attention": "sdpa"}, documents)[0]
    by_blocks = run_ranks(_curve, 1, name, {"attention": "flex"}, documents)[0]
    require(
        compare_curves(
            by_blocks, in_memory, curve_bounds(1e-3, 1e-2, "kernels that sum in another order")
        )
    )


def test_documents_by_lengths_follow_those_by_blocks() -> None:
    narrow = {"dtype": "bfloat16"}
    by_blocks = run_ranks(_curve, 1, "llama", {**narrow, "attention": "flex"}, True)[0]
    by_lengths = run_ranks(_curve, 1, "llama", {**narrow, "attention": "varlen"}, True)[0]
    require(
        compare_curves(
            by_lengths,
            by_blocks,
            curve_bounds(BF16_LOSS, BF16_NORM, "sums rounded to bfloat16"),
        )
    )


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_bfloat16_follows_float32(name: str) -> None:
    exact = run_ranks(_curve, 1, name, {"dtype": "float32"}, False)[0]
    rounded = run_ranks(_curve, 1, name, {"dtype": "bfloat16"}, False)[0]
    require(
        compare_curves(
            rounded, exact, curve_bounds(BF16_LOSS, BF16_NORM, "sums rounded to bfloat16")
        )
    )


def _with_peak(name: str, sections: dict[str, Any]) -> tuple[list[tuple[float, float]], int]:
    torch.cuda.reset_peak_memory_stats()
    return _curve(
        name, {"dtype": "bfloat16"}, False, **sections
    ), torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    ("plain", "moved"),
    [
        (
            {"train": {"activation_checkpointing": "full"}},
            {"train": {"activation_checkpointing": "offload"}},
        ),
        ({}, {"mesh": {"cpu_offload": True}}),
    ],
    ids=["activations", "shards"],
)
def test_what_waits_on_the_host_changes_no_curve_and_frees_memory(
    plain: Any, moved: Any
) -> None:
    here, peak = run_ranks(_with_peak, 1, "llama", plain)[0]
    there, less = run_ranks(_with_peak, 1, "llama", moved)[0]
    for (loss, norm), (expected_loss, expected_norm) in zip(there, here, strict=True):
        assert (
            abs(loss - expected_loss) <= 1e-2
            and abs(norm - expected_norm) <= 1e-2 * expected_norm
        )
    assert less < peak


def _snapshot(folder: str) -> str:
    from pathlib import Path

    from threefold.run.memory_check import _snapshot as write

    torch.empty(1024, device="cuda")
    return write(Path(folder) / "memory" / "rank-0000.pickle")


def test_snapshot_of_the_memory_is_written(tmp_path: Any) -> None:
    assert "memory_viz" in run_ranks(_snapshot, 1, str(tmp_path))[0]
    assert (tmp_path / "memory" / "rank-0000.pickle").stat().st_size > 0
