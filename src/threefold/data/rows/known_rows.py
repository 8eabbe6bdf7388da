"""Rows and the hashed bytes that they are read from: which rows read a changed block, whether a row is unchanged.

In: rows whose stores know their bytes (`store.hash_cache`), one store or several (`MixedRows`). Out: the digests of
their bytes, for a run's record; texts that name the file, the block and the rows; and for the audit, a check of the
blocks of rows that were just read, which reads them once more from the disk.
"""

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import numpy as np

from threefold.arrays import Int64
from threefold.data.rows.concat import Rows
from threefold.data.store.blocks import LOSS_MASK, OF_TOKENS, Blocks, Change
from threefold.data.store.store import TokenStore, starts_of
from threefold.errors import Problem, rows_text, shell_word


class PackedRows(Rows, Protocol):
    """Rows of one store."""

    store: TokenStore

    @property
    def num_targets(self) -> Int64:
        """How many labels of each row are trained on, [rows], of a store with a loss mask."""

    def stretches(self, row: int) -> Iterator[tuple[int, int]]:
        """Where a row's tokens and labels are in the stream, as [start, stop)."""

    def targets_of_documents(self) -> Int64:
        """How many tokens of each document are labels that are trained on, [documents], of a store with a loss mask."""

    def spans_of_documents(self) -> tuple[Int64, Int64]:
        """In how many rows each document is, and where in the stream what they have of it ends; both [documents]."""

    @property
    def cut_by(self) -> str:
        """Why the end of a document is in no row."""

    def readers(self, start: int, stop: int) -> Int64:
        """The rows that read a token of [start, stop) of the stream, ascending."""


class Changed(NamedTuple):
    """A block of one of the stores that has changed."""

    part: int
    change: Change


class SourceRows(NamedTuple):
    """The rows of one source; `name` as in a mixture, `first_row`: the number of its first row among those of all."""

    name: str
    rows: PackedRows
    first_row: int

    @property
    def blocks(self) -> Blocks:
        """The hashes of its store, which knows them."""
        assert self.rows.store.blocks is not None
        return self.rows.store.blocks


def why_cut(rows: PackedRows) -> dict[str, Int64]:
    """Why tokens that are trained on are labels of no row, of a store with a loss mask: how many, [documents] each."""
    ends = rows.store.document_ends
    starts = starts_of(ends)
    in_how_many, stops = rows.spans_of_documents()
    lost = rows.store.count_trained_on(stops, ends)
    dropped = (
        np.where(in_how_many == 0, lost, 0) if rows.store.has_pairs else np.zeros_like(lost)
    )
    first = rows.store.count_trained_on(starts, ends) - rows.targets_of_documents() - lost
    return {rows.cut_by: lost - dropped, "pair dropped": dropped, "first token": first}


def reasons_text(why: Mapping[str, int]) -> str:
    """`truncation 12, pair dropped 3`."""
    return ", ".join(f"{reason} {count:,}" for reason, count in why.items() if count)


def parts_of(rows: Rows) -> list[SourceRows]:
    """The rows of each source; a single one is called `source`."""
    parts, first_row = [], 0
    for name, part in cast(
        "dict[str, PackedRows]", getattr(rows, "parts", {"source": rows})
    ).items():
        parts.append(SourceRows(name, part, first_row))
        first_row += part.num_rows
    return parts


def changed(
    blocks: Blocks,
    change: Change,
    prefix: str | Path,
    rows: PackedRows | None,
    *,
    first_row: int = 0,
) -> str:
    """Text about a change: file, block, and the rows that read it, numbered from `first_row`."""
    kept, path = blocks.files[change.suffix], f"{prefix}{change.suffix}"
    where = block_text(blocks, change, rows, first_row=first_row)
    if change.size_bytes < 0:
        return f"{path} is gone"
    if change.size_bytes != kept.size_bytes:
        how = "was cut" if change.size_bytes < kept.size_bytes else "is longer than it was"
        return f"{path} {how}, to {change.size_bytes:,} bytes instead of {kept.size_bytes:,}: {where}"
    return f"{path} has changed since it was hashed: {where}"


def block_text(
    blocks: Blocks, change: Change, rows: PackedRows | None, *, first_row: int = 0
) -> str:
    """The block of a change, its bytes, and the rows that read it; of a file of another size, all from there on."""
    kept = blocks.files[change.suffix]
    start, last = change.block * blocks.block_bytes, kept.size_bytes
    which = f"block {change.block:,} of {kept.num_blocks:,}"
    if change.size_bytes == kept.size_bytes:
        last = min(start + blocks.block_bytes, last)
        which += f" (bytes {start:,} to {last - 1:,})"
    else:
        which += " and all after it"
    if rows is None or change.suffix not in OF_TOKENS:
        return which
    size = rows.store.dtype.itemsize
    # A bit of .loss_mask is whether a token is trained on, in each row that reads it.
    first, stop = (
        (8 * start, 8 * last)
        if change.suffix == LOSS_MASK
        else (start // size, -(-last // size))
    )
    first, stop = rows.store.inside(first, stop)
    return f"{which}, read by {rows_text(first_row + rows.readers(first, stop)) if stop > first else 'no row'}"


def digests_of(rows: Rows) -> dict[str, str]:
    """The digest of each source's bytes, which are known."""
    return {part.name: part.blocks.digest for part in parts_of(rows)}


def blocks_of(parts: Sequence[SourceRows], row: int) -> tuple[int, set[int]]:
    """The number of a row's source, and the blocks of its .bin that the row is read from."""
    number = bisect_right(parts, row, key=lambda part: part.first_row) - 1
    part = parts[number]
    size, block_bytes = part.rows.store.dtype.itemsize, part.blocks.block_bytes
    return number, {
        block
        for stretch in part.rows.stretches(row - part.first_row)
        for start, stop in part.rows.store.places(*stretch)
        for block in range(start * size // block_bytes, -(-stop * size // block_bytes))
    }


class KnownRows:
    """Checks blocks of rows that were read; `seed` chooses which, where there is no time for all."""

    def __init__(self, rows: Rows, *, seed: int = 0) -> None:
        self._parts = parts_of(rows)
        self._random = np.random.default_rng(seed)

    def check(self, indices: Int64, *, within_s: float) -> tuple[int, Changed | None]:
        """(rows checked, the first change): at least one of the rows, then others until the time is over."""
        until = time.perf_counter() + within_s
        seen: set[tuple[int, int]] = set()
        checked = 0
        for row in self._random.permutation(np.unique(indices)).tolist():
            number, read = blocks_of(self._parts, row)
            part, store = self._parts[number], self._parts[number].rows.store
            new = {(number, block) for block in read} - seen
            seen |= new
            blocks = sorted(block for _, block in new)
            per_bit = 8 * store.dtype.itemsize
            bits = (
                {LOSS_MASK: sorted({block // per_bit for block in blocks})}
                if store.has_loss_mask
                else {}
            )
            # Those at an address were compared before they were used.
            tokens = {".bin": blocks} if store.stored is None else {}
            for suffix, numbers in {**tokens, **bits}.items():
                if (change := part.blocks.change(store.prefix, suffix, numbers)) is not None:
                    return checked, Changed(number, change)
            checked += 1
            if time.perf_counter() > until:
                break
        return checked, None

    def describe(self, found: Changed) -> str:
        """`changed` of one of the stores."""
        part = self._parts[found.part]
        return changed(
            part.blocks,
            found.change,
            part.rows.store.named,
            part.rows,
            first_row=part.first_row,
        )


def problem_of(
    store: TokenStore, change: Change, rows: PackedRows | None, *, cache: Path
) -> Problem:
    """The problem of an opened store that is not what was hashed."""
    assert store.blocks is not None and store.blocks_at is not None
    folder = store.prefix.parent
    fix = "copy all files of the store again from their origin, or prepare the text again in another folder"
    if cache in folder.parents:
        fix = f"rm -r {shell_word(folder)}   (it is made again from the text)"
    elif store.info is None:
        fix = f"copy its files again from their origin; if they were changed on purpose: rm {store.blocks_at}"
    return Problem(
        changed(store.blocks, change, store.named, rows),
        f"the bytes as they were hashed: {store.blocks_at.name} has a hash of each block",
        fix,
    )
