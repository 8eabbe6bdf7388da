"""Rows and the known bytes they are read from: which rows read a changed block, and whether rows' blocks are unchanged.

In: rows whose stores know their bytes (`store.remembered`), one store or several (`MixedRows`). Out: the digests of their
bytes, for a run's record; problems that name the file, the block and the rows; and for the audit, a check of the blocks
of rows that were just read, which reads them once more from the disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np

from threefold.data.rows.concat import Int64, Rows
from threefold.data.store.blocks import Blocks, Change, with_suffix
from threefold.data.store.store import TokenStore
from threefold.errors import Problem, rows_text


class PackedRows(Rows, Protocol):
    """Rows of one store."""

    store: TokenStore

    def stretches(self, row: int) -> Iterator[tuple[int, int]]:
        """Where a row's tokens and labels lie in the stream, as [start, stop)."""

    def readers(self, start: int, stop: int) -> Int64:
        """The rows that read a token of [start, stop) of the stream, ascending."""


class Changed(NamedTuple):
    """A block of one of the stores that has changed."""

    part: int
    change: Change


def parts_of(rows: Rows) -> dict[str, PackedRows]:
    """The rows of each source, by the name it has in a mixture; a single one is called `source`."""
    return cast("dict[str, PackedRows]", getattr(rows, "parts", {"source": rows}))


def digests_of(rows: Rows) -> dict[str, str]:
    """The digest of each source's bytes; without those that do not know theirs."""
    stores = {name: part.store for name, part in parts_of(rows).items()}
    return {name: store.blocks.digest for name, store in stores.items() if store.blocks is not None}


def changed(blocks: Blocks, change: Change, prefix: Path, rows: PackedRows | None, *, first_row: int = 0) -> str:
    """What has changed: file, block, and the rows that read it, whose numbers begin with `first_row`."""
    kept, path = blocks.files[change.suffix], with_suffix(prefix, change.suffix)
    start = change.block * blocks.block_bytes
    stop = min(start + blocks.block_bytes, kept.size_bytes)
    if change.size_bytes < 0:
        what = f"{path} is gone"
    elif change.size_bytes != kept.size_bytes:
        stop = kept.size_bytes
        how = "was cut" if change.size_bytes < kept.size_bytes else "is longer than it was"
        what = f"{path} {how}, from block {change.block:,} on: {change.size_bytes:,} bytes instead of {stop:,}"
    else:
        which = f"block {change.block:,} of {kept.num_blocks:,}, bytes {start:,} to {stop - 1:,}"
        what = f"{path} has changed: {which}, is not what was hashed"
    if rows is None or change.suffix != ".bin":
        return what
    size = rows.store.dtype.itemsize
    return f"{what}; {rows_text(first_row + rows.readers(start // size, -(-stop // size)))} read it"


class KnownRows:
    """Checks blocks of rows that were read; `seed` chooses which, where there is no time for all."""

    def __init__(self, rows: Rows, *, seed: int = 0) -> None:
        self._parts = list(parts_of(rows).values())
        self._ends = np.cumsum([part.num_rows for part in self._parts])
        self._random = np.random.default_rng(seed)

    def check(self, indices: Int64, *, within_s: float) -> tuple[int, Changed | None]:
        """(rows checked, the first change): at least one of the rows, then others until the time is over."""
        until = time.perf_counter() + within_s
        seen: set[tuple[int, int]] = set()
        checked = 0
        for row in self._random.permutation(np.unique(indices)).tolist():
            number = int(np.searchsorted(self._ends, row, side="right"))
            part = self._parts[number]
            blocks, size = part.store.blocks, part.store.dtype.itemsize
            assert blocks is not None
            numbers = {
                block
                for start, stop in part.stretches(row - (int(self._ends[number]) - part.num_rows))
                for block in range(start * size // blocks.block_bytes, -(-stop * size // blocks.block_bytes))
            }
            new = sorted(block for block in numbers if (number, block) not in seen)
            seen |= {(number, block) for block in new}
            if (change := blocks.change(part.store.prefix, ".bin", new)) is not None:
                return checked, Changed(number, change)
            checked += 1
            if time.perf_counter() > until:
                break
        return checked, None

    def describe(self, found: Changed) -> str:
        """`changed` of one of the stores."""
        part = self._parts[found.part]
        assert part.store.blocks is not None
        first_row = int(self._ends[found.part]) - part.num_rows
        return changed(part.store.blocks, found.change, part.store.prefix, part, first_row=first_row)


def problem_of(store: TokenStore, change: Change, rows: PackedRows | None, *, cache: Path) -> Problem:
    """The problem of an opened store that is not what was hashed."""
    assert store.blocks is not None and store.blocks_at is not None
    folder = store.prefix.parent
    fix = "copy all files of the store again from their origin, or prepare the text again in another folder"
    if cache in folder.parents:
        fix = f"rm -r {folder}   (it is made again from the text)"
    elif store.info is None:
        fix = f"copy its files again from their origin; if they were changed on purpose: rm {store.blocks_at}"
    expected = f"the bytes as they were hashed: {store.blocks_at.name} has a hash of each block"
    return Problem(changed(store.blocks, change, store.prefix, rows), expected, fix)
