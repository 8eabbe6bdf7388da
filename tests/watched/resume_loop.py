"""A loop that saves, and goes on from its save when it is started again: `resume_loop.py KIND STEPS [SAVE_AT]`.

clean: all that it takes is saved; fsdp2: by torch.distributed.checkpoint. Each other kind is a fault; next_epoch: a
save at the end of an epoch goes on behind the epoch that should follow; local_names: the second layer is loaded with
the weights of the first.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Qwen3Config, Qwen3ForCausalLM

kind, num_steps = sys.argv[1], int(sys.argv[2])
save_at = [int(step) for step in sys.argv[3:]]
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
model = Qwen3ForCausalLM(
    Qwen3Config(vocab_size=97, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
)
if kind == "fsdp2":
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    wrapped = model
else:
    wrapped = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
rows = [torch.randint(0, 97, (16,)) for _ in range(64)]
sampler = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
step = skipped = 0
if Path("saved").exists():
    if kind == "fsdp2":
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id="saved")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    else:
        saved = torch.load("saved/state.pt")
        if kind == "local_names":
            # Each stage counts its layers from 0, and the names of a save are taken for those of the whole model.
            first = {
                name: value for name, value in saved["model"].items() if "layers.0." in name
            }
            saved["model"] |= {
                name.replace("layers.0.", "layers.1."): value for name, value in first.items()
            }
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["older" if kind == "stale" else "optimizer"])
    rest = torch.load("saved/rest.pt")
    step = rest["step"]
    skipped = int(kind == "next_epoch")
    if kind != "no_schedule":
        schedule.load_state_dict(rest["schedule"])
older = None
while step < num_steps:
    epoch, begin = divmod(step, len(loader))
    sampler.set_epoch(epoch + skipped)
    for place, batch in enumerate(loader):
        if place < begin and kind != "rows":
            continue
        if step == num_steps:
            break
        optimizer.zero_grad()
        wrapped(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        schedule.step()
        step += 1
        if step in save_at:
            Path("saved").mkdir(exist_ok=True)
            if kind == "fsdp2":
                weights, moments = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="saved")
            elif dist.get_rank() == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "older": older,
                }
                torch.save(state, "saved/state.pt")
            older = (
                torch.load("saved/state.pt")["optimizer"]
                if dist.get_rank() == 0 and kind == "stale"
                else None
            )
            if dist.get_rank() == 0:
                torch.save({"step": step, "schedule": schedule.state_dict()}, "saved/rest.pt")
            dist.barrier()
dist.destroy_process_group()
