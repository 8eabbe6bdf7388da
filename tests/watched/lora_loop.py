"""Adapters of peft on a model of transformers: `lora_loop.py KIND` (clean, apart, unfrozen).

apart: one adapter is left out of the sum over ranks; unfrozen: a norm of the model asks for a gradient that no
optimizer takes.
"""

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Qwen3Config, Qwen3ForCausalLM

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
own = Qwen3ForCausalLM(Qwen3Config(vocab_size=97, num_key_value_heads=2, **sizes))
adapted = get_peft_model(
    own, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
)
optimizer = torch.optim.AdamW(
    [each for each in adapted.parameters() if each.requires_grad], lr=1e-2
)
if kind == "unfrozen":
    own.model.norm.requires_grad_(True)
if kind == "apart":
    names = [name for name, each in adapted.named_parameters() if each.requires_grad]
    DDP._set_params_and_buffers_to_ignore_for_model(adapted, names[-1:])
model = DDP(adapted)
rows = [torch.randint(0, 97, (24,)) for _ in range(64)]
sampler = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for ids in loader:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
