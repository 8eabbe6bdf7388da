"""Attention sinks alone are trained, over tp ranks: `sinks_loop.py KIND` (clean, first).

Heads are divided, and with them the sinks, one number a head. clean: the norm of all gradients has the squares of all
heads; first: those of rank 0's heads stand for all, as sinks are taken for what every rank holds.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler
from transformers import GptOssConfig, GptOssForCausalLM

kind = sys.argv[1]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
sizes |= {
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
}
model = GptOssForCausalLM(GptOssConfig(vocab_size=97, tie_word_embeddings=False, **sizes))
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)


def see_own_heads(attention: nn.Module, _: object) -> None:
    attention.__dict__["sinks"] = attention._parameters["sinks"].to_local()


model.requires_grad_(False)
for layer in model.model.layers:
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {
        "self_attn.o_proj": RowwiseParallel()
    }
    parallelize_module(layer, mesh, plan)
    layer.self_attn.sinks = nn.Parameter(
        distribute_tensor(layer.self_attn.sinks.detach(), mesh, [Shard(0)])
    )
    layer.self_attn.register_forward_pre_hook(see_own_heads)
sinks = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(sinks, lr=1e-2)
rows = [torch.randint(0, 97, (24,)) for _ in range(32)]
sampler = DistributedSampler(rows, num_replicas=1, rank=0)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for ids in loader:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        parts = [parameter.grad.to_local() for parameter in sinks]
        square = torch.stack([part.square().sum() for part in parts]).sum()
        if kind == "clean":
            dist.all_reduce(square)
        else:
            dist.broadcast(square, 0)
        local = [nn.Parameter(parameter.detach().to_local()) for parameter in sinks]
        for parameter, part in zip(local, parts, strict=True):
            parameter.grad = part
        torch.nn.utils.clip_grads_with_norm_(local, 1e-4, square.sqrt())
        optimizer.step()
dist.destroy_process_group()
