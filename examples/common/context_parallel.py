"""A sequence split over two ranks: by hand, by torch's context_parallel, and by a mesh of Threefold.

torchrun --nproc-per-node 2 examples/common/context_parallel.py

The usual form is input_ids.chunk(2, dim=1) and the model's own loss. A token of the second half then sees nothing of
the first one, positions begin anew, and the label that crosses from one half to the other is lost. torch's
context_parallel exchanges keys and values; on a CPU torch 2.13 refuses it. The model of a mesh takes whole rows.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import cross_entropy, pad
from transformers import LlamaConfig, LlamaForCausalLM

import threefold

VOCABULARY, HALF, STEPS = 32, 16, 150
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4)


def rows(seed: int) -> torch.Tensor:
    """Random tokens, then the same once more: the second half can be predicted by whoever sees the first."""
    half = torch.randint(VOCABULARY, (32, HALF), generator=torch.Generator().manual_seed(seed))
    return torch.cat([half, half], dim=1)


def shifted(ids: torch.Tensor) -> torch.Tensor:
    """The token that follows each one; after the last, none. Before the split, so that no label is lost there."""
    return pad(ids[:, 1:], (0, 1), value=-100)


def trained() -> Any:
    """The same on every rank: it has learnt to repeat."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for seed in range(1, STEPS):
        ids = rows(seed)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


def by_hand(model: Any, ids: torch.Tensor) -> float:
    own = ids.chunk(2, dim=1)[dist.get_rank()]
    loss = model(input_ids=own, labels=own).loss.detach()
    dist.all_reduce(loss)
    return float(loss) / 2


def by_torch(model: Any, ids: torch.Tensor) -> float:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    positions = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
    buffers = [ids.clone(), shifted(ids), positions]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        logits = model(input_ids=buffers[0], position_ids=buffers[2]).logits
        loss = cross_entropy(logits.flatten(0, 1), buffers[1].flatten(), reduction="sum").detach()
    dist.all_reduce(loss)
    return float(loss) / int((shifted(ids) != -100).sum())


def by_mesh(mesh: threefold.Mesh, folder: str, ids: torch.Tensor) -> float:
    split = threefold.load_model(folder, mesh=mesh)
    return threefold.EvalStep(split)([{"input_ids": ids, "labels": shifted(ids)}]).loss


def main(folder: str) -> None:
    mesh = threefold.init_mesh(cp=2)
    transformers.utils.logging.disable_progress_bar()
    model, ids = trained(), rows(0)
    folders = [folder]
    dist.broadcast_object_list(folders)
    if mesh.rank == 0:
        model.save_pretrained(folder)
    dist.barrier()
    losses: dict[str, Any] = {
        "one process": lambda: float(model(input_ids=ids, labels=ids).loss.detach()),
        "input_ids.chunk(2, dim=1)": lambda: by_hand(model, ids),
        "torch's context_parallel": lambda: by_torch(model, ids),
        "threefold.load_model on cp=2": lambda: by_mesh(mesh, folders[0], ids),
    }
    for name, compute in losses.items():
        try:
            outcome = f"loss {compute():.5f}"
        except NotImplementedError as error:
            outcome = f"NotImplementedError: {error}"
        if mesh.rank == 0:
            print(f"{name}: {outcome}", flush=True)
    dist.barrier()
    mesh.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
