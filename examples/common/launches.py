"""One program under each launcher: its mesh from TP_SIZE, DP_SIZE and CP_SIZE, its loss in TensorBoard.

torchrun --nproc-per-node 4 examples/common/launches.py runs/launched
DP_SIZE=4 TP_SIZE=2 torchrun --nproc-per-node 8 examples/common/launches.py runs/launched
accelerate launch --cpu --num_processes=2 examples/common/launches.py runs/launched

The usual form of a tracker (`--plain`) is a SummaryWriter where LOCAL_RANK is 0, with the loss of that rank. On two
nodes there are two of them, which write two curves under one name, and neither is the loss of the global batch. A Run
has one writer, and the numbers of a step are those of all ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from transformers import LlamaConfig, LlamaForCausalLM

import threefold

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
STEPS, GLOBAL_BATCH = 4, 16


def rows() -> list[dict[str, torch.Tensor]]:
    """Counting by a step of its own, from a start of its own, modulo 64."""
    tokens = [(start + step * torch.arange(33)) % 64 for start in range(16) for step in range(1, 5)]
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


def plain(folder: Path) -> None:
    """A loop of torch with DDP; TP_SIZE and CP_SIZE have no effect on it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(LlamaForCausalLM(LlamaConfig(**SIZES)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    writer = SummaryWriter(folder) if os.environ["LOCAL_RANK"] == "0" else None
    sampler: Any = DistributedSampler(rows())  # type: ignore[arg-type]
    loader = DataLoader(rows(), batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)  # type: ignore[arg-type]
    for step, batch in zip(range(1, STEPS + 1), loader, strict=False):
        # transformers shifts labels by itself; ours are shifted.
        loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if writer is not None:
            writer.add_scalar("loss", loss.item(), step)
    if writer is not None:
        writer.close()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"DDP on {dist.get_world_size()} ranks; {curves(folder)}")
    dist.destroy_process_group()


def on_mesh(folder: Path) -> None:
    mesh = threefold.init_mesh()
    model = threefold.load_model(config={"model_type": "llama", **SIZES}, mesh=mesh)
    batch_size = GLOBAL_BATCH // mesh.dp_size
    loader = threefold.distribute(DataLoader(rows(), batch_size=batch_size, shuffle=True))  # type: ignore[arg-type]
    step = threefold.TrainStep(model, lr=5e-3)
    with threefold.Run(folder, mesh=mesh, config={"log.trackers": ["tensorboard"]}) as run:
        run.load(step, loader)
        for batch in run.steps(loader, until=STEPS):
            run.log(step(batch))
    if mesh.rank == 0:
        print(f"{mesh.topology}; {curves(folder)}")
    mesh.close()


def curves(folder: Path) -> str:
    """The writers that have left files, and what they say of the first step."""
    files = sorted(folder.rglob("events.out.tfevents.*"))
    first = []
    for file in files:
        events = EventAccumulator(str(file)).Reload()
        tags = [tag for tag in events.Tags()["scalars"] if tag.endswith("loss")]
        first += [event.value for tag in tags for event in events.Scalars(tag) if event.step == 1]
    return f"{len(files)} writer(s), loss of step 1: " + ", ".join(f"{value:.4f}" for value in sorted(first))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    plain(folder) if "--plain" in sys.argv else on_mesh(folder)
