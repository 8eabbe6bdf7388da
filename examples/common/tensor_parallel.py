"""Tensor parallelism with transformers' own from_pretrained on dp 2 x tp 2, beside FSDP, FSDP2 and a world of copies.

torchrun --nproc-per-node 4 examples/common/tensor_parallel.py [--plain]

The usual form gives from_pretrained the tp part of a mesh and tp_plan="auto" (`--plain`). transformers 5.23 does not
use that mesh: it splits over all ranks of the world. The form that works is DistributedConfig, with the sampler on the
data ranks. Without tp, fully_shard and FSDP hold a share of the weights, and DDP and FSDP's NO_SHARD the whole of them.
torch's clip_grad_norm_ takes FSDP's shares for the whole (the mend: FSDP's own clip_grad_norm_, or FSDP2), and refuses
weights of two meshes, which tp beside FSDP2 has. threefold.TrainStep has one norm on every mesh.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
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


def norms(model: Any) -> str:
    """The norm of the whole gradient, as torch's clip_grad_norm_ has it on each rank."""
    try:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    except RuntimeError as error:
        return f"RuntimeError: {str(error).partition(', but got')[0]}"
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, f"{float(norm.full_tensor() if hasattr(norm, 'full_tensor') else norm):.4f}")
    return ", ".join(sorted(set(of_ranks)))


def fsdp(model: Any, strategy: ShardingStrategy) -> Any:
    return FullyShardedDataParallel(
        model, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )


def main(temporary: str) -> None:
    # torch warns of each model under FSDP and FSDP2, on every rank.
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    folder = [temporary]  # rank 0's, for all
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
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
            forms[f"FSDP, {strategy.name}"] = (fsdp(load(), strategy), over_all)
        forms["DistributedDataParallel(model)"] = (DistributedDataParallel(load()), over_all)
    for name, (model, sampler) in forms.items():
        try:
            loss = losses(model, sampler)
            result = f"loss {loss:.5f}, gradient norm {norms(model)}"
        except RuntimeError as error:
            result = f"RuntimeError: {error}"
        if dist.get_rank() == 0:
            print(f"{name}: {held(model)} of 1,024 numbers on a rank; {result}")
    if "--plain" not in sys.argv:
        ids = ROWS[list(over_dp)]
        split = threefold.load_model(folder[0], mesh=threefold.init_mesh(dp=2, tp=2))
        # Labels are the next tokens, and none after the last.
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        numbers = threefold.TrainStep(split, lr=1e-3)({"input_ids": ids, "labels": labels})
        if dist.get_rank() == 0:
            print(f"threefold.TrainStep on dp 2 x tp 2: loss {numbers.loss:.5f}, gradient norm {numbers.grad_norm:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
