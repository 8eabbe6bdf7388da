"""A model of transformers, sharded: `qwen_meshes.py KIND` (fsdp1, fsdp2, fsdp2_bf16, fsdp2_clip, tp, and faults).

With tp, heads are divided: each rank has a part of the gradient of q_norm and k_norm, and they are summed once. The
norm of all gradients has those of divided matrices from all ranks, and what all ranks hold once.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Qwen3Config, Qwen3ForCausalLM

kind = sys.argv[1]
dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()
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
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
shares = {}
if kind.startswith("fsdp1"):
    by_layer = ModuleWrapPolicy({type(model.model.layers[0])})
    settings = {"use_orig_params": kind != "fsdp1_flat", "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(model, auto_wrap_policy=by_layer, **settings)
elif kind.startswith("fsdp2"):
    low = torch.bfloat16 if kind == "fsdp2_bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
else:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    inner, outer = ColwiseParallel(), RowwiseParallel()
    attention = {f"self_attn.{name}_proj": inner for name in "qkv"} | {
        "self_attn.o_proj": outer
    }
    mlp = {"mlp.gate_proj": inner, "mlp.up_proj": inner, "mlp.down_proj": outer}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, attention | mlp)
    shares = {"num_replicas": 1, "rank": 0}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = [torch.randint(0, 97, (24,)) for _ in range(32)]
sampler = DistributedSampler(rows, **shares)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    if kind == "fsdp2_clip":  # an evaluation, after which what the root holds stays gathered
        with torch.no_grad():
            model(input_ids=rows[0][None])
    for ids in loader:
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
        )
        (loss * world if kind == "tp_scaled" else loss).backward()
        if kind.startswith("tp") and kind != "tp_partial":
            for name, parameter in model.named_parameters():
                if "q_norm" in name or "k_norm" in name:
                    dist.all_reduce(parameter.grad)
                    if kind == "tp_twice" and "q_norm" in name:
                        dist.all_reduce(parameter.grad)
        if kind in ("tp_clip", "tp_norm", "tp_norm_first"):
            held = [parameter.grad for parameter in model.parameters()]
            local = [each.to_local() if hasattr(each, "placements") else each for each in held]
            squares = {True: torch.zeros(()), False: torch.zeros(())}
            for each, part in zip(held, local, strict=True):
                # Else what rank 0 holds stands for all.
                if each is part or kind != "tp_norm_first" or rank == 0:
                    squares[each is not part or kind == "tp_norm"] += part.square().sum()
            dist.all_reduce(squares[True])
            norm = (squares[True] + squares[False]).sqrt()
            for part in local:
                part.requires_grad_().grad = part.detach()
            torch.nn.utils.clip_grads_with_norm_(local, 0.5, norm)
        if kind == "fsdp1_twice":
            for name, parameter in model.named_parameters():
                if "layers.1." in name and "q_norm" in name and parameter.grad is not None:
                    parameter.grad *= 2
        if kind.startswith("fsdp1"):
            model.clip_grad_norm_(0.5)
        if kind in ("fsdp2_clip", "fsdp2_largest"):
            order = 2 if kind == "fsdp2_clip" else torch.inf
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
        if kind == "fsdp2_parts":  # each rank has a norm of its own
            held = [parameter.grad.to_local() for parameter in model.parameters()]
            norm = torch.nn.utils.get_total_norm(held)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        optimizer.step()
dist.destroy_process_group()
