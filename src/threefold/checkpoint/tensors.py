"""Tensors in files: safetensors, written from start to end without a second copy and read box by box.

A rank's file of a checkpoint is a safetensors file that any tool for that format can open. Each entry is a box of a
tensor and has its name; the metadata have its place in the tensor, as in torch.distributed.checkpoint: its
`HuggingFaceStorageReader` reads the files as they are. No pickle is written or read.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.checkpoint.seal import Seal, SealedWriter
from threefold.checkpoint.tensor_index import ITEM_BYTES, Box, Chunk, Entry, Index
from threefold.errors import CheckpointError
from threefold.jsonl import from_json

# Types by safetensors' names.
_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
TYPE_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_ALIGNMENT = 64
_METADATA = "__metadata__"
# The place of an entry in its tensor, in the form of torch.distributed.checkpoint.
_PLACES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True)
class TensorPart:
    """The part of one tensor that one rank writes: its box in a tensor of `shape`, and its values."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def in_file_order(parts: Iterable[TensorPart]) -> list[TensorPart]:
    """Sorts the widest types first, so that every entry is aligned without gaps, which the format forbids."""
    return sorted(parts, key=lambda part: -part.values.element_size())


def write_parts(folder: Path, stem: str, parts: Sequence[TensorPart]) -> dict[str, Seal]:
    """Writes a rank's files and flushes them to disk; returns their seals by name.

    Entries have the names of their tensors, so a second box of one tensor is in a second file. Parts on a device are
    copied to the host one at a time.
    """
    files: list[list[TensorPart]] = [[]]
    met: Counter[str] = Counter()
    for part in parts:
        if met[part.name] == len(files):
            files.append([])
        files[met[part.name]].append(part)
        met[part.name] += 1
    return {
        name: _write_boxes(folder / name, boxes)
        for name, boxes in zip(_names(stem), files, strict=False)
    }


def _names(stem: str) -> Iterator[str]:
    yield f"{stem}.safetensors"
    yield from (f"{stem}-{number}.safetensors" for number in itertools.count(1))


def _write_boxes(path: Path, parts: Sequence[TensorPart]) -> Seal:
    boxes = [(part.name, TYPE_NAMES[part.values.dtype], part.shape, part.box) for part in parts]
    return write_boxes(path, boxes, (part.values.cpu() for part in parts))


def write_boxes(
    path: Path, boxes: Sequence[tuple[str, str, tuple[int, ...], Box]], values: Iterable[Tensor]
) -> Seal:
    """Writes one file of a checkpoint; requests each tensor only when it is its turn, and does not keep it.

    Args:
        boxes: name, type and shape of each tensor, and its box in the file; the widest types first.
        values: of the boxes in the same order, on the CPU.
    """
    metadata = {
        "format": "pt",
        "DCP_VERSION": "1.0",
        _PLACES: json.dumps({name: {_OFFSETS: box.offsets} for name, _, _, box in boxes}),
        # Boxes alone do not say where a tensor ends, if the last one is missing.
        "shapes": json.dumps({name: shape for name, _, shape, _ in boxes}),
    }
    return write_tensors(
        path, [(name, dtype, box.sizes) for name, dtype, _, box in boxes], values, metadata
    )


def write_tensors(
    path: Path,
    described: Sequence[tuple[str, str, tuple[int, ...]]],
    values: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> Seal:
    """Writes a safetensors file; requests each tensor only when it is its turn, and does not keep it.

    Args:
        described: name, type and shape of each tensor, the widest types first.
        values: the tensors in the same order, on the CPU.
    """
    with SealedWriter(path) as writer:
        writer.write(_header(described, metadata))
        for tensor in values:
            writer.write(bytes_of(tensor))
        return writer.close()


def _header(
    described: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, dtype, shape in described:
        start, end = end, end + Box((0,) * len(shape), shape).numel * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-(8 + len(content)) % _ALIGNMENT)
    return len(content).to_bytes(8, "little") + content


def entries_of(path: Path) -> Iterable[tuple[str, str, tuple[int, ...], Chunk]]:
    """Yields (tensor, type, complete shape, chunk) of each box in a file that `write_parts` wrote."""
    metadata, chunks = _contents(path)
    places, shapes = from_json(metadata[_PLACES]), from_json(metadata["shapes"])
    for name, dtype, start, sizes in chunks:
        yield (
            name,
            dtype,
            tuple(shapes[name]),
            Chunk(path.name, start, Box(tuple(places[name][_OFFSETS]), sizes)),
        )


def index_of_dcp(folder: Path) -> Index:
    """Returns the index of safetensors files that torch.distributed.checkpoint wrote, which have no checksums.

    Their headers have the place of each box (DCP_SHARDING_INFO); a tensor is as large as its boxes reach.

    Raises:
        CheckpointError: a file is damaged or missing, as far as can be seen without checksums.
    """
    entries: dict[str, Entry] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            metadata, chunks = _contents(path)
            # Files without are consolidated ones: each tensor is whole in one of them.
            boxes = from_json(metadata[_PLACES]) if _PLACES in metadata else None
            for name, dtype, start, sizes in chunks:
                box = Box(
                    tuple(boxes[name][_OFFSETS]) if boxes is not None else (0,) * len(sizes),
                    sizes,
                )
                reach = tuple(
                    offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)
                )
                entry = entries.setdefault(name, Entry(dtype, reach))
                entry.shape = tuple(map(max, entry.shape, reach))
                entry.chunks += [Chunk(path.name, start, box)] if box.numel else []
        if wrong := [
            f"{name}: {problem}"
            for name, entry in entries.items()
            if (problem := entry.problem())
        ]:
            raise ValueError(wrong[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} cannot be read: {error}",
            expected="the shards as torch.distributed.checkpoint wrote them",
            fix=f"use another checkpoint than {folder.parent}",
        ) from error
    return Index(entries)


def _contents(path: Path) -> tuple[dict[str, str], list[tuple[str, str, int, tuple[int, ...]]]]:
    """Returns a safetensors file's metadata, and (name, type, first byte in the file, shape) of each entry."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = from_json(file.read(length))
    metadata = header.pop(_METADATA, {})
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if (size := path.stat().st_size) != end:
        raise ValueError(f"{path.name} has {size:,} bytes, not {end:,}")
    return metadata, [
        (name, entry["dtype"], 8 + length + entry["data_offsets"][0], tuple(entry["shape"]))
        for name, entry in header.items()
    ]


def read_box(state: Path, entry: Entry, wanted: Box, target: Tensor) -> None:
    """Fills `target`, which has the size of `wanted`, from the files in the folder `state`.

    Raises:
        CheckpointError: a file cannot be read, or ends too early.
    """
    dtype = _TYPES[entry.dtype]
    for chunk, part in entry.reads(wanted):
        into = target[part.within(wanted)]
        # Whole rows of a chunk lie one after the other: only the needed ones are read.
        inside = part.within(chunk.box) or (slice(0, 1),)
        rows, row_shape = inside[0].stop - inside[0].start, chunk.box.sizes[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        start = chunk.start + inside[0].start * row_bytes
        if part.sizes[1:] == row_shape and into.is_contiguous() and into.device.type == "cpu":
            _read(state / chunk.file, start, bytes_of(into))
        else:
            content = torch.empty(rows * row_bytes, dtype=torch.uint8)
            _read(state / chunk.file, start, bytes_of(content))
            read = content.view(dtype).view(rows, *row_shape)[slice(None), *inside[1:]]
            into.copy_(read.reshape(part.sizes))


def read_whole(state: Path, entry: Entry) -> Tensor:
    """Reads a complete tensor to the CPU."""
    tensor = torch.empty(entry.shape, dtype=_TYPES[entry.dtype])
    read_box(state, entry, Box((0,) * len(entry.shape), entry.shape), tensor)
    return tensor


def _read(path: Path, start: int, into: memoryview) -> None:
    done, reason = 0, None
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while done < len(into) and (count := file.readinto(into[done:])):
                done += count
        if done < len(into):
            reason = "it is truncated"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise CheckpointError(
            f"{path} cannot be read: {reason}",
            expected="the file as it was when its checksum was compared",
            fix="check whether another program changes the folder, and resume again",
        )


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the values of a CPU tensor as bytes, without a copy if they are contiguous."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
