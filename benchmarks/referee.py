"""What the referee costs: a loop on two ranks with and without it, in turns.

    python benchmarks/referee.py [--rounds 3] [--steps 40]

Prints the time of a step, as a ratio to the same loop without the referee in the same round: of the steps that are
recorded whole (the first three), and of all others; and the time of the whole command, verdict included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RECORDED = 3
WARM_UP = 5


def train(steps: int) -> None:
    """The program: Llama of about 1M parameters, DistributedDataParallel, 4 rows of 256 tokens a rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=4, **sizes))
    # The first calls of a process are slower, with the referee or without: of a model that is not trained.
    warm = torch.randint(0, 512, (4, 256))
    for _ in range(WARM_UP):
        model.eval()(input_ids=warm, labels=warm).loss.backward()
    model.zero_grad()
    wrapped = DistributedDataParallel(model.train())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    rows = [torch.randint(0, 512, (256,)) for _ in range(8 * steps)]
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
    times = []
    for ids in loader:
        begin = time.perf_counter()
        optimizer.zero_grad()
        wrapped(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print("times", json.dumps(times))
    dist.destroy_process_group()


def measured(steps: int, *, watched: bool) -> tuple[list[float], float]:
    """Seconds of each step, and of the whole command."""
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*ranks, str(Path(__file__).resolve()), "--train", str(steps)]
    referee = [sys.executable, "-m", "threefold", "referee", "--steps", str(RECORDED), "--"]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run([*(referee if watched else []), *command], cwd=folder, capture_output=True, text=True)
    whole = time.perf_counter() - begin
    line = next(line for line in ended.stdout.splitlines() if line.startswith("times "))
    return json.loads(line.removeprefix("times ")), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    recorded, others, wholes = [], [], []
    for _ in range(options.rounds):
        plain, alone = measured(options.steps, watched=False)
        watched, whole = measured(options.steps, watched=True)
        recorded.append(statistics.median(watched[:RECORDED]) / statistics.median(plain[:RECORDED]))
        others.append(statistics.median(watched[RECORDED:]) / statistics.median(plain[RECORDED:]))
        wholes.append((alone, whole))
        print(
            f"recorded steps x{recorded[-1]:.2f}, others x{others[-1]:.3f}; {alone:.1f} s, with verdict {whole:.1f} s"
        )
    print(f"medians: recorded steps x{statistics.median(recorded):.2f}, others x{statistics.median(others):.3f}")


if __name__ == "__main__":
    main()
