"""An index of which bytes of which file hold which part of a tensor; any mesh reads its own parts by it. No torch.

A box is a rectangle of a tensor: its offset and size along each dim. A checkpoint's files hold boxes, and a rank holds
boxes of its own mesh; the rank reads where they overlap. The index is JSON: opening it runs no code, and all its values
are checked before a byte is read.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.errors import CheckpointError
from threefold.jsonl import from_json

FILE = "index.json"
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: `offsets` and `sizes`, one of each per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """Returns the box that two boxes of one tensor share, or None."""
        offsets = tuple(max(pair) for pair in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )
        sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Returns where this box is in a tensor that holds `outer`."""
        starts = tuple(
            own - begin for own, begin in zip(self.offsets, outer.offsets, strict=True)
        )
        return Box(starts, self.sizes).slices

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.offsets, self.sizes, strict=True)
        )


def boxes_of(indices: Sequence[Sequence[int]]) -> Iterator[tuple[Box, Box]]:
    """Splits a rank's part of a tensor into boxes: (box in the complete tensor, box in the part).

    Args:
        indices: for each dim, the complete tensor's indices that the rank holds, ascending.
    """
    for combination in itertools.product(*map(_runs, indices)):
        begins, places, sizes = zip(*combination, strict=True) if combination else ((), (), ())
        yield Box(begins, sizes), Box(places, sizes)


def _runs(indices: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns (first index, its position, length) of each contiguous range."""
    if len(indices) and indices[-1] - indices[0] + 1 == len(indices):
        return [(indices[0], 0, len(indices))]
    starts = [
        place
        for place in range(len(indices))
        if not place or indices[place] != indices[place - 1] + 1
    ]
    return [(indices[a], a, b - a) for a, b in itertools.pairwise([*starts, len(indices)])]


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two boxes of one tensor share a value; by a sweep along the dim in which they differ most."""
    boxes = [box for box in boxes if box.numel]
    if len(boxes) < 2 or not boxes[0].offsets:
        return len(boxes) > 1
    dim = max(
        range(len(boxes[0].offsets)), key=lambda dim: len({box.offsets[dim] for box in boxes})
    )
    current: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        current = [
            other
            for other in current
            if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]
        ]
        if any(box.overlap(other) is not None for other in current):
            return True
        current.append(box)
    return False


@dataclass(frozen=True)
class Chunk:
    """A box in a file: contiguous, starting at byte `start`."""

    file: str
    start: int
    box: Box


@dataclass
class Entry:
    """A complete tensor: its type by safetensors' name, its shape, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def reads(self, wanted: Box) -> Iterator[tuple[Chunk, Box]]:
        """Yields the chunks that hold parts of `wanted`, each with the part it holds."""
        for chunk in self.chunks:
            if (part := chunk.box.overlap(wanted)) is not None:
                yield chunk, part

    def problem(self) -> str | None:
        """Returns why these chunks cannot make up the tensor, or None."""
        whole = Box((0,) * len(self.shape), self.shape)
        if self.dtype not in ITEM_BYTES or any(size < 0 for size in self.shape):
            return f"{self.dtype} {list(self.shape)} is not a tensor"
        for chunk in self.chunks:
            if len(chunk.box.offsets) != len(self.shape) or len(chunk.box.sizes) != len(
                self.shape
            ):
                return "a chunk has a different number of dims"
            if chunk.start < 0 or chunk.box.overlap(whole) != chunk.box:
                return "a chunk lies outside the tensor"
        if sum(chunk.box.numel for chunk in self.chunks) != whole.numel:
            return "the chunks do not add up to the tensor"
        return (
            "chunks overlap, and leave a hole"
            if _overlap([chunk.box for chunk in self.chunks])
            else None
        )


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint, by name."""

    entries: Mapping[str, Entry]

    def to_json(self) -> str:
        files = sorted(
            {chunk.file for entry in self.entries.values() for chunk in entry.chunks}
        )
        number = {name: place for place, name in enumerate(files)}
        tensors = {
            name: [
                e.dtype,
                e.shape,
                [[number[c.file], c.start, c.box.offsets, c.box.sizes] for c in e.chunks],
            ]
            for name, e in self.entries.items()
        }
        return json.dumps({"files": files, "tensors": tensors})

    @classmethod
    def read(cls, state: Path) -> Index:
        """Returns the index in the folder `state`; every chunk is inside its file.

        Raises:
            CheckpointError: the file is missing, or is not an index of the files next to it.
        """
        path = state / FILE
        try:
            index = from_json(path.read_text())
            files = [str(name) for name in index["files"]]
            if strange := [
                name for name in files if Path(name).name != name or name in (".", "..")
            ]:
                raise ValueError(f"{strange[0]!r} is not a file of this folder")
            ends = [(state / name).stat().st_size for name in files]
            entries = {
                name: _entry(values, files, ends) for name, values in index["tensors"].items()
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is not an index of a checkpoint: {error}",
                expected="the index that was written with the checkpoint",
                fix=f"use another checkpoint than {state.parent}",
            ) from error
        return cls(entries)


def _entry(values: Any, files: Sequence[str], ends: Sequence[int]) -> Entry:
    dtype, shape, chunks = values
    entry = Entry(str(dtype), _ints(shape))
    for number, start, offsets, sizes in chunks:
        _ints([number, start])
        chunk = Chunk(files[number], start, Box(_ints(offsets), _ints(sizes)))
        if (
            entry.dtype in ITEM_BYTES
            and start + chunk.box.numel * ITEM_BYTES[entry.dtype] > ends[number]
        ):
            raise ValueError(f"a chunk reaches beyond the end of {files[number]}")
        entry.chunks.append(chunk)
    if (problem := entry.problem()) is not None:
        raise ValueError(problem)
    return entry


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(
        type(value) is not int or value < 0 for value in values
    ):
        raise ValueError(f"{values!r} are not sizes")
    return tuple(values)
