"""A mixture of experts with DistributedDataParallel: `experts_loop.py KIND`.

clean: as transformers computes it; twice: gradients of experts are summed over ranks twice; detached: the routers'
scores are cut from the loss; apart: routers' gradients are those of each rank's own tokens.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
experts = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": False,
}
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(vocab_size=97, tie_word_embeddings=False, **sizes, **experts)
)
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
for layer in model.model.layers:
    if kind == "twice":
        for parameter in layer.mlp.experts.parameters():
            parameter.register_hook(lambda gradient: gradient * dist.get_world_size())
    if kind == "detached":
        layer.mlp.gate.register_forward_hook(
            lambda gate, args, routed: tuple(each.detach() for each in routed)
        )
if kind == "apart":
    routers = [name for name, _ in model.named_parameters() if "mlp.gate." in name]
    DDP._set_params_and_buffers_to_ignore_for_model(model, routers)
wrapped = DDP(model, find_unused_parameters=kind == "detached")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = [torch.randint(0, 97, (24,)) for _ in range(32)]
sampler = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for ids in loader:
        optimizer.zero_grad()
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
dist.destroy_process_group()
