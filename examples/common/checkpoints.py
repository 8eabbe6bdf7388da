"""A program of torch and transformers alone under FSDP2: its checkpoints become a run, and a run becomes its weights.

torchrun --nproc-per-node 2 examples/common/checkpoints.py write FOLDER
torchrun --nproc-per-node 2 examples/common/checkpoints.py read PATH

`write` trains three steps and saves twice: in the usual form, torch.save(model.state_dict()) on rank 0, which has that
rank's share of each weight and says that it is the whole; and by torch.distributed.checkpoint (DCP), which
`threefold import` reads. `read` prints the loss of the same rows with the weights of PATH: rank0.pt, the folder of DCP,
a run, or a folder of `threefold export`. It imports nothing of Threefold.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)


def rows(step: int) -> torch.Tensor:
    return (torch.arange(8)[:, None] * 31 + step + torch.arange(32) * 3) % 257


def model(*, seed: int) -> Any:
    torch.manual_seed(seed)
    sharded = LlamaForCausalLM(CONFIG)
    for layer in sharded.model.layers:
        fully_shard(layer)
    return fully_shard(sharded)


def loss_of(trained: Any, step: int) -> torch.Tensor:
    # Each rank computes half of the rows; FSDP averages their gradients.
    own = rows(step).chunk(dist.get_world_size())[dist.get_rank()]
    return trained(input_ids=own, labels=own).loss


def shown_loss(trained: Any) -> str:
    with torch.no_grad():
        loss = loss_of(trained, 3).clone()
    dist.all_reduce(loss)
    return f"loss {float(loss) / dist.get_world_size():.6f}"


def write(folder: Path) -> str:
    trained = model(seed=0)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(trained, step).backward()
        optimizer.step()
    weights, moments = get_state_dict(trained, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
    if dist.get_rank() == 0:
        torch.save(trained.state_dict(), folder / "rank0.pt")
        # For the import; JSON is YAML.
        architecture = {"model_type": "llama", **CONFIG.to_diff_dict()}
        (folder / "config.yaml").write_text(json.dumps({"model": {"config": architecture}}))
    return f"{shown_loss(trained)} after three steps"


def read(path: Path) -> str:
    if path.suffix == ".pt":
        complete = LlamaForCausalLM(CONFIG)
        complete.load_state_dict(torch.load(path, weights_only=True))
        return shown_loss(complete)
    if (path / "config.json").is_file():
        return shown_loss(AutoModelForCausalLM.from_pretrained(path))
    loaded = model(seed=1)
    weights = {"model": loaded.state_dict()}
    if (path / "checkpoints").is_dir():
        newest = max((path / "checkpoints").iterdir())
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(newest / "state"))
    else:
        dcp.load(weights, checkpoint_id=path)
    loaded.load_state_dict(weights["model"])
    return shown_loss(loaded)


def main(action: str, path: Path) -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    dist.init_process_group("gloo")
    try:
        outcome = write(path) if action == "write" else read(path)
    except RuntimeError as error:
        outcome = "RuntimeError: " + " ".join(str(error).splitlines()[:2]).replace("\t", "")
    if dist.get_rank() == 0:
        print(f"{path.name}: {outcome}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
