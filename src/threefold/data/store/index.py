"""The .idx file of a token store: Megatron-LM's index, written, read and checked.

    "MMIDIDX\\0\\0" | version 1 (u64) | dtype code (u8) | sequences n (u64) | document bounds d (u64)
    | n lengths in tokens (i32) | n offsets in bytes (i64) | d document bounds in sequences (i64)
    | a mode for each sequence (i8, multimodal stores only: ignored)

All little-endian. A sequence is a document in our stores; other programs may cut documents into several sequences. The
d bounds begin with 0 and end with n: document i is the sequences [bounds[i], bounds[i + 1]).
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from threefold.arrays import Array, Int32, Int64
from threefold.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_OF_CODE = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}

_CODE_OF_DTYPE = {np.dtype(name): code for code, name in DTYPE_OF_CODE.items()}
_HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 1 << 20
_REMAKE = "threefold data prepare --data.source TEXT --data.tokenizer TOKENIZER --to DIR   (makes a new store)"
_COPY_AGAIN = f"copy the .bin and .idx again from their origin, or\n       {_REMAKE}"


@dataclass(frozen=True)
class StoreIndex:
    """The header of an .idx file, checked against the sizes of both files."""

    path: Path
    dtype: np.dtype[Any]
    num_sequences: int
    num_bounds: int
    num_tokens: int

    def lengths(self) -> Int32:
        """Tokens of each sequence, [num_sequences], memory-mapped."""
        return self._mapped("<i4", _HEADER.size, self.num_sequences)

    def offsets(self) -> Int64:
        """Where each sequence begins in the .bin, in bytes, [num_sequences], memory-mapped."""
        return self._mapped("<i8", _HEADER.size + 4 * self.num_sequences, self.num_sequences)

    def bounds(self) -> Int64:
        """Documents' bounds, counted in sequences, [num_documents + 1], memory-mapped."""
        return self._mapped("<i8", _HEADER.size + 12 * self.num_sequences, self.num_bounds)

    def _mapped(self, dtype: str, offset: int, count: int) -> Array:
        return (
            np.memmap(self.path, dtype, mode="r", offset=offset, shape=(count,))
            if count
            else np.empty(0, dtype)
        )


def write_index(file: BinaryIO, lengths: Int32, *, dtype: np.dtype[Any]) -> None:
    """Writes the index of a store whose sequences are its documents, in order and without gaps."""
    n = len(lengths)
    file.write(_HEADER.pack(MAGIC, VERSION, _CODE_OF_DTYPE[np.dtype(dtype)], n, n + 1))
    file.write(np.ascontiguousarray(lengths, "<i4").data.cast("B") if n else b"")
    start = 0
    for i in range(0, n, _CHUNK):
        ends = start + np.cumsum(lengths[i : i + _CHUNK], dtype=np.int64)
        starts = np.concatenate(([start], ends[:-1])) * dtype.itemsize
        file.write(starts.astype("<i8").tobytes())
        start = int(ends[-1])
    for i in range(0, n + 1, _CHUNK):
        file.write(np.arange(i, min(i + _CHUNK, n + 1), dtype="<i8").tobytes())


def read_index(idx: Path, bin: Path, *, bin_bytes: int | None = None) -> StoreIndex:
    """The index at `idx`, whose tokens lie in `bin`; the header and both sizes are checked without reading the arrays.

    A DataError if a file is missing, truncated, or of another format.

    Args:
        bin_bytes: size of a `bin` that is not on this machine.
    """
    for path in (idx, bin) if bin_bytes is None else (idx,):
        if not path.is_file():
            raise DataError(
                f"{path} does not exist",
                expected="a token store: PREFIX.bin with the tokens and PREFIX.idx with the documents, side by side",
                fix=f"give the prefix of both files, or\n       {_REMAKE}",
            )
    dtype, num_sequences, num_bounds = _read_header(idx)
    arrays = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if idx.stat().st_size != arrays + num_sequences:  # the modes of a multimodal store
        header = f"for the {num_sequences:,} sequences and {num_bounds:,} bounds of its header"
        _check_size(idx, idx.stat().st_size, arrays, header)
    size = bin.stat().st_size if bin_bytes is None else bin_bytes
    index = StoreIndex(idx, dtype, num_sequences, num_bounds, size // dtype.itemsize)
    bounds, end = index.bounds(), 0
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != num_sequences:
        raise _bad_bounds(index)
    if num_sequences:
        end = int(index.offsets()[-1]) + int(index.lengths()[-1]) * dtype.itemsize
    _check_size(bin, size, end, f"according to {idx.name}: the two files belong together")
    return index


def check_arrays(index: StoreIndex) -> None:
    """Refuses an index whose sequences do not follow one another without gaps, or whose documents go backwards.

    Reads the arrays once, in chunks; for stores made by other programs.
    """
    lengths, offsets, bounds = index.lengths(), index.offsets(), index.bounds()
    expected = 0
    for i in range(0, index.num_sequences, _CHUNK):
        size = lengths[i : i + _CHUNK].astype(np.int64) * index.dtype.itemsize
        ends = expected + np.cumsum(size)
        if (size < 0).any() or not np.array_equal(offsets[i : i + _CHUNK], ends - size):
            raise DataError(
                f"{index.path} describes sequences that overlap or leave gaps in the .bin",
                expected="sequences that follow one another, so that the store is one stream of tokens",
                fix=_REMAKE,
            )
        expected = int(ends[-1])
    for i in range(0, index.num_bounds, _CHUNK):
        if (np.diff(bounds[i : i + _CHUNK + 1]) < 0).any():
            raise _bad_bounds(index)


def _read_header(idx: Path) -> tuple[np.dtype[Any], int, int]:
    with idx.open("rb") as file:
        raw = file.read(_HEADER.size)
    if raw[: len(MAGIC)] != MAGIC:
        begins = "is empty" if not raw else f"begins with {raw[: len(MAGIC)]!r}"
        raise DataError(
            f"{idx} is not the index of a token store: it {begins}",
            expected=f"a Megatron-LM .idx file, which begins with {MAGIC!r}",
            fix=_REMAKE,
        )
    if len(raw) < _HEADER.size:
        raise DataError(
            f"{idx} is truncated: {len(raw)} bytes",
            expected=f"at least the {_HEADER.size} bytes of the header",
            fix=_COPY_AGAIN,
        )
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(raw)
    if version != VERSION or code not in DTYPE_OF_CODE:
        raise DataError(
            f"{idx} has version {version} and dtype code {code}",
            expected=f"version {VERSION} and a dtype code from 1 to {max(DTYPE_OF_CODE)}",
            fix=_REMAKE,
        )
    return np.dtype(DTYPE_OF_CODE[code]), num_sequences, num_bounds


def _check_size(path: Path, size: int, expected: int, reason: str) -> None:
    if size != expected:
        raise DataError(
            f"{path} is {'truncated' if size < expected else 'too long'}: {size:,} bytes",
            expected=f"{expected:,} bytes {reason}",
            fix=_COPY_AGAIN,
        )


def _bad_bounds(index: StoreIndex) -> DataError:
    return DataError(
        f"{index.path} has document bounds that do not run from 0 to its {index.num_sequences:,} sequences",
        expected="bounds that begin with 0, never decrease and end with the number of sequences",
        fix=_REMAKE,
    )
