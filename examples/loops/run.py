"""A loop of one's own with the guarantees of a run: torchrun --nproc-per-node 8 run.py runs/mine 40 2 2 2"""

import sys

import torch
from torch.utils.data import DataLoader

import threefold

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def rows() -> list[dict]:
    """Counting by a step of its own, from a start of its own, modulo 64."""
    tokens = [(start + step * torch.arange(33)) % 64 for start in range(16) for step in range(1, 5)]
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


def main(folder: str, steps: int, dp: int = 1, cp: int = 1, tp: int = 1) -> None:
    mesh = threefold.init_mesh(dp=dp, cp=cp, tp=tp)
    model = threefold.load_model(config=LLAMA, mesh=mesh)
    loader = threefold.distribute(DataLoader(rows(), batch_size=16 // mesh.dp_size, shuffle=True, drop_last=True))
    with threefold.Run(folder, mesh=mesh, config={"train.nonfinite": "skip"}) as run:
        step = threefold.TrainStep(model, lr=5e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.98)
        run.load(step, loader, schedule=schedule)  # the state of the newest checkpoint, if there is one
        for batch in run.steps(loader, until=steps, save_every=10):
            numbers = step(batch)
            schedule.step()
            run.log(numbers)
            if mesh.rank == 0:
                print(f"step {run.step}: loss {numbers.loss:.5f}, gradient norm {numbers.grad_norm:.3f}", flush=True)
    mesh.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
