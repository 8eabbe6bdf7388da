"""Writing a token store: document by document, and its files get their names only when all of them are on the disk."""

import hashlib
import json
import os
from array import array
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from threefold.arrays import Array, Bool, Int32
from threefold.data.store.blocks import (
    LOSS_MASK,
    SUFFIX,
    BlockHasher,
    Blocks,
    FileBlocks,
    IdRange,
    hashed,
    with_suffix,
)
from threefold.data.store.index import write_index
from threefold.data.store.store import INFO_FORMAT, StoreInfo, fingerprint_of_content
from threefold.data.text.source import LossMask
from threefold.data.tokens import Tokenizer

_WRITTEN = (".bin", LOSS_MASK, ".idx", SUFFIX, ".json")


class StoreWriter:
    """Writes a store document by document; its files get their names only in `finish`.

    Use as a context manager: leaving it without `finish` removes the temporary files. `prefix` is without a suffix.
    """

    def __init__(self, prefix: str | Path, *, dtype: np.dtype[Any]) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self.num_tokens = 0
        self._lengths = array("i")
        self._digest = hashlib.blake2b(digest_size=16)
        self._blocks, self._ids = BlockHasher(), IdRange()
        self._bits = bytearray()
        self._rest: Bool = np.empty(0, np.bool_)
        self.num_loss_tokens = 0
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin: BinaryIO = self._temporary(".bin").open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bin.close()
        for suffix in _WRITTEN:
            self._temporary(suffix).unlink(missing_ok=True)

    def add_block(self, tokens: Array, lengths: Int32, loss_mask: Bool | None = None) -> None:
        """Appends documents of `lengths`, [documents] int32, whose tokens are concatenated in `tokens`.

        Args:
            loss_mask: [tokens], whether each is trained on; for all blocks of a store, or for none.
        """
        if loss_mask is not None:
            self.num_loss_tokens += int(np.count_nonzero(loss_mask))
            bits = np.concatenate([self._rest, loss_mask])
            whole = len(bits) // 8 * 8
            self._bits += np.packbits(bits[:whole], bitorder="little").tobytes()
            self._rest = bits[whole:].copy()
        data = np.ascontiguousarray(tokens, self.dtype).data.cast("B") if len(tokens) else b""
        self._bin.write(data)
        self._digest.update(data)
        self._blocks.update(data)
        self._ids.take(np.frombuffer(data, self.dtype))
        self.num_tokens += len(tokens)
        self._lengths.frombytes(lengths.tobytes())

    def content_hash(self) -> str:
        """Hash of all tokens and document lengths so far."""
        digest = self._digest.copy()
        digest.update(self._all_bits())
        digest.update(np.asarray(self._lengths, "<i4").tobytes())
        return digest.hexdigest()

    def info(
        self, tokenizer: Tokenizer, loss_mask: LossMask | None, **origin: Any
    ) -> StoreInfo:
        """The record of what was written; `origin` has its fields about the source."""
        return StoreInfo(
            fingerprint=fingerprint_of_content(self.content_hash(), tokenizer.fingerprint),
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            tokenizer=tokenizer.name,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            loss_mask=loss_mask,
            num_loss_tokens=self.num_loss_tokens if loss_mask is not None else None,
            **origin,
        )

    def finish(self, info: "Callable[[StoreWriter], StoreInfo]") -> StoreInfo:
        """Puts .bin, .idx, .blocks and the .json from `info(self)` in place, in this order; returns the info.

        Each file is synced to the disk before it gets its name, so a power cut leaves no store that looks complete.
        """
        sync(self._bin)
        self._bin.close()
        lengths = np.frombuffer(self._lengths, np.int32)
        if bits := self._all_bits():
            with self._temporary(LOSS_MASK).open("wb") as file:
                file.write(bits)
                sync(file)
        with self._temporary(".idx").open("wb") as file:
            write_index(file, lengths, dtype=self.dtype)
            sync(file)
        made = info(self)
        with self._temporary(".json").open("wb") as file:
            values = {name: value for name, value in asdict(made).items() if value is not None}
            file.write(json.dumps({"format": INFO_FORMAT, **values}, indent=2).encode() + b"\n")
            sync(file)
        stat = self._temporary(".bin").stat()
        files = {".idx": hashed(self._temporary(".idx"))}
        files[".bin"] = FileBlocks(stat.st_size, stat.st_mtime_ns, self._blocks.finish())
        if bits:
            files[LOSS_MASK] = hashed(self._temporary(LOSS_MASK))
        files[".json"] = hashed(self._temporary(".json"))
        self._temporary(SUFFIX).write_bytes(
            Blocks(self._ids.low, self._ids.high, files).to_bytes()
        )
        for suffix in _WRITTEN:
            if suffix != LOSS_MASK or bits:
                os.replace(self._temporary(suffix), with_suffix(self.prefix, suffix))
        return made

    def _all_bits(self) -> bytes:
        return bytes(self._bits) + np.packbits(self._rest, bitorder="little").tobytes()

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    def _temporary(self, suffix: str) -> Path:
        return self.prefix.with_name(f".{self.prefix.name}{suffix}.{os.getpid()}.tmp")


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
