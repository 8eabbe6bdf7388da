"""Exports a checkpoint's weights as sharded safetensors with an index, in the Hugging Face Hub's form: one process.

Tensors are read layer by layer, converted to the Hub's names and layouts for the architecture, and written as soon as a
file is full. So memory holds one file and one layer, whatever the model's size and the mesh it was trained on.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from threefold.checkpoint.boxes import Index
from threefold.checkpoint.seal import sync_folder
from threefold.checkpoint.tensors import dtype_name, read_whole, write_tensors

_LAYER = re.compile(r"(.*?\.\d+)\.")
_WEIGHTS = "model.safetensors"

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def write_weights(
    state: Path, index: Index, names: list[str], to: Path, *, max_shard_bytes: int, convert: Convert
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
            _write(to / _part(len(shards)), pending)
            shards.append({name: tensor.nbytes for name, tensor in pending.items()})
            pending.clear()

    for name, tensor in _tensors(state, index, names, convert):
        if pending and sum(held.nbytes for held in pending.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        pending[name] = tensor
    flush()
    return _name_files(to, shards)


def _tensors(state: Path, index: Index, names: list[str], convert: Convert) -> Iterator[tuple[str, Tensor]]:
    def layer(name: str) -> str:
        found = _LAYER.match(name)
        return found[1] if found else name

    for _, group in itertools.groupby(sorted(names, key=lambda name: (layer(name), name)), key=layer):
        yield from convert({name: read_whole(state, index.entries[f"model.{name}"]) for name in group}).items()


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    described = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in ordered]
    write_tensors(path, described, (tensor for _, tensor in ordered), {"format": "pt"})


def _part(number: int) -> str:
    return f".part-{number:05d}"


def _name_files(to: Path, shards: list[dict[str, int]]) -> list[str]:
    """Gives the files their final names, which contain their number, and writes the index if there are several."""
    if len(shards) == 1:
        files = [_WEIGHTS]
    else:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for number, file in enumerate(files):
        (to / _part(number)).rename(to / file)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(size for shard in shards for size in shard.values())
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (to / f"{_WEIGHTS}.index.json").write_text(json.dumps(content, indent=2) + "\n")
    sync_folder(to)
    return files
