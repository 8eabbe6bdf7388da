"""A loop of one's own that saves and goes on, on any mesh: torchrun --nproc-per-node 8 save_and_resume.py 2 2 2"""

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
    step = threefold.TrainStep(model, lr=5e-3)
    loader = threefold.distribute(DataLoader(rows(), batch_size=16 // mesh.dp_size, shuffle=True, drop_last=True))
    found = threefold.load(folder, model=model, optimizer=step, loader=loader)
    done = found.step if found else 0
    while done < steps:
        for batch in loader:
            loss, norm = step(batch)
            done += 1
            if mesh.rank == 0:
                print(f"step {done}: loss {loss:.5f}, gradient norm {norm:.3f}", flush=True)
            if done == steps:
                break
    threefold.save(folder, model=model, step=done, optimizer=step, loader=loader)
    mesh.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
