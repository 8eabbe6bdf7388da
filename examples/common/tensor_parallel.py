"""Tensor parallelism with transformers' own from_pretrained on dp 2 x tp 2, beside FSDP2 and a world of copies.

torchrun --nproc-per-node 4 examples/common/tensor_parallel.py [--plain]

The usual form gives from_pretrained the tp part of a mesh and tp_plan="auto" (`--plain`). transformers 5.23 does not
use that mesh: it splits over all ranks of the world. The form that works is DistributedConfig, with the sampler on the
data ranks. Without tp, fully_shard holds a share of each weight, and DDP (FSDP's NO_SHARD) the whole of it.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import threefold

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
ROWS = torch.arange(8 * 16).view(8, 16)


def held(model: Any) -> int:
    """Numbers that this rank holds of the first layer's queries."""
    weight = next(
        value for name, value in model.named_parameters() if name.endswith("layers.0.self_attn.q_proj.weight")
    )
    return int((weight.to_local() if hasattr(weight, "to_local") else weight).numel())


def losses(model: Any, sampler: Any) -> float:
    """The mean loss over all rows, of which each data rank computes its own; tp ranks compute the same ones."""
    ids = ROWS[list(sampler)]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder[0])
    dist.barrier()

    def load(**how: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder[0], **how)

    over_dp = threefold.DistributedSampler(ROWS, mesh=mesh, shuffle=False)
    over_all = threefold.DistributedSampler(ROWS, 4, dist.get_rank(), shuffle=False)
    forms: dict[str, tuple[Any, Any]] = {}
    if "--plain" in sys.argv:
        forms['device_mesh=mesh["tp"], tp_plan="auto"'] = (load(device_mesh=mesh["tp"], tp_plan="auto"), over_dp)
    else:
        split = DistributedConfig(tp_size=2, fsdp_size=2)
        forms["DistributedConfig(tp_size=2, fsdp_size=2)"] = (load(distributed_config=split), over_dp)
        forms["fully_shard(model)"] = (fully_shard(load()), over_all)
        forms["DistributedDataParallel(model)"] = (DistributedDataParallel(load()), over_all)
    for name, (model, sampler) in forms.items():
        try:
            result = f"loss {losses(model, sampler):.5f}"
        except RuntimeError as error:
            result = f"RuntimeError: {error}"
        if dist.get_rank() == 0:
            print(f"{name}: {held(model)} of 1,024 numbers on a rank; {result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
