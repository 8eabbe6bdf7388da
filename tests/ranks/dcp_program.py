"""A program of torch and transformers alone: reads a checkpoint's weights and moments into a model under FSDP2.

    RANK=0 WORLD_SIZE=2 python dcp_program.py STATE CONFIG.json OUT

Saves what every tensor holds then, whole, in OUT.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

state, config, out = sys.argv[1:]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "gloo", init_method=f"file://{out}.ranks", rank=rank, world_size=world_size
)
with open(config) as file:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.load(file)))
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
weights = model.state_dict()
moments = {
    name: {key: torch.zeros_like(value) for key, value in weights.items()}
    for name in ("exp_avg", "exp_avg_sq")
}
moments["step"] = {key: torch.zeros(()) for key in weights}
asked = {"model": weights, "optimizer": moments}
dcp.load(asked, storage_reader=HuggingFaceStorageReader(state))
model.load_state_dict(weights)
whole = {f"model.{key}": value.full_tensor() for key, value in model.state_dict().items()}
for name, values in moments.items():
    for key, value in values.items():
        whole[f"optimizer.{name}.{key}"] = (
            value.full_tensor() if hasattr(value, "full_tensor") else value
        )
if rank == 0:
    save_file({key: value.contiguous() for key, value in whole.items()}, out)
assert not any(name.startswith("threefold") for name in sys.modules)
dist.destroy_process_group()
