"""Whether the stores that a run has read still have, on this machine, the bytes that it read.

In: the run's record, which has the digest of each store's blocks and where the store was. Out: a line for each store,
or the first block that differs, with the rows that read it. A store that is not here, or was never recorded, is
reported as unknown: then only the samples are proved. No torch.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from threefold.audit.record import Segment, SegmentLine
from threefold.data.rows.known_rows import PackedRows, block_text, changed, parts_of
from threefold.data.rows.packing import MixedRows, Packing
from threefold.data.store.blocks import IDENTITY, OF_TOKENS, SUFFIX, Blocks, Change, with_suffix
from threefold.data.store.hash_cache import Known, known
from threefold.data.store.held_out import StoreSide
from threefold.data.store.open_source import store_prefix
from threefold.data.store.store import TokenStore
from threefold.errors import RunError, ThreefoldError, shell_word

# Blocks of each file that are read again: all of a file of up to 1 GiB; or all of any.
SAMPLED, ALL = 1024, 1 << 62
FOLDER = "blocks"


def list_at(run: Path, digest: str) -> Path:
    """Where a run keeps the list of hashes with a digest."""
    return run / FOLDER / f"{digest}{SUFFIX}"


def are_here(start: SegmentLine) -> bool:
    """Whether the stores of a start are where they were."""
    return all("://" in prefix or _is_here(prefix) for _, _, prefix in start.stores)


def _is_here(prefix: str) -> bool:
    return all(with_suffix(prefix, suffix).exists() for suffix in IDENTITY)


def store_named(name: str) -> TokenStore:
    """A store by what a run's record calls it: its prefix, or its address and its name there."""
    prefix = store_prefix(os.path.dirname(name)) if "://" in name else None
    return TokenStore(prefix or name)


def byte_lines(
    run: Path, segments: Sequence[Segment], packing: Packing, *, cache: Path, sampled: int
) -> Iterator[str]:
    """A line for each store whose bytes are those that the run has read.

    Args:
        segments: with stores, and one at least.
        packing: of the run's config.
        sampled: blocks of each file to read again.

    Raises:
        RunError: bytes that have changed, or are not on this machine.
    """
    start = segments[-1].start
    num_checked = sum(line.checked for segment in segments for line in segment.steps)
    for number, (name, digest, prefix) in enumerate(start.stores):
        if "://" not in prefix and not any(
            with_suffix(prefix, suffix).exists() for suffix in IDENTITY
        ):
            raise RunError(
                f"the samples are proved, but not their bytes: {prefix}.bin and .idx are not on this machine",
                expected="the stores that the run has read, to compare their blocks with its hashes",
                fix=f"run the command where they are, or: threefold data audit {shell_word(run)} --contents   "
                "(a store that was made from text is made again)",
            )
        try:
            store = store_named(prefix)
            hashes = known(store, cache=cache, sampled=sampled)
            first_row = sum(size for _, size, _ in (start.mixture or ())[:number])
            _compare(run, store, hashes, digest, packing, first_row=first_row)
        except ThreefoldError as error:
            raise RunError.of(error.problems) from error
        counts = [hashes.blocks.files[suffix].num_blocks for suffix in IDENTITY]
        read = f"{sum(min(count, sampled) for count in counts):,} of {sum(counts):,}"
        yield f"  {name}: {prefix}.bin and .idx are the bytes that the run has read: {read} blocks read again"
    if packing.eval_share:
        yield from _held_out_lines(start, packing)
    yield f"  rows whose blocks were compared while it ran: {num_checked:,}, over all ranks"


def _compare(
    run: Path,
    store: TokenStore,
    hashes: Known,
    digest: str,
    packing: Packing,
    *,
    first_row: int,
) -> None:
    """RunError names a block that is not what the run has read."""
    blocks, _, change = hashes
    what, began = "", Blocks.read(list_at(run, digest))
    if change is not None:
        what = changed(
            blocks, change, store.named, _rows(packing, store, change), first_row=first_row
        )
    elif blocks.digest != digest:
        what = f"{store.named}.bin and .idx do not have the bytes that the run has read"
        if began is not None and (change := began.difference(blocks)) is not None:
            where = block_text(
                began, change, _rows(packing, store, change), first_row=first_row
            )
            what = f"{store.named}{change.suffix} is not what the run has read: {where}"
    if what:
        raise RunError(
            what,
            expected="the bytes that the run has read: its weights come from these",
            fix="restore the store from its origin, then run the command again",
        )


def _rows(packing: Packing, store: TokenStore, change: Change) -> PackedRows | None:
    return cast("PackedRows", packing.pack(store)) if change.suffix in OF_TOKENS else None


def _held_out_lines(start: SegmentLine, packing: Packing) -> Iterator[str]:
    """What was held out of each store; RunError if the run has read other rows than those that it leaves."""
    parts = {name: packing.pack(store_named(prefix)) for name, _, prefix in start.stores}
    rows = MixedRows(parts) if start.mixture is not None else parts["source"]
    share = f"data.eval_share = {packing.eval_share:g}"
    # What rows can read is what the side of the store has; of the same fingerprint, it is what they have read.
    sides = [(part.name, cast("StoreSide", part.rows.store)) for part in parts_of(rows)]
    if rows.fingerprint != start.data or any(side.has_held_out() for _, side in sides):
        raise RunError(
            f"the run has read other rows than those that {share} leaves (data.seed = {packing.seed})",
            expected="the config.yaml of the run, and rows without held-out tokens",
            fix="restore config.yaml",
        )
    for name, side in sides:
        counts = f"{int(side.held_out.sum()):,} of {len(side.held_out):,} documents"
        yield f"  {name}: {counts} are held out, and no row has a token of them ({share})"
