"""Exports weights in one process: all, as sharded safetensors in the Hugging Face Hub's form, or adapters in peft's.

Tensors are read layer by layer, converted to the Hub's names and layouts for the architecture, and written as soon as a
file is full. So memory holds one file and one layer, for any size of the model and any mesh it was trained on.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

from threefold.checkpoint.checkpoint_folder import Checkpoint
from threefold.checkpoint.manifest import read_manifest, refuse_other_base
from threefold.checkpoint.seal import sync
from threefold.checkpoint.state import read_weights
from threefold.checkpoint.tensor_index import Index
from threefold.checkpoint.tensors import TYPE_NAMES, read_whole, write_tensors
from threefold.config.schema import Config
from threefold.model import load, lora
from threefold.model.weight_check import is_adapter
from threefold.progress_bars import Bars

_LAYER = re.compile(r"(.*?\.\d+)\.")
_WEIGHTS = "model.safetensors"
_PART = ".part-{:05d}"

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def write_weights(
    state: Path,
    index: Index,
    names: list[str],
    to: Path,
    *,
    max_shard_bytes: int,
    convert: Convert,
) -> list[str]:
    """Writes the weights to the folder `to`; returns the names of the files.

    Args:
        state: folder with the checkpoint's tensors.
        names: of the model's tensors, without the `model.` of the checkpoint.
        convert: maps a layer's tensors from the model's names to the Hub's names.
    """
    shards: list[dict[str, int]] = []
    pending: dict[str, Tensor] = {}

    def flush() -> None:
        if pending:
            ordered = sorted(
                pending.items(), key=lambda item: (-item[1].element_size(), item[0])
            )
            described = [
                (name, TYPE_NAMES[tensor.dtype], tuple(tensor.shape))
                for name, tensor in ordered
            ]
            path = to / _PART.format(len(shards))
            write_tensors(path, described, (tensor for _, tensor in ordered), {"format": "pt"})
            shards.append({name: tensor.nbytes for name, tensor in pending.items()})
            pending.clear()

    with Bars().show(
        "writing weights", sum(index.entries[f"model.{name}"].num_bytes for name in names)
    ) as bar:
        for name, tensor in converted(state, index, names, convert):
            if (
                pending
                and sum(held.nbytes for held in pending.values()) + tensor.nbytes
                > max_shard_bytes
            ):
                flush()
            pending[name] = tensor
            bar.advance(tensor.nbytes)
        flush()
    return _name_files(to, shards)


def converted(
    state: Path, index: Index, names: list[str], convert: Convert
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint as the Hub has them, a layer at a time."""

    def layer(name: str) -> str:
        return match[1] if (match := _LAYER.match(name)) else name

    for _, group in itertools.groupby(
        sorted(names, key=lambda name: (layer(name), name)), key=layer
    ):
        yield from convert(
            {name: read_whole(state, index.entries[f"model.{name}"]) for name in group}
        ).items()


def _name_files(to: Path, shards: list[dict[str, int]]) -> list[str]:
    """Gives the files their final names, which contain their number, and writes the index if there are several."""
    files = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    files = [_WEIGHTS] if len(shards) == 1 else files
    for number, file in enumerate(files):
        (to / _PART.format(number)).rename(to / file)
    if len(shards) > 1:
        weight_map = {
            name: file for file, shard in zip(files, shards, strict=True) for name in shard
        }
        total = sum(size for shard in shards for size in shard.values())
        content = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (to / f"{_WEIGHTS}.index.json").write_text(json.dumps(content, indent=2) + "\n")
    sync(to)
    return files


def model_with_adapters(
    checkpoint: Checkpoint, config: Config, architecture: PretrainedConfig, index: Index
) -> Any:
    """Returns the complete model that the run began with, in float32, with the checkpoint's adapters inserted.

    Raises:
        CheckpointError: the weights on which the adapters were trained are no longer available.
    """
    refuse_other_base(
        read_manifest(checkpoint), load.fingerprint(config.model), config, checkpoint
    )
    model = load.whole(config.model, architecture, seed=config.train.seed, dtype=torch.float32)
    lora.insert_whole(model, config.model.lora, seed=config.train.seed)
    read_weights(model, checkpoint.state, index)
    return model


def peft_weights(model: Any) -> dict[str, Tensor]:
    """A model's adapters under the names that peft has for them."""
    return {
        "base_model.model."
        + name.replace(f".{lora.ADAPTER}.", "."): parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
        if is_adapter(name)
    }


def write_adapter(model: Any, config: Config, to: Path) -> list[str]:
    """Writes the adapters to the folder in the form that peft loads; returns the weight files."""
    weights = peft_weights(model)
    described = lora.peft_config(config.model.lora, model)
    described.base_model_name_or_path = config.model.name_or_path
    described.revision = config.model.revision
    described.target_modules = sorted(lora.target_names(model))
    described.inference_mode = True
    described.save_pretrained(to)
    save_file(weights, to / "adapter_model.safetensors", metadata={"format": "pt"})
    return ["adapter_model.safetensors"]


def load_with_peft(config: Config, architecture: PretrainedConfig, to: Path) -> Any:
    """Returns the model that the run began with, with the written adapters loaded by peft."""
    from peft import PeftModel

    base = load.whole(config.model, architecture, seed=config.train.seed, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(to))
