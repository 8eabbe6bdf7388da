"""Collectives of one's own along an axis of the mesh: a figure of each dp rank's rows, on all of them."""

import sys

import torch
import torch.distributed as dist

import threefold

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def main(dp: int = 1, cp: int = 1, tp: int = 1) -> None:
    mesh = threefold.init_mesh(dp=dp, cp=cp, tp=tp)
    model = threefold.load_model(config=LLAMA, mesh=mesh)
    step = threefold.TrainStep(model, lr=2e-3)
    for number in range(4):
        ids = torch.randint(64, (8, 33), generator=torch.Generator().manual_seed(number))[mesh.dp_rank :: dp]
        loss, norm = step({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
        longest = (ids == 0).sum(1).amax().float().to(mesh.device)
        # None where the axis has one rank: there is nobody to send to.
        if (axis := mesh.device_mesh("dp")) is not None:
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=axis.get_group())
        if mesh.rank == 0:
            print(f"step {number + 1}: loss {loss:.5f}, gradient norm {norm:.3f}, most zeros {longest:.0f}", flush=True)
    mesh.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
