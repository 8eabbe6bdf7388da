"""What `benchmarks/gpu.py` measures on one CUDA device: steps beside transformers.Trainer's, kernels, and bits.

Shapes of Llama-3.2-1B and Llama-3.1-8B with random weights that are drawn on the device, bfloat16 with float32 weights,
rows of 4096 random tokens, AdamW, gradient norm clipped to 1. The Trainer has the same model, rows, checkpointing,
compilation, adapters and fused AdamW. FLOPs are those of `threefold plan`. Goals are tokens/s on one H200.

Without a CUDA device the same code runs on a CPU with tiny models: that tries it, and its figures mean nothing.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

SEQ_LEN, TINY_SEQ_LEN, LR, CLIP = 4096, 128, 1e-4, 1.0
WARMUP, STEPS, TINY_STEPS = 5, 20, 2
_LONGEST_KERNELS = 25
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
        rows: of a step, at most: fewer if the device's memory holds fewer.
        keys: of the config, besides model, data and bfloat16.
        floor, goal: tokens/s; 0: there is none.
        peer: keys of TrainingArguments; None: the Trainer has no such setting.
        documents: rows of several documents, which do not see one another.
    """

    model: dict[str, Any]
    rows: int
    keys: dict[str, dict[str, Any]]
    floor: float
    goal: float
    peer: dict[str, Any] | None = None
    documents: bool = False
    seq_len: int = SEQ_LEN

    def tiny(self) -> Row:
        """The same in a size for a CPU."""
        sizes = {
            key: value for key, value in {**self.model, **TINY}.items() if value is not None
        }
        return replace(self, model=sizes, seq_len=TINY_SEQ_LEN, rows=1)


_COMPILED = {"train": {"compile": True}}
_EAGER = {"train": {"compile": False}}
_SELECTIVE = {"train": {"activation_checkpointing": "selective", "compile": True}}
_FULL = {"train": {"activation_checkpointing": "full", "compile": False}}
_OFFLOADED = {
    "mesh": {"cpu_offload": True},
    "train": {"activation_checkpointing": "offload", "compile": False},
}
# A quarter of the layers of 8B, for devices that do not hold it: time and memory of a layer are the same.
_QUARTER = {**LLAMA_8B, "num_hidden_layers": 8}
ROWS: dict[str, Row] = {
    "1b-compiled": Row(LLAMA_1B, 8, _COMPILED, 46_000, 54_800, {"torch_compile": True}),
    "1b-eager": Row(LLAMA_1B, 8, _EAGER, 36_200, 43_800, {}),
    "1b-documents": Row(LLAMA_1B, 8, _COMPILED, 0, 0, documents=True),
    "1b-float8": Row(
        LLAMA_1B, 8, {"train": {"compile": True, "float8": "tensorwise"}}, 46_000, 60_300
    ),
    "8b-quarter-compiled": Row(_QUARTER, 2, _COMPILED, 0, 0, {"torch_compile": True}),
    "8b-quarter-selective": Row(_QUARTER, 2, _SELECTIVE, 0, 0),
    "8b-quarter-full": Row(_QUARTER, 2, _FULL, 0, 0),
    "8b-quarter-narrow": Row(
        _QUARTER, 2, {**_COMPILED, "optimizer": {"moments": "bfloat16"}}, 0, 0
    ),
    "8b-lora": Row(
        {**LLAMA_8B, "lora": True}, 2, _COMPILED, 11_000, 12_500, {"torch_compile": True}
    ),
    "8b-full": Row(LLAMA_8B, 1, _FULL, 0, 6_900, {"gradient_checkpointing": True}),
    "8b-selective": Row(
        LLAMA_8B, 1, {**_SELECTIVE, "optimizer": {"moments": "bfloat16"}}, 7_700, 8_650
    ),
}
# One row of so many tokens, offloaded: the floor is 65k, the goal 300k.
LENGTHS = (32_768, 65_536, 131_072, 262_144, 300_032)
ROWS |= {
    f"8b-row-{length}": Row(LLAMA_8B, 1, _OFFLOADED, 0, 0, seq_len=length) for length in LENGTHS
}
# Rows are as many as fit, the first of these.
FEWER = (8, 4, 2, 1)


class DoesNotFit(Exception):
    """A row for which the device has no memory, by the planner's estimate."""


def batch_of(row: Row) -> dict[str, Any]:
    """One batch of random tokens, int64 [rows, seq_len] each, pinned where there is a device to send them to."""
    import torch

    size = row.rows, row.seq_len + 1
    tokens = torch.randint(
        row.model["vocab_size"], size, generator=torch.Generator().manual_seed(0)
    )
    length = row.seq_len // 4 if row.documents else row.seq_len
    places = torch.arange(row.seq_len).expand(row.rows, -1)
    batch = {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": places % length,
    }
    if row.documents:
        batch["document_ids"] = places // length
    batch = {name: each.contiguous() for name, each in batch.items()}
    return (
        {name: each.pin_memory() for name, each in batch.items()}
        if torch.cuda.is_available()
        else batch
    )


def config_of(row: Row) -> Any:
    """The config of a row of the table."""
    from threefold.config.loading import validate

    sizes = {key: value for key, value in row.model.items() if key != "lora"}
    model: dict[str, Any] = {"config": sizes, "dtype": "bfloat16"}
    if row.model.get("lora"):
        model["lora"] = {"r": 16, "target_modules": "all-linear"}
    data = {"seq_len": row.seq_len, "document_mask": row.documents}
    keys = {
        **row.keys,
        "train": {
            **row.keys.get("train", {}),
            "global_batch": row.rows,
            "micro_batch": row.rows,
        },
    }
    return validate({"model": model, "data": data, **keys})


def fitting(row: Row) -> Row:
    """The row with as many rows as the device holds by the planner's estimate; DoesNotFit if it does not hold one."""
    import torch

    from threefold.mesh.topology import Topology
    from threefold.model import load
    from threefold.plan.accelerators import of_memory
    from threefold.plan.fit import estimate_of
    from threefold.plan.memory import host_bytes, peak
    from threefold.run.local_rank_limit import room_here

    if not torch.cuda.is_available():
        return row
    memory = torch.cuda.get_device_properties(0).total_memory
    needed, host = 0.0, room_here().free_bytes or math.inf
    for size in [size for size in FEWER if size <= row.rows]:
        smaller = replace(row, rows=size)
        config = config_of(smaller)
        values = load.read_config(config.model).to_dict()
        estimate = estimate_of(config, values, Topology(1, 1, 1, 1), of_memory(memory))
        if estimate is None:
            return smaller
        if (needed := peak(*estimate).total) <= memory:
            if (kept := host_bytes(*estimate)) <= host:
                return smaller
            raise DoesNotFit(
                f"{kept / 2**30:.1f} GiB of the host by the planner's estimate, of {host / 2**30:.1f} GiB"
            )
    raise DoesNotFit(
        f"one row needs {needed / 2**30:.1f} GiB by the planner's estimate, of {memory / 2**30:.1f} GiB"
    )


@contextmanager
def _mesh() -> Iterator[Any]:
    import torch

    from threefold.mesh.mesh import init_mesh

    mesh = init_mesh(device="cuda" if torch.cuda.is_available() else "cpu")
    yield mesh
    mesh.close()


def _drawn(config: Any, device: str) -> dict[str, Callable[[], Any]]:
    """Of each weight of a model how to draw it, on the device, by its shape: no file is written and nothing copied."""
    import torch

    from threefold.model import load
    from threefold.model.weight_check import stored_in_files

    def drawn(shape: tuple[int, ...]) -> Callable[[], Any]:
        if len(shape) > 1:
            return lambda: torch.randn(shape, device=device) * 0.02
        return lambda: torch.ones(shape, device=device)

    shapes = stored_in_files(load.outline(load.read_config(config.model))).shapes
    return {name: drawn(tuple(shape)) for name, shape in shapes.items()}


def measure(row: Row, *, steps: int) -> dict[str, Any]:
    """Trains in this process: tokens a second, share of the peak, memory, the host's time, the longest kernels."""
    import torch

    from threefold.model import load
    from threefold.model.build import build
    from threefold.model.flops import flops_of
    from threefold.optim.build import build_optimizer
    from threefold.plan.accelerators import peak_flops
    from threefold.plan.operations import causal_keys
    from threefold.training.step import TrainStep

    row = fitting(row)
    on_device = torch.cuda.is_available()
    with _mesh() as mesh:
        config = config_of(row)
        started = time.perf_counter()
        weights = _drawn(config, "cuda" if on_device else "cpu")
        model = build(config, load.read_config(config.model), mesh, weights=weights)
        step = TrainStep(model, build_optimizer(model.module, config.optimizer), grad_clip=CLIP)
        built = time.perf_counter()
        batch = batch_of(row)
        step.run([batch], lr=LR)
        _wait()
        begun = time.perf_counter()
        figures = _timed(lambda: step.run([batch], lr=LR), steps, row.rows * row.seq_len)
        flops = flops_of(model.module).per_token(causal_keys(row.seq_len))
        known = peak_flops(torch.cuda.get_device_name()) if on_device else None
        return {
            **figures,
            "rows": row.rows,
            "seq_len": row.seq_len,
            "mfu": figures["tokens_per_s"] * flops / known if known else None,
            "build_s": built - started,
            "first_step_s": begun - built,
            "floor": row.floor,
            "goal": row.goal,
            "choices": [list(choice) for choice in model.choices],
            "kernels": _kernels(lambda: step.run([batch], lr=LR)) if on_device else [],
        }


def _kernels(step: Callable[[], Any]) -> list[tuple[str, float, int]]:
    """The kernels of a step that take longest: name, milliseconds, how often."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        _wait()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        (event.key[:120], event.self_device_time_total / 1e3, event.count)
        for event in events[:_LONGEST_KERNELS]
    ]


def measure_trainer(row: Row, *, steps: int) -> dict[str, Any]:
    """The same by transformers.Trainer, from its first step after the warm-up to its last."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    row = fitting(row)
    sizes = {key: value for key, value in row.model.items() if key != "lora"}
    config = AutoConfig.for_model(**sizes)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    if row.model.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        )
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (WARMUP, WARMUP + steps):
                _wait()
                times.append(time.perf_counter())
                if torch.cuda.is_available() and state.global_step == WARMUP:
                    torch.cuda.reset_peak_memory_stats()

    tokens = batch_of(replace(row, rows=1))["input_ids"][0].clone()
    rows = [{"input_ids": tokens, "labels": tokens}] * (row.rows * (WARMUP + steps))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=row.rows, max_steps=WARMUP + steps, bf16=True,
            learning_rate=LR, max_grad_norm=CLIP, optim="adamw_torch_fused", save_strategy="no", report_to=[],
            logging_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), **(row.peer or {}),
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    taken = times[1] - times[0]
    speed = steps * row.rows * row.seq_len / taken
    return {
        "tokens_per_s": speed,
        "peak_bytes": _peak(),
        "rows": row.rows,
        "seq_len": row.seq_len,
    }


def _timed(step: Callable[[], Any], steps: int, tokens: int) -> dict[str, Any]:
    import torch

    for _ in range(WARMUP):
        step()
    _wait()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started, host = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        step()
    host = time.thread_time() - host
    _wait()
    taken = time.perf_counter() - started
    return {
        "tokens_per_s": steps * tokens / taken,
        "step_ms": taken / steps * 1e3,
        "host_ms": host / steps * 1e3,
        "peak_bytes": _peak(),
    }


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak() -> float:
    import torch

    return float(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0.0


def ceilings(*, tiny: bool) -> dict[str, Any]:
    """What the device reaches: a copy, a product, attention forward and backward; and whether its bits are the same."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, width, length = (1 << 16, 64, 128) if tiny else (1 << 30, 8192, 4096)
    source = torch.empty(size, device=device)
    target = torch.empty_like(source)
    copy_ms = _ms(lambda: target.copy_(source))
    matrix = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    product_ms = _ms(lambda: matrix @ matrix)
    figures: dict[str, Any] = {
        "copy_tb_per_s": 8 * size / copy_ms / 1e9,
        "product_tflops": 2 * width**3 / product_ms / 1e9,
    }
    for rows, head_dim in ((1, 16),) if tiny else ((8, 64), (2, 128)):
        heads = tuple(_heads(rows, number, length, head_dim, device) for number in (32, 8, 8))
        measured = {**_attention(*heads), **_documents(*heads)}
        figures |= {
            f"{name}, {rows} rows, head_dim {head_dim}": entry
            for name, entry in measured.items()
        }
    return figures


def _attention(query: Any, key: Any, value: Any) -> dict[str, dict[str, Any]]:
    """Causal attention by each kernel: milliseconds forward and backward, and whether two backwards are equal."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    entries: dict[str, dict[str, Any]] = {}
    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "math": SDPBackend.MATH,
    }
    for name, kernel in kernels.items():
        entry = entries[name] = {}
        try:
            with sdpa_kernel(kernel):
                entry["ms"] = _ms(lambda: _gradient(query, attend))
                first = _gradient(query, attend)
                entry["same_bits"] = all(
                    torch.equal(first, _gradient(query, attend)) for _ in range(5)
                )
        except RuntimeError as error:
            # This kernel is not there for this device, or has no memory.
            entry["error"] = str(error)
    return entries


def _documents(query: Any, key: Any, value: Any) -> dict[str, dict[str, Any]]:
    """Forward and backward in ms of flex attention, causal, by document ids and by the start of the document, and of
    documents by their lengths."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from threefold.model.context_parallel.local_attention import DocumentLengths, attend_lengths

    rows, _, length, _ = query.shape
    places = torch.arange(length, device=query.device).expand(rows, -1)
    documents, positions = (
        (places // (length // 4)).contiguous(),
        (places % (length // 4)).contiguous(),
    )
    masks = {
        "flex causal": lambda row, head, i, j: i >= j,
        "flex documents by ids": lambda row, head, i, j: (
            (i >= j) & (documents[row, i] == documents[row, j])
        ),
        "flex documents by start": lambda row, head, i, j: (
            (i >= j) & (j >= i - positions[row, i])
        ),
    }
    compiled = torch.compile(flex_attention) if query.is_cuda else flex_attention
    entries = {}
    for name, mask in masks.items():
        blocks = create_block_mask(mask, rows, None, length, length, device=str(query.device))
        attend = partial(compiled, query, key, value, block_mask=blocks, enable_gqa=True)
        if query.is_cuda:
            entries[name] = {"ms": _ms(partial(_gradient, query, attend))}
        else:  # a CPU has no backward of it
            plain = (each.detach() for each in (query, key, value))
            entries[name] = {
                "ms": _ms(partial(compiled, *plain, block_mask=blocks, enable_gqa=True))
            }
    if query.is_cuda:  # a CPU has no kernel of it
        lengths = DocumentLengths.of(documents.cpu(), query.device)
        by_lengths = partial(attend_lengths, (query, key, value), lengths, scaling=None)
        entries["documents by lengths"] = {"ms": _ms(partial(_gradient, query, by_lengths))}
    return entries


def _gradient(query: Any, attend: Callable[[], Any]) -> Any:
    """The gradient of the queries by one forward and backward."""
    query.grad = None
    attend().sum().backward()
    return query.grad.clone()


def _heads(rows: int, heads: int, length: int, head_dim: int, device: str) -> Any:
    """Random heads, bfloat16 [rows, heads, length, head_dim], laid out as a projection leaves them."""
    import torch

    whole = torch.randn(rows, length, heads, head_dim, device=device, dtype=torch.bfloat16)
    return whole.transpose(1, 2).detach().requires_grad_()


def _ms(call: Callable[[], Any], times: int = 10) -> float:
    for _ in range(3):
        call()
    _wait()
    started = time.perf_counter()
    for _ in range(times):
        call()
    _wait()
    return (time.perf_counter() - started) / times * 1e3


def bits(*, deterministic: bool, tiny: bool) -> dict[str, Any]:
    """Two runs of one seed, and one that is stopped in the middle and resumed: in how many steps all are the same."""
    steps, length = (6, 64) if tiny else (30, 1024)
    keys = [
        "--train.steps",
        str(steps),
        "--model.dtype",
        "bfloat16",
        "--log.every",
        "1",
        "--mesh.dp",
        "1",
    ]
    keys += [
        "--mesh.cp",
        "1",
        "--mesh.tp",
        "1",
        "--data.seq_len",
        str(length),
        "--log.sample_tokens",
        "0",
    ]
    keys += ["--train.deterministic", str(deterministic).lower()]
    keys += ["--train.global_batch", "2"] if tiny else []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "other"):
            _command(folder, "train", *keys, "--log.dir", name)
        first = [
            *keys,
            "--checkpoint.every",
            str(steps // 2),
            "--optimizer.schedule",
            "constant",
        ]
        _command(folder, "train", *first, "--log.dir", "whole")
        _command(
            folder, "train", *first, "--log.dir", "again", "--train.steps", str(steps // 2)
        )
        _command(folder, "resume", "again", "--train.steps", str(steps))
        losses = {
            name: _losses(Path(folder) / name) for name in ("one", "other", "whole", "again")
        }
    same = sum(one == other for one, other in zip(losses["one"], losses["other"], strict=True))
    resumed = sum(
        one == other for one, other in zip(losses["whole"], losses["again"], strict=True)
    )
    return {"steps": steps, "same_in_a_second_run": same, "same_when_resumed": resumed}


def _command(folder: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "threefold", *words], cwd=folder, check=True)


def _losses(run: Path) -> list[tuple[float, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line]
