"""One CUDA device against the CPU: the same curve in float32, in bfloat16 within its rounding, and the same state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.reference import compare_curves, curve_bounds, require
from ranks.spawn import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: it is not compared with the CPU"
    ),
]
DEVICE = "cuda"
_SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.05,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 24},
    "gemma2": {"sliding_window": 24, "head_dim": 32},
    "gemma3_text": {"sliding_window": 24, "head_dim": 32},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"sliding_window": 24, "head_dim": 32, "num_local_experts": 4},
}
STEPS, ROWS, SEQ_LEN = 6, 4, 64
# float32 on both: DESIGN's parity. bfloat16: 8 bits of mantissa in every product (docs/models.md).
BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (2e-2, 5e-2)}


def _batches() -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(384, (ROWS, SEQ_LEN + 1), generator=draws)
        found.append(
            {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
        )
    return found


def _curve(
    family: str, dtype: str, device: str, documents: bool = False
) -> list[tuple[float, float]]:
    import threefold

    torch.backends.cuda.matmul.allow_tf32 = False
    mesh = threefold.init_mesh(device=device)
    config = {"model_type": family, **_SIZES, **FAMILIES[family]}
    model = threefold.load_model(config=config, mesh=mesh, dtype=dtype, admission="off")
    step = threefold.TrainStep(model, lr=1e-3)
    curve = []
    for batch in _batches():
        if documents:
            batch["document_ids"] = (torch.arange(SEQ_LEN) // 20).expand(ROWS, -1).contiguous()
            batch["position_ids"] = (torch.arange(SEQ_LEN) % 20).expand(ROWS, -1).contiguous()
        found = step(batch)
        curve.append((found.loss, found.grad_norm))
    mesh.close()
    return curve


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("documents", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("family", FAMILIES)
def test_device_follows_the_cpu(family: str, documents: bool, dtype: str) -> None:
    expected = run_ranks(_curve, 1, family, "float32", "cpu", documents)[0]
    found = run_ranks(_curve, 1, family, dtype, DEVICE, documents)[0]
    require(
        compare_curves(
            found, expected, curve_bounds(*BOUNDS[dtype], "kernels of another device")
        )
    )


def _loop(folder: str, device: str, until: int) -> list[float]:
    import threefold

    mesh = threefold.init_mesh(device=device)
    model = threefold.load_model(
        config={"model_type": "llama", **_SIZES}, mesh=mesh, admission="off"
    )
    step = threefold.TrainStep(model, lr=1e-3)
    found = threefold.load(folder, model=model, optimizer=step)
    done = found.step if found is not None else 0
    losses = [step(batch).loss for batch in _batches()[done:until]]
    threefold.save(folder, model=model, step=until, optimizer=step, wait=True)
    mesh.close()
    return losses


@pytest.mark.parametrize(
    "order", [(DEVICE, "cpu"), ("cpu", DEVICE)], ids=["device to CPU", "CPU to device"]
)
def test_checkpoint_crosses_devices(order: tuple[str, str], tmp_path: Path) -> None:
    unbroken = run_ranks(_loop, 1, str(tmp_path / "unbroken"), "cpu", STEPS)[0]
    begun = run_ranks(_loop, 1, str(tmp_path / "run"), order[0], STEPS // 2)[0]
    ended = run_ranks(_loop, 1, str(tmp_path / "run"), order[1], STEPS)[0]
    assert [*begun, *ended] == pytest.approx(unbroken, abs=1e-4)


def _trained(keys: dict[str, Any], device: str) -> list[tuple[float, float]]:
    import threefold
    from threefold.config.loading import validate
    from threefold.model import load
    from threefold.model.build import build
    from threefold.training.step import TrainStep, mean_loss

    torch.backends.cuda.matmul.allow_tf32 = False
    mesh = threefold.init_mesh(device=device)
    model_keys = {"config": {"model_type": "llama", **_SIZES}, **keys.get("model", {})}
    config = validate({"data": {"seq_len": SEQ_LEN}, **keys, "model": model_keys})
    model = build(config, load.read_config(config.model), mesh)
    step, curve = TrainStep(model), []
    for batch in _batches():
        batch["position_ids"] = torch.arange(SEQ_LEN).expand(ROWS, -1).contiguous()
        result = step.run([batch], lr=1e-3)
        curve.append((mean_loss(result, mesh), result.grad_norm.item()))
    mesh.close()
    return curve


def test_offloaded_activations_are_those_that_were_kept() -> None:
    kept = run_ranks(_trained, 1, {"train": {"activation_checkpointing": "full"}}, DEVICE)[0]
    offloaded = run_ranks(
        _trained, 1, {"train": {"activation_checkpointing": "offload"}}, DEVICE
    )[0]
    assert offloaded == kept


def test_offloaded_weights_follow_those_on_the_device() -> None:
    kept = run_ranks(_trained, 1, {}, DEVICE)[0]
    offloaded = run_ranks(_trained, 1, {"mesh": {"cpu_offload": True}}, DEVICE)[0]
    require(
        compare_curves(offloaded, kept, curve_bounds(*BOUNDS["float32"], "updates on the host"))
    )
