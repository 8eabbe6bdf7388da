"""Tokens per second, MFU and peak memory of a Llama of about one billion parameters on one CUDA device.

    python benchmarks/gpu.py [--steps 20] [--seq-len 4096] [--rows 4] [--model 1B]

All variants use bfloat16 with float32 weights: plain, compiled layers, Liger's head and loss, both; for rows that hold
documents, masks by blocks and in memory. Every variant runs in its own process. Model FLOPs and the device's dense
bfloat16 peak come from `threefold.training.progress` (PaLM, appendix B).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    "200M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16},
}
WARMUP = 5
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled": {"compile": True},
    "Liger": {"fused_loss": "liger"},
    "compiled, Liger": {"compile": True, "fused_loss": "liger"},
    "documents, masks by blocks": {"attention": "flex", "documents": True},
    "documents, masks in memory": {"attention": "sdpa", "documents": True},
    "full recomputation": {"activation_checkpointing": "full"},
}


def measure(size: str, variant: dict[str, Any], *, steps: int, rows: int, seq_len: int) -> dict[str, float]:
    """Trains in this process and returns tokens_per_s, mfu (0 if the peak is not known) and peak_bytes."""
    import torch

    from threefold.config.loading import validate
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.training.optimizer import adamw
    from threefold.training.progress import flops_per_token, peak_flops
    from threefold.training.step import TrainStep

    mesh = init_mesh(device="cuda")
    architecture = {
        "model_type": "llama",
        "vocab_size": 32000,
        "num_key_value_heads": 8,
        "max_position_embeddings": seq_len,
        **MODELS[size],
    }
    train = {key: variant[key] for key in ("compile", "fused_loss", "activation_checkpointing") if key in variant}
    config = validate(
        {
            "model": {"config": architecture, "dtype": "bfloat16", "attention": variant.get("attention", "auto")},
            "data": {"seq_len": seq_len},
            "train": {"fused_loss": "none", **train},
        }
    )
    model = build(config, load.read_config(config.model), mesh)
    step = TrainStep(model, adamw(model.module, config.optimizer), mesh, grad_clip=1.0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32000, (rows, seq_len + 1), generator=generator)
    batch = {
        "input_ids": tokens[:, :-1].contiguous().cuda(),
        "labels": tokens[:, 1:].contiguous().cuda(),
        "position_ids": torch.arange(seq_len).expand(rows, -1).contiguous().cuda(),
    }
    if variant.get("documents"):
        batch["document_ids"] = (torch.rand(rows, seq_len, generator=generator) < 4 / seq_len).cumsum(1).cuda()
    for _ in range(WARMUP):
        step([batch], lr=1e-4)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(steps):
        step([batch], lr=1e-4)
    torch.cuda.synchronize()
    tokens_per_s = steps * rows * seq_len / (time.perf_counter() - started)
    num_parameters = sum(parameter.numel() for parameter in model.module.parameters())
    flops = flops_per_token(
        num_parameters,
        num_layers=architecture["num_hidden_layers"],
        hidden_size=architecture["hidden_size"],
        seq_len=seq_len,
    )
    peak = peak_flops(torch.cuda.get_device_name())
    return {
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * flops / peak if peak else 0.0,
        "peak_bytes": float(torch.cuda.max_memory_allocated()),
    }


def main() -> None:
    """Runs each variant in its own process and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--model", default="1B", choices=list(MODELS))
    parser.add_argument("--one", choices=list(VARIANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = {"steps": arguments.steps, "rows": arguments.rows, "seq_len": arguments.seq_len}
    if arguments.one:
        print(json.dumps(measure(arguments.model, VARIANTS[arguments.one], **sizes)))
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing was measured")
    print(
        f"{torch.cuda.get_device_name()}; {arguments.model}, {arguments.rows} rows of {arguments.seq_len}, bfloat16\n"
    )
    print("| variant | tokens/s | MFU | peak memory, GiB |")
    print("|---|---|---|---|")
    for name, variant in VARIANTS.items():
        if variant.get("fused_loss") == "liger" and importlib.util.find_spec("liger_kernel") is None:
            print(f"| {name} | liger-kernel is not installed | | |")
            continue
        command = [sys.executable, __file__, "--one", name, "--model", arguments.model, "--steps", str(arguments.steps)]
        command += ["--rows", str(arguments.rows), "--seq-len", str(arguments.seq_len)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"| {name} | failed: {done.stderr.strip().splitlines()[-1][:80]} | | |", flush=True)
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        speed, memory = found["tokens_per_s"], found["peak_bytes"] / 2**30
        print(f"| {name} | {speed:,.0f} | {found['mfu']:.1%} | {memory:.1f} |", flush=True)


if __name__ == "__main__":
    main()
