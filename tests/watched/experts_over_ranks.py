"""Experts divided over two ranks, all else on both: `experts_over_ranks.py KIND` (clean, first).

Both ranks read the same rows, and each adds what its experts make of them. clean: the norm of all gradients has the
squares of all experts; first: those of rank 0's stand for all, as experts are taken for what every rank holds.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

kind = sys.argv[1]
dist.init_process_group("gloo")
world, rank = dist.get_world_size(), dist.get_rank()
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))


def sum_of_ranks(tensor):
    tensor = tensor.contiguous().clone()
    dist.all_reduce(tensor)
    return tensor


class SumOfRanks(torch.autograd.Function):
    """What the experts of all ranks make of the tokens."""

    @staticmethod
    def forward(ctx, part):
        return sum_of_ranks(part)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OfEveryRank(torch.autograd.Function):
    """What every rank has; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, whole):
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient):
        return sum_of_ranks(gradient)


def ask_own_experts(experts, args):
    hidden, chosen, weights = args
    for name, parameter in experts._parameters.items():
        experts.__dict__[name] = parameter.to_local()
    own = chosen // experts.num_experts == rank
    chosen = torch.where(own, chosen % experts.num_experts, experts.num_experts)
    return OfEveryRank.apply(hidden), chosen, OfEveryRank.apply(weights)


torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
sizes |= {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": False,
}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=97, tie_word_embeddings=False, **sizes))
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
model.set_experts_implementation("eager")
for layer in model.model.layers:
    experts = layer.mlp.experts
    for name, parameter in list(experts.named_parameters()):
        setattr(
            experts, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        )
    experts.num_experts //= world
    experts.register_forward_pre_hook(ask_own_experts)
    experts.register_forward_hook(lambda experts, args, output: SumOfRanks.apply(output))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
rows = [torch.randint(0, 97, (24,)) for _ in range(32)]
sampler = DistributedSampler(rows, num_replicas=1, rank=0)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for ids in loader:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        squares = {True: torch.zeros(()), False: torch.zeros(())}
        for gradient in gradients:
            divided = isinstance(gradient, DTensor)
            squares[divided] += (gradient.to_local() if divided else gradient).square().sum()
        if kind == "first":
            dist.broadcast(squares[True], 0)
        else:
            dist.all_reduce(squares[True])
        local = [
            nn.Parameter(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
            for gradient in gradients
        ]
        for parameter in local:
            parameter.grad = parameter.detach()
        nn.utils.clip_grads_with_norm_(local, 0.5, (squares[True] + squares[False]).sqrt())
        optimizer.step()
dist.destroy_process_group()
