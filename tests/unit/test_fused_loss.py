"""Liger's kernel gives the sums and gradients of the loss by chunks; run by triton's interpreter where no GPU is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from threefold.errors import ConfigError
from threefold.model import fused_loss

SCRIPT = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from threefold.model import head
from threefold.training.loss import TokenLoss
from threefold.check.compare import Bound, Comparison, compare_tensors

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=2, pad_token_id=0)
assert torch.cuda.is_available() or __import__("triton").knobs.runtime.interpret
device = "cuda" if torch.cuda.is_available() else "cpu"
kinds = [("llama", {}), ("granite", dict(logits_scaling=2.0))]
if device == "cuda":  # the interpreter cannot pass the kernel its cap
    kinds.append(("gemma2", dict(final_logit_softcapping=3.0, head_dim=16)))
for kind, extra in kinds:
    for loss in (TokenLoss(), TokenLoss(z_loss=0.3)):
        results = []
        for fused in (False, True):
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, **SIZES, **extra)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(device)
            head.install(model, chunk="auto", fused=fused)
            ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
            labels = ids.roll(-1, 1).clone()
            labels[0, 3:6] = -100
            sums = model(input_ids=ids, labels=labels, token_loss=loss, use_cache=False)
            (sums.objective * 0.125).backward()
            gradients = {name: p.grad for name, p in model.named_parameters()}
            results.append((sums.objective.item(), sums.cross_entropy.item(), gradients))
        plain, fused = results
        assert abs(plain[0] - fused[0]) <= 1e-5 * abs(plain[0]), (kind, loss)
        assert abs(plain[1] - fused[1]) <= 1e-5 * abs(plain[1]), (kind, loss)
        comparison = Comparison(compare_tensors(Bound("gradient", 1e-4, "one kernel"), fused[2], plain[2]))
        assert comparison.holds, (kind, loss, str(comparison))
print("same")
"""


def test_kernel_gives_the_same_sums_and_gradients() -> None:
    missing = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install 'threefold[liger]' triton")
    # The interpreter is chosen when triton is imported.
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=250)
    assert done.stdout.strip().endswith("same"), done.stderr


def test_kernel_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = fused_loss.problems(device="cuda", tp=1, label_smoothing=0.0)
    assert str(ConfigError.of(found)) == (
        "train.fused_loss = liger, but liger-kernel is not installed\n"
        "  expected: CUDA, the liger-kernel package, the whole vocabulary on each rank and no smoothed labels\n"
        "  fix: pip install 'threefold[liger]', or --train.fused_loss auto   (the loss by chunks gives the same sums)"
    )
