"""Tokens per second, MFU and peak memory on one CUDA device, beside transformers.Trainer in the same run.

    python benchmarks/gpu.py [--steps 20] [--only NAME ...] [--to docs/performance.md]
    python benchmarks/gpu.py --tiny          tries the benchmark itself on any machine; its figures mean nothing

Shapes of Llama-3.2-1B and Llama-3.1-8B with random weights, bfloat16 with float32 weights, rows of 4096 random tokens,
AdamW, gradient norm clipped to 1. Each row runs in its own process. The Trainer has the same model, rows,
checkpointing, compilation, adapters and fused AdamW; what it has no setting for is left empty. FLOPs are those of
`threefold plan`, the dense bfloat16 peak is that of the data sheet. Goals are tokens/s on one H200.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEQ_LEN, LR, CLIP = 4096, 1e-4, 1.0
WARMUP = 5
BEGIN, END = "<!-- benchmarks/gpu.py -->", "<!-- end -->"
LLAMA_1B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 524288,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What is trained, and the goal on one H200.

    Attributes:
        keys: of the config, besides model, data and bfloat16.
        floor, goal: tokens/s; of `longest`, tokens of a row.
        peer: keys of TrainingArguments; None: the Trainer has no such setting.
        longest: rows are made longer until the memory is full.
    """

    model: dict[str, Any]
    rows: int
    keys: dict[str, dict[str, Any]]
    floor: float
    goal: float
    peer: dict[str, Any] | None = None
    longest: bool = False


_FULL = {"gradient_checkpointing": True}
_OFFLOADED = {
    "mesh": {"cpu_offload": True},
    "train": {"activation_checkpointing": "offload", "compile": False},
}
ROWS: dict[str, Row] = {
    "1B, eager": Row(LLAMA_1B, 8, {"train": {"compile": False}}, 36_200, 43_800, {}),
    "1B, compiled": Row(LLAMA_1B, 8, {"train": {"compile": True}}, 46_000, 54_800, {"torch_compile": True}),
    "1B, compiled, float8 tensorwise": Row(
        LLAMA_1B, 8, {"train": {"compile": True, "float8": "tensorwise"}}, 46_000, 60_300
    ),
    "8B, full checkpointing": Row(
        LLAMA_8B, 1, {"train": {"activation_checkpointing": "full", "compile": False}}, 0, 6_900, _FULL
    ),
    "8B, bfloat16 moments, selective checkpointing, compiled": Row(
        LLAMA_8B,
        1,
        {"train": {"activation_checkpointing": "selective", "compile": True}, "optimizer": {"moments": "bfloat16"}},
        7_700,
        8_650,
    ),
    "8B, LoRA r 16": Row(
        {**LLAMA_8B, "lora": True}, 2, {"train": {"compile": True}}, 11_000, 12_500, {"torch_compile": True}
    ),
    "8B, longest row, offloaded": Row(LLAMA_8B, 1, _OFFLOADED, 65_536, 300_000, longest=True),
}
# Tokens of a row, tried in this order.
LENGTHS = (32_768, 65_536, 131_072, 196_608, 262_144, 300_032)


def batch_of(vocabulary: int, rows: int, seq_len: int) -> dict[str, Any]:
    """One batch of random tokens, int64 [rows, seq_len] each, on the CPU."""
    import torch

    tokens = torch.randint(vocabulary, (rows, seq_len + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def config_of(row: Row, *, seq_len: int) -> Any:
    """The config of a row of the table."""
    from threefold.config.loading import validate

    sizes = {key: value for key, value in row.model.items() if key != "lora"}
    model: dict[str, Any] = {"config": sizes, "dtype": "bfloat16"}
    if row.model.get("lora"):
        model["lora"] = {"r": 16, "target_modules": "all-linear"}
    return validate({"model": model, "data": {"seq_len": seq_len}, **row.keys})


def measure(row: Row, *, steps: int, seq_len: int) -> dict[str, float]:
    """Trains in this process: tokens_per_s, flops_per_token and peak_bytes."""
    import torch

    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.model.flops import flops_of
    from threefold.optim.build import build_optimizer
    from threefold.plan.operations import causal_keys
    from threefold.training.step import TrainStep

    on_device = torch.cuda.is_available()
    mesh = init_mesh(device="cuda" if on_device else "cpu")
    config = config_of(row, seq_len=seq_len)
    model = build(config, load.read_config(config.model), mesh)
    step = TrainStep(model, build_optimizer(model.module, config.optimizer), grad_clip=CLIP)
    batch = batch_of(row.model["vocab_size"], row.rows, seq_len)
    batch["position_ids"] = torch.arange(seq_len).expand(row.rows, -1).contiguous()
    flops = flops_of(model.module).per_token(causal_keys(seq_len))
    return _timed(lambda: step.run([batch], lr=LR), steps, row.rows * seq_len) | {"flops_per_token": flops}


def measure_trainer(row: Row, *, steps: int, seq_len: int) -> dict[str, float]:
    """The same by transformers.Trainer, from its first step after the warm-up to its last."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    sizes = {key: value for key, value in row.model.items() if key != "lora"}
    config = AutoConfig.for_model(**sizes)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if row.model.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (WARMUP, WARMUP + steps):
                _wait()
                times.append(time.perf_counter())
                if torch.cuda.is_available() and state.global_step == WARMUP:
                    torch.cuda.reset_peak_memory_stats()

    tokens = batch_of(row.model["vocab_size"], 1, seq_len)["input_ids"][0]
    rows = [{"input_ids": tokens, "labels": tokens}] * (row.rows * (WARMUP + steps))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=row.rows, max_steps=WARMUP + steps, bf16=True,
            learning_rate=LR, max_grad_norm=CLIP, optim="adamw_torch_fused", save_strategy="no", report_to=[],
            logging_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), **(row.peer or {}),
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    taken = times[1] - times[0]
    return {"tokens_per_s": steps * row.rows * seq_len / taken, "peak_bytes": _peak()}


def _timed(step: Any, steps: int, tokens: int) -> dict[str, float]:
    import torch

    for _ in range(WARMUP):
        step()
    _wait()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _wait()
    return {"tokens_per_s": steps * tokens / (time.perf_counter() - started), "peak_bytes": _peak()}


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak() -> float:
    import torch

    return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0.0


def _apart(name: str, who: str, arguments: argparse.Namespace, seq_len: int) -> dict[str, float] | str:
    """One row in a process of its own: its figures, or the last line of its error."""
    command = [sys.executable, __file__, "--one", name, "--who", who, "--steps", str(arguments.steps)]
    command += ["--length", str(seq_len), *(["--tiny"] if arguments.tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        shown = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no message")
        return f"failed: {shown.strip()[:80]}"
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def row_of(name: str, row: Row, arguments: argparse.Namespace, peak: float | None) -> str:
    """A line of the table: ours, the Trainer's, and the goal."""
    if row.longest:
        return _longest(name, row, arguments)
    ours = _apart(name, "threefold", arguments, arguments.length)
    if isinstance(ours, str):
        return f"| {name} | {ours} | | | | {row.goal:,.0f} |"
    mfu = f"{ours['tokens_per_s'] * ours['flops_per_token'] / peak:.1%}" if peak else ""
    ratio = "none"
    if row.peer is not None:
        theirs = _apart(name, "trainer", arguments, arguments.length)
        ratio = theirs if isinstance(theirs, str) else f"{ours['tokens_per_s'] / theirs['tokens_per_s']:.2f} x"
    speed, memory = ours["tokens_per_s"], ours["peak_bytes"] / 2**30
    return f"| {name} | {speed:,.0f} | {mfu} | {memory:.1f} | {ratio} | {row.goal:,.0f} |"


def _longest(name: str, row: Row, arguments: argparse.Namespace) -> str:
    best, memory, ended = 0, 0.0, ""
    for length in (64, 128) if arguments.tiny else LENGTHS:
        found = _apart(name, "threefold", arguments, length)
        if isinstance(found, str):
            ended = f"; {length:,} {found}"
            break
        best, memory = length, found["peak_bytes"] / 2**30
    return f"| {name} | a row of {best:,} tokens{ended} | | {memory:.1f} | none | {row.goal:,.0f} |"


def head_of(device: str) -> str:
    """What was measured, with which versions."""
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    return f"{device}; {versions}; `python benchmarks/gpu.py`"


def main() -> None:
    """Runs each row in its own process, prints the table, and puts it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    parser.add_argument("--to", type=Path, help="a page whose table to replace")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--length", type=int, default=SEQ_LEN, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--who", choices=["threefold", "trainer"], default="threefold", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    if arguments.tiny:
        arguments.length = min(arguments.length, 128)
    if arguments.one:
        row = ROWS[arguments.one]
        if arguments.tiny:
            row = Row({**row.model, **TINY}, row.rows, row.keys, row.floor, row.goal, row.peer)
        function = measure if arguments.who == "threefold" else measure_trainer
        print(json.dumps(function(row, steps=arguments.steps, seq_len=arguments.length)))
        return
    if not torch.cuda.is_available() and not arguments.tiny:
        sys.exit("no CUDA device: nothing was measured")
    from threefold.plan.accelerators import peak_flops

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU, tiny models"
    lines = [
        head_of(device),
        "",
        "| run | tokens/s | MFU | peak memory, GiB | of transformers.Trainer | goal on one H200 |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in arguments.only:
        lines.append(row_of(name, ROWS[name], arguments, peak_flops(device)))
        print(lines[-1], flush=True)
    if arguments.to is not None:
        text = arguments.to.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        table = "\n".join(lines)
        arguments.to.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
