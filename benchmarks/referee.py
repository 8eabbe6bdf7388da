"""What the referee costs a program, by steps with and without it, in turns, in one process of each of two ranks.

    python benchmarks/referee.py [--recorded 12] [--turns 100] [--tokens 256]

The ranks run under the recorder, as `threefold referee` starts them. Its hooks wrap functions of torch, so a step
without the referee is one with the wrapped functions put back. A turn is a step of each kind, every second turn the
other way round. Shown is, of rank 0, which writes the weights, the ratio of a turn and what a step takes longer: median
and middle half, of the time that passes and of the CPU time of the process (the steadier one on a shared machine).

What the hooks do in a step that is not recorded does not depend on what the model computes: with --tokens 1 it is seen
apart from the noise of a longer step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from threefold.referee.watch import watch

WARM_UP = 3


@contextmanager
def without_referee() -> Iterator[None]:
    """Puts back what the referee's hooks wrap."""
    import torch
    from torch.optim import optimizer
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    places = [
        (torch.nn.Module, "__call__"),
        (torch.Tensor, "backward"),
        (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
        (_BaseDataLoaderIter, "__next__"),
    ]
    watched = [getattr(owner, name) for owner, name in places]
    step_hooks = dict(optimizer._global_optimizer_pre_hooks)
    assert len(step_hooks) == 1
    for (owner, name), wrapper in zip(places, watched, strict=True):
        setattr(owner, name, wrapper.__wrapped__)
    optimizer._global_optimizer_pre_hooks.clear()
    try:
        yield
    finally:
        optimizer._global_optimizer_pre_hooks.update(step_hooks)
        for (owner, name), wrapper in zip(places, watched, strict=True):
            setattr(owner, name, wrapper)


def train(written: Path, num_recorded: int, num_turns: int, num_tokens: int) -> None:
    """The program: Llama of 4.2M parameters, DistributedDataParallel, 4 rows a rank, one thread."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    model = DistributedDataParallel(
        LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_key_value_heads=4, **sizes))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    num_steps = WARM_UP + 2 * num_recorded + 2 * num_turns
    rows = [torch.randint(0, 2048, (num_tokens,)) for _ in range(8 * num_steps)]
    batches = iter(DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows)))

    def seconds_of_step() -> tuple[float, float]:
        dist.barrier()
        begun = time.perf_counter(), time.process_time()
        ids = next(batches)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    with without_referee():
        for _ in range(WARM_UP):
            seconds_of_step()
    for kind, turns in (("recorded", num_recorded), ("others", num_turns)):
        for turn in range(turns):
            seconds = {}
            for name in ("plain", "watched")[:: -1 if turn % 2 else 1]:
                with without_referee() if name == "plain" else nullcontext():
                    seconds[name] = seconds_of_step()
            if dist.get_rank() == 0:
                with written.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"kind": kind, **seconds}) + "\n")
    dist.destroy_process_group()


def show(turns: list[dict[str, Any]], kind: str) -> None:
    """Prints the ratios of the turns of a kind."""
    of_kind = [turn for turn in turns if turn["kind"] == kind]
    for place, clock in enumerate(("time", "CPU time")):
        ratios = [turn["watched"][place] / turn["plain"][place] for turn in of_kind]
        low, middle, high = statistics.quantiles(ratios, n=4)
        longer = statistics.quantiles(
            [1e3 * (turn["watched"][place] - turn["plain"][place]) for turn in of_kind], n=4
        )
        plain = statistics.median(1e3 * turn["plain"][place] for turn in of_kind)
        shown = (
            "{1:+.2f} ({0:+.2f} to {2:+.2f}) ms".format(*longer)
            + f" a step of {plain:.0f} ms, {len(ratios)} turns"
        )
        print(f"{kind:8} {clock:8} x{middle:.3f} ({low:.3f} to {high:.3f}), {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recorded", type=int, default=12)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.recorded, options.turns, options.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "turns.jsonl")
        ranks = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
        ]
        numbers = [
            f"--{name}={getattr(options, name)}" for name in ("recorded", "turns", "tokens")
        ]
        command = [*ranks, str(Path(__file__).resolve()), "--train", str(written), *numbers]
        record = Path(folder, "record")
        code = watch(
            command, record, num_whole=options.recorded, keep_bytes=2**33, to_stderr=True
        )
        turns = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
        size = sum(path.stat().st_size for path in record.iterdir())
    for kind in ("recorded", "others"):
        show(turns, kind)
    print(f"exit code {code}; a record of {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
