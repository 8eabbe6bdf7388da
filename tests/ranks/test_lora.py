"""Adapters on every mesh follow peft's in one process; they resume, and leave as peft has them or merged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ranks.keeping import LLAMA, Miniature, Sizes, write_corpus
from ranks.reference import (
    PARITY,
    TINY_LLAMA,
    compare_curves,
    compare_trainings,
    make_batches,
    require,
)
from ranks.spawn import run_ranks
from threefold.check.compare import (
    LOGITS,
    Bound,
    Comparison,
    Training,
    compare_tensors,
)
from threefold.checkpoint.checkpoint_folder import find
from threefold.errors import CheckpointError
from threefold.export.model_folder import export

pytestmark = pytest.mark.ranks

# A larger rate shows the rounding of gradients near 0, of which AdamW's first step takes the sign.
STEPS, ROWS, SEQ_LEN, LR = 6, 8, 16, 2e-3
LORA = {"r": 4, "alpha": 6, "target_modules": "all-linear"}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Fused projections, whose parts are gathered; norms of single heads; experts, which have no adapters.
FUSED = {**TINY_LLAMA, "model_type": "phi3", "pad_token_id": 0}
EXPERTS = {
    **TINY_LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
EXPERTS |= {"moe_intermediate_size": 16, "pad_token_id": 0}
# Latent keys and values, of which the positions' part goes to every head.
LATENT = {
    **TINY_LLAMA,
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_group": 1,
}
LATENT_TARGETS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
LATENT |= {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "q_lora_rank": 12,
}
LATENT |= {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}
CASES: list[tuple[str, dict[str, Any], Sizes, bool | str]] = [
    ("llama", TINY_LLAMA, (1, 1, 1, 1), "auto"),
    ("llama", TINY_LLAMA, (2, 1, 1, 1), "auto"),
    ("llama", TINY_LLAMA, (1, 2, 1, 1), "auto"),
    ("llama", TINY_LLAMA, (1, 1, 2, 1), "auto"),
    ("llama", TINY_LLAMA, (1, 1, 1, 2), True),
    ("llama", TINY_LLAMA, (1, 1, 1, 2), False),
    ("llama", TINY_LLAMA, (1, 2, 1, 2), "auto"),
    ("llama", TINY_LLAMA, (2, 1, 2, 2), "auto"),
    ("phi3", FUSED, (1, 1, 1, 2), "auto"),
    ("qwen3_moe", EXPERTS, (1, 2, 1, 2), "auto"),
    ("deepseek_v2", LATENT, (1, 1, 1, 2), "auto"),
]


def _values(name: str, shape: torch.Size, *, seed: int) -> Tensor:
    """First values of which B's are not zero, so that A has a gradient at once."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + seed)
    return torch.randn(shape, generator=generator) * 0.3


def _train_on_mesh(sizes: Sizes, model_config: dict[str, Any], scatter: bool | str) -> Any:
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load, lora
    from threefold.model.build import build
    from threefold.model.weight_check import is_adapter
    from threefold.optim.build import build_optimizer
    from threefold.training.step import TrainStep, mean_loss

    lora.initial = _values
    latent = "kv_lora_rank" in model_config
    replicate, shard, cp, tp = sizes
    mesh = init_mesh(replicate * shard, dp_shard=shard, cp=cp, tp=tp, device="cpu")
    config = validate(
        {
            "model": {
                "config": model_config,
                "lora": {**LORA, **({"target_modules": LATENT_TARGETS} if latent else {})},
            },
            "mesh": {"sequence_parallel": scatter},
            "data": {"seq_len": SEQ_LEN},
            "optimizer": {"lr": LR},
        }
    )
    model = build(config, load.read_config(config.model), mesh)
    first: dict[str, Any] = {}

    def observe() -> None:
        for name, parameter in model.module.named_parameters():
            assert parameter.requires_grad == is_adapter(name), name
            if parameter.requires_grad and name not in first:
                assert parameter.grad is not None, name
                first[name] = (
                    getattr(parameter.grad, "full_tensor", lambda own=parameter.grad: own)()
                    .clone()
                    .numpy()
                )

    step = TrainStep(
        model, build_optimizer(model.module, config.optimizer), grad_clip=1.0, observe=observe
    )
    losses, norms = [], []
    for batch in make_batches(steps=STEPS, rows=ROWS, seq_len=SEQ_LEN):
        own = {name: rows[mesh.dp_rank :: mesh.dp_size] for name, rows in batch.items()}
        halves = [{name: rows[part::2] for name, rows in own.items()} for part in range(2)]
        result = step.run(halves, lr=LR)
        losses.append(mean_loss(result, mesh))
        norms.append(result.grad_norm.item())
    return losses, norms, first


def _train_alone(model_config: dict[str, Any]) -> Any:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    values = dict(model_config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    targets: Any = ATTENTION if "num_experts" in model_config else "all-linear"
    if "kv_lora_rank" in model_config:
        targets = LATENT_TARGETS
    peft_config = LoraConfig(
        r=LORA["r"], lora_alpha=LORA["alpha"], target_modules=targets, task_type="CAUSAL_LM"
    )
    inject_adapter_in_model(peft_config, model)
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(_values(name, parameter.shape, seed=0))
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms, first = [], [], {}
    for batch in make_batches(steps=STEPS, rows=ROWS, seq_len=SEQ_LEN):
        logits = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
        total = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        loss = total / (batch["labels"] != -100).sum()
        loss.backward()
        first = first or {name: p.grad.clone().numpy() for name, p in trained.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, first


@pytest.mark.parametrize(
    ("family", "model", "sizes", "scatter"), CASES, ids=lambda value: str(value)[:24]
)
def test_adapters_follow_peft_in_one_process(
    family: str, model: dict[str, Any], sizes: Sizes, scatter: bool | str
) -> None:
    expected = _train_alone(model)
    actual = run_ranks(_train_on_mesh, math.prod(sizes), sizes, model, scatter)[0]
    require(compare_trainings(Training(*actual), Training(*expected), PARITY))


def _some_steps(sizes: Sizes, folder: str, steps: int, model: dict[str, Any]) -> Any:
    run = Miniature(sizes, folder, model=model)
    curve = run.advance(steps)
    run.checkpointer.save(run.done, None, True)
    run.checkpointer.saver.wait()
    return [(loss, norm) for loss, norm, _ in curve]


def test_adapters_resume_on_another_mesh(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    model = {"config": LLAMA, "lora": LORA}
    whole = run_ranks(_some_steps, 2, (1, 2, 1, 1), str(tmp_path / "whole"), 6, model)[0]
    begun = run_ranks(_some_steps, 2, (1, 2, 1, 1), str(tmp_path / "run"), 3, model)[0]
    resumed = run_ranks(_some_steps, 2, (1, 1, 1, 2), str(tmp_path / "run"), 3, model)[0]
    require(compare_curves(begun + resumed, whole))


def _named_base(folder: Path) -> Path:
    values = {**LLAMA, "vocab_size": 257}
    torch.manual_seed(3)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_adapters_leave_merged_and_as_peft_has_them(tmp_path: Path) -> None:
    from peft import PeftModel

    write_corpus(tmp_path)
    base = _named_base(tmp_path / "base")
    model = {"config": None, "name_or_path": str(base), "lora": {"r": 4}}
    values = {"model": model, "data": {"tokenizer": "bytes"}}
    run_ranks(_named_steps, 2, (1, 1, 1, 2), str(tmp_path / "run"), values)
    saved = find(tmp_path / "run")
    assert (
        sum(file.stat().st_size for file in saved.state.iterdir())
        < (base / "model.safetensors").stat().st_size
    )
    merged = export(tmp_path / "run", tmp_path / "merged")
    adapter = export(tmp_path / "run", tmp_path / "adapter", adapter=True)
    assert merged.verified == "reloaded: equal logits"
    assert adapter.verified == "reloaded by peft: equal logits"
    ids = torch.arange(30)[None]
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    with torch.no_grad():
        before = plain(ids).logits
        beside = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()(ids).logits
        into = (
            AutoModelForCausalLM.from_pretrained(
                tmp_path / "merged", attn_implementation="eager"
            )
            .eval()(ids)
            .logits
        )
    same = Bound("logits", 1e-5, "adapters beside a weight or added to it: one rounding")
    require(compare_tensors(same, {"": beside}, {"": into}))
    assert not Comparison(compare_tensors(LOGITS, {"": beside}, {"": before})).holds
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in weights)


def test_adapters_beside_other_weights_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    base = _named_base(tmp_path / "base")
    model = {"config": None, "name_or_path": str(base), "lora": {"r": 4}}
    run_ranks(
        _named_steps,
        1,
        (1, 1, 1, 1),
        str(tmp_path / "run"),
        {"model": model, "data": {"tokenizer": "bytes"}},
    )
    weights = base / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(bytes(damaged))
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path / "run", tmp_path / "merged")
    assert str(caught.value) == (
        f"the adapters of {find(tmp_path / 'run').path} were trained on weights other than those of {base}\n"
        "  expected: the weights that the run began with, which its checkpoints do not hold\n"
        "  fix: restore them, or name the revision: --model.revision COMMIT"
    )
    assert not (tmp_path / "merged").exists()
    evaluated = run_ranks(_evaluated, 2, str(tmp_path / "run"), model)
    assert evaluated == [str(caught.value)] * 2


def _evaluated(run: str, model: dict[str, Any]) -> str:
    """What an evaluation of the run's checkpoint by itself is refused for."""
    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.run import evaluate, request

    mesh = init_mesh(dp=2, device="cpu")
    data = {"tokenizer": "bytes", "allow_other_tokenizer": True, "seq_len": 16}
    config = validate({"model": model, "data": data})
    try:
        evaluate._evaluated(request.asked_of(config, mesh), mesh, find(Path(run)), ema=False)
    except CheckpointError as error:
        return str(error)
    return ""


def _named_steps(sizes: Sizes, folder: str, values: dict[str, Any]) -> None:
    run = Miniature(sizes, folder, **values)
    run.advance(3)
    run.checkpointer.save(3, None, True)
    run.checkpointer.saver.wait()
