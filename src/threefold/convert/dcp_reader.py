"""Checkpoints that other programs wrote with torch.distributed.checkpoint (DCP): their contents, read tensor by tensor.

Both of its formats: `.metadata` with .distcp files, and safetensors files whose headers locate each box. The
`.metadata` is a pickle and may come from anywhere, so nothing that it names is imported or called: the names that DCP
uses become inert records, and any other is refused. A .distcp file holds tensors as torch.save writes them, to be
read with `weights_only`.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from threefold.checkpoint.tensor_index import Box, Chunk, Entry
from threefold.checkpoint.tensors import TYPE_NAMES, index_of_dcp, read_whole
from threefold.errors import CheckpointError, first_line

METADATA = ".metadata"
_EXPECTED = "a folder as torch.distributed.checkpoint writes it: .metadata and .distcp files, or safetensors files"


class TensorFormat(NamedTuple):
    """A tensor's type, by safetensors' name, and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Foreign(Protocol):
    """A checkpoint of another program."""

    @property
    def tensors(self) -> Mapping[str, TensorFormat]:
        """Every tensor, by that program's name."""

    @property
    def others(self) -> tuple[str, ...]:
        """Names of the entries that are no tensors; they are not read."""

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU; a CheckpointError if it cannot be read."""


def open_dcp(folder: Path) -> Foreign:
    """The checkpoint in a folder, or in its folders: accelerate has one for the model and one for the optimizer.

    Raises:
        CheckpointError: there is none, it cannot be read, or its `.metadata` names something that DCP does not.
    """
    places = [folder] if _is_dcp(folder) else sorted(filter(_is_dcp, folder.glob("*/")))
    if not places:
        raise CheckpointError(
            f"{folder} has no checkpoint of torch.distributed.checkpoint",
            expected=_EXPECTED,
            fix="check the path",
        )
    opened: list[Foreign] = [
        _Native.open(place) if (place / METADATA).exists() else _Safetensors.open(place)
        for place in places
    ]
    return opened[0] if len(opened) == 1 else _Several.of(opened, folder)


def _is_dcp(folder: Path) -> bool:
    return (folder / METADATA).exists() or any(folder.glob("*.safetensors"))


@dataclass(frozen=True)
class _Indexed:
    folder: Path
    entries: Mapping[str, Entry]
    others: tuple[str, ...]

    @property
    def tensors(self) -> Mapping[str, TensorFormat]:
        return {
            name: TensorFormat(entry.dtype, entry.shape) for name, entry in self.entries.items()
        }


class _Safetensors(_Indexed):
    @classmethod
    def open(cls, folder: Path) -> "_Safetensors":
        return cls(folder, index_of_dcp(folder).entries, ())

    def read(self, name: str) -> Tensor:
        return read_whole(self.folder, self.entries[name])


@dataclass(frozen=True)
class _Native(_Indexed):
    """`lengths`: bytes of each chunk's file that hold it, by (file, first byte)."""

    lengths: Mapping[tuple[str, int], int]

    @classmethod
    def open(cls, folder: Path) -> "_Native":
        try:
            content = io.BytesIO((folder / METADATA).read_bytes())
            return _described(folder, _Inert(content).load())
        except CheckpointError:
            raise
        except Exception as error:  # a pickle can fail in any way
            raise _unreadable(folder / METADATA, error) from error

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        whole = torch.empty(
            entry.shape,
            dtype=next(t for t, type_name in TYPE_NAMES.items() if type_name == entry.dtype),
        )
        for chunk in entry.chunks:
            path = self.folder / chunk.file
            try:
                with path.open("rb") as file:
                    file.seek(chunk.start)
                    content = file.read(self.lengths[chunk.file, chunk.start])
                part = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            except Exception as error:  # torch.load has no specific error class
                raise _unreadable(path, error, name) from error
            if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != (
                chunk.box.sizes,
                whole.dtype,
            ):
                raise _unreadable(
                    path, ValueError("it does not hold what .metadata says"), name
                )
            whole[chunk.box.slices] = part
        return whole


@dataclass(frozen=True)
class _Several:
    tensors: Mapping[str, TensorFormat]
    others: tuple[str, ...]
    owner: Mapping[str, Foreign]

    @classmethod
    def of(cls, parts: Sequence[Foreign], folder: Path) -> "_Several":
        owner: dict[str, Foreign] = {}
        for part in parts:
            if twice := sorted(owner.keys() & part.tensors.keys()):
                raise CheckpointError(
                    f"{folder} has folders with several checkpoints: {twice[0]} is in two of them",
                    expected="one checkpoint",
                    fix="name the folder of one of them",
                )
            owner |= dict.fromkeys(part.tensors, part)
        tensors = {name: part.tensors[name] for name, part in owner.items()}
        return cls(tensors, tuple(name for part in parts for name in part.others), owner)

    def read(self, name: str) -> Tensor:
        return self.owner[name].read(name)


class _PickledObject:
    """Placeholder for an object that the pickle names: its arguments, and its attributes. Runs nothing."""

    values: Any = MappingProxyType({})

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, values: Any) -> None:
        self.values = values

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


_RECORDS = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
_PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath")
}
_DTYPES = {
    ("torch", str(dtype).removeprefix("torch.")): name for dtype, name in TYPE_NAMES.items()
}


def _member(kind: Any, name: Any) -> Any:
    """A member of an enumeration, as a record: Python before 3.11.4 writes it as getattr(kind, name)."""
    if isinstance(kind, type) and issubclass(kind, _PickledObject):
        return kind()
    raise _refused_name("builtins.getattr")


def _refused_name(name: str) -> CheckpointError:
    return CheckpointError(
        f"the .metadata names {name}",
        expected="the names that torch.distributed.checkpoint uses; a pickle that names others may run anything",
        fix="do not open it; save the checkpoint again with torch.distributed.checkpoint",
    )


class _Inert(pickle._Unpickler):
    """Reads the structure of a `.metadata`, and nothing else: no class or function of the pickle's choice is found.

    In Python, as a spoilt byte makes the one in C take up to 64 GB for its memo.
    """

    def find_class(self, module: str, name: str) -> Any:
        place = (module, name)
        if place in _RECORDS:
            # A separate class: attributes set by a pickle reach no other.
            return type(name, (_PickledObject,), {})
        if place in _PATHS:
            return PurePosixPath
        if place in _DTYPES:
            return _DTYPES[place]
        if place == ("torch", "Size"):
            return tuple
        if place == ("builtins", "getattr"):
            return _member
        if place == ("collections", "OrderedDict"):
            return OrderedDict
        raise _refused_name(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a reference to something outside")


def _described(folder: Path, metadata: Any) -> _Native:
    """The entries of a `.metadata`, each checked: types, boxes inside the tensor, no holes, files of this folder."""
    chunks: dict[str, list[Chunk]] = {}
    lengths: dict[tuple[str, int], int] = {}
    for key, info in metadata["storage_data"].items():
        if key.values.get("offset") is None:  # no tensor
            continue
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if info.values.get("transform_descriptors"):
            raise ValueError(
                f"{key['fqn']} is compressed or otherwise transformed: {info['transform_descriptors']}"
            )
        if (
            type(start) is not int
            or type(length) is not int
            or start < 0
            or Path(file).name != file
        ):
            raise ValueError(f"{key['fqn']} is not in a file of this folder")
        chunks.setdefault(key["fqn"], []).append(
            Chunk(file, start, Box(tuple(key["offset"]), ()))
        )
        lengths[file, start] = length
    entries, others = {}, []
    for name, record in metadata["state_dict_metadata"].items():
        if "size" not in record.values:
            others.append(name)
            continue
        dtype = record["properties"].values[0]
        sizes = {tuple(each["offsets"]): tuple(each["sizes"]) for each in record["chunks"]}
        own = [
            Chunk(each.file, each.start, Box(each.box.offsets, sizes[each.box.offsets]))
            for each in chunks[name]
        ]
        # A rank beyond the last shard has nothing.
        own = [each for each in own if each.box.numel]
        entries[name] = entry = Entry(str(dtype), tuple(record["size"]), own)
        if (problem := entry.problem()) is not None:
            raise ValueError(f"{name}: {problem}")
    return _Native(folder, entries, tuple(others), lengths)


def _unreadable(path: Path, error: Exception, name: str = "") -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read{f' for {name}' if name else ''}: {first_line(error)[:200]}",
        expected=_EXPECTED,
        fix="copy it again",
    )
