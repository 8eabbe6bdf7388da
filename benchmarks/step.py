"""Tokens per second of a training step, compared with a hand-written loop, accelerate and transformers' parallelism.

    python benchmarks/step.py [--rounds 3] [--steps 20] [--models 1M 10M] [--only NAME ...] [--cpu-time]

All contenders train the same Llama in float32 on the same random tokens: 8 rows of 256 per step, AdamW, gradient norm
clipped to 1. One process has 2 threads; each of two ranks has 1, as has every rank with exact sums. A round runs every
contender once. Ratios are taken within a round, relative to that round's hand-written loop, and the median over the
rounds is printed. Memory is each rank's peak resident size above its size before the model was made, in MiB. A rank
waits where its step takes longer than the CPU time of the thread that makes it.

On a machine that others use too, --cpu-time compares the CPU time that all ranks of a contender spend on a step, each
with 1 thread. It leaves out what ranks wait for one another, so it is the most that an idle machine can reach.

On a CUDA machine, each rank takes one device, and the sizes of --models may be larger (see MODELS).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from threefold.mesh import local_ranks
from threefold.run.start import PRELOAD

ROWS, SEQ_LEN, LR, CLIP = 8, 256, 1e-3, 1.0
WARMUP = 4
MODELS: dict[str, dict[str, Any]] = {
    "1M": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    },
    "10M": {
        "hidden_size": 320,
        "intermediate_size": 960,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
    },
}
Step = Callable[[Any], None]


def model_config(size: str) -> dict[str, Any]:
    """The architecture of one size, for every contender."""
    vocab = 257 if size == "1M" else 4096
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        **MODELS[size],
    }


def batches(vocab: int, *, rank: int, ranks: int) -> Iterator[dict[str, Any]]:
    """Yields batches of this rank's rows without end, made in advance so that no contender pays for them."""
    import torch

    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(4):
        tokens = torch.randint(vocab, (ROWS, SEQ_LEN + 1), generator=generator)
        rows = tokens[rank::ranks]
        positions = torch.arange(SEQ_LEN).expand(len(rows), -1).contiguous()
        made.append(
            {
                "input_ids": rows[:, :-1].contiguous(),
                "labels": rows[:, 1:],
                "position_ids": positions,
            }
        )
    while True:
        yield from made


def _plain_model(size: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = model_config(size)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )


def hand(size: str) -> Step:
    """A hand-written loop in one process."""
    import torch
    import torch.nn.functional as F

    model = _plain_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batch: Any) -> None:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(size: str, reduce: str = "fast", **sizes: Any) -> Step:
    """Threefold's step on a mesh."""
    from threefold.config.schema import Config
    from threefold.mesh.mesh import init_mesh
    from threefold.model import load
    from threefold.model.build import build
    from threefold.optim.build import build_optimizer
    from threefold.run.process import compute_alike
    from threefold.training.step import TrainStep

    mesh = init_mesh(**sizes)
    train = {"reduce": reduce, "global_batch": ROWS, "micro_batch": ROWS // mesh.dp_size}
    config = Config.model_validate(
        {"model": {"config": model_config(size)}, "optimizer": {"lr": LR}, "train": train}
    )
    compute_alike(config)
    model = build(config, load.read_config(config.model), mesh)
    optimizer = build_optimizer(model.module, config.optimizer, mesh, exact=reduce == "exact")
    step = TrainStep(model, optimizer, grad_clip=CLIP)
    return lambda batch: (step.run([batch], lr=LR), None)[1]


def accelerate_ddp(size: str) -> Step:
    """accelerate's loop with DDP. (Its FSDP plugin leaves a model on the CPU as it was, so it is not compared.)"""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = _plain_model(size)
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    )
    return _accelerate_step(accelerator, model, optimizer)


def _accelerate_step(accelerator: Any, model: Any, optimizer: Any) -> Step:
    import torch.nn.functional as F

    def step(batch: Any) -> None:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformers_own(size: str, **parallel: int) -> Step:
    """transformers' DistributedConfig: its tensor parallelism or its FSDP2."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    folder = Path(tempfile.gettempdir()) / f"threefold-bench-{os.environ['MASTER_PORT']}"
    if int(os.environ.get("RANK", "0")) == 0:
        _plain_model(size).save_pretrained(folder)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if not torch.cuda.is_available() else "nccl")
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(**parallel)
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)

    def step(batch: Any) -> None:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        # torch's clipping refuses parameters of several meshes. Only the norm is left out here, in the peer's favour.
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# name: (ranks, ranks that read distinct rows, how to make its step)
CONTENDERS: dict[str, tuple[int, int, Callable[[str], Step]]] = {
    "hand-written loop, 1 process": (1, 1, hand),
    "threefold, 1 process": (1, 1, lambda size: ours(size)),
    "threefold, dp 2 (DDP)": (2, 2, lambda size: ours(size, dp=2)),
    "accelerate, DDP 2": (2, 2, accelerate_ddp),
    "threefold, dp_shard 2 (FSDP2)": (2, 2, lambda size: ours(size, dp=2, dp_shard=2)),
    "transformers, fsdp 2": (2, 2, lambda size: transformers_own(size, fsdp_size=2)),
    "threefold, tp 2": (2, 1, lambda size: ours(size, tp=2)),
    "transformers, tp 2": (2, 1, lambda size: transformers_own(size, tp_size=2)),
    "threefold, cp 2": (2, 1, lambda size: ours(size, cp=2)),
    "threefold, exact, 1 process": (1, 1, lambda size: ours(size, "exact")),
    "threefold, exact, dp_shard 2": (2, 2, lambda size: ours(size, "exact", dp=2, dp_shard=2)),
    "threefold, exact, dp 2": (2, 2, lambda size: ours(size, "exact", dp=2)),
}


def run_contender(name: str, size: str, steps: int, folder: str, cpu_time: bool) -> None:
    """Runs on each rank: warms up, times `steps` steps, and writes the result into a file of `folder`."""
    import logging
    import warnings

    import torch
    import transformers

    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    ranks, readers, make = CONTENDERS[name]
    torch.set_num_threads(1 if cpu_time else max(1, (os.cpu_count() or 1) // ranks))
    rank = int(os.environ.get("RANK", "0"))
    before = _resident_bytes()
    step = make(size)
    source = batches(
        model_config(size)["vocab_size"], rank=rank if readers > 1 else 0, ranks=readers
    )
    for _ in range(WARMUP):
        step(next(source))
    clock = time.process_time if cpu_time else time.perf_counter
    started, worked, begun = clock(), time.thread_time(), time.perf_counter()
    for _ in range(steps):
        step(next(source))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    waited = time.perf_counter() - begun - (time.thread_time() - worked)
    result = {"seconds": clock() - started, "memory": _peak_bytes() - before, "waited": waited}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _one(
    name: str, size: str, steps: int, folder: str, cpu_time: bool
) -> dict[str, float] | None:
    answers = [Path(folder, f"{rank}.json") for rank in range(CONTENDERS[name][0])]
    for answer in answers:
        answer.unlink(missing_ok=True)
    code = local_ranks.start_ranks(
        run_contender, (name, size, steps, folder, cpu_time), num_ranks=len(answers)
    )
    if code or not all(answer.exists() for answer in answers):
        print(f"{name}, {size}: ended with exit code {code}", file=sys.stderr)
        return None
    told = [json.loads(answer.read_text()) for answer in answers]
    seconds = sum(each["seconds"] for each in told) if cpu_time else told[0]["seconds"]
    found = {"tokens_per_s": ROWS * SEQ_LEN * steps / seconds, "memory": told[0]["memory"]}
    found["waits_ms"] = told[0]["waited"] / steps * 1000
    print(
        f"  {size:>4} {name:<32} {found['tokens_per_s']:>9,.0f} tokens/s",
        file=sys.stderr,
        flush=True,
    )
    return found


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=["1M", "10M"], choices=list(MODELS))
    parser.add_argument(
        "--only", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS), metavar="NAME"
    )
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    local_ranks.preload(PRELOAD)
    baseline = next(iter(CONTENDERS))
    names = [name for name in CONTENDERS if name in arguments.only or name == baseline]
    print(f"rows of {SEQ_LEN} tokens, {ROWS} a step, float32, {os.cpu_count()} cores;", end=" ")
    print(f"medians of {arguments.rounds} rounds\n")
    per = "CPU second" if arguments.cpu_time else "s"
    print(
        f"| model | contender | tokens/{per} | of the hand-written loop | peak memory a rank, MiB | waits, ms a step |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="threefold-bench-") as folder:
        for size in arguments.models:
            rounds = [
                {
                    name: _one(name, size, arguments.steps, folder, arguments.cpu_time)
                    for name in names
                }
                for _ in range(arguments.rounds)
            ]
            for name in names:
                print(
                    _row(size, name, [(found[name], found[baseline]) for found in rounds]),
                    flush=True,
                )


def _row(
    size: str, name: str, rounds: list[tuple[dict[str, float] | None, dict[str, float] | None]]
) -> str:
    done = [(own, base) for own, base in rounds if own is not None and base is not None]
    if not done:
        return f"| {size} | {name} | failed | | | |"
    speed = statistics.median(own["tokens_per_s"] for own, _ in done)
    ratio = statistics.median(own["tokens_per_s"] / base["tokens_per_s"] for own, base in done)
    memory = statistics.median(own["memory"] for own, _ in done) / 2**20
    waits = statistics.median(own["waits_ms"] for own, _ in done)
    return f"| {size} | {name} | {speed:,.0f} | {ratio:.2f} | {memory:,.0f} | {waits:,.0f} |"


if __name__ == "__main__":
    main()
