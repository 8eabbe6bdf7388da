"""The block hashes of an open store: those written with it, else made once and remembered.

In: a store. Out: its bytes at the time of hashing (`Blocks`), and the first block that has changed since. The
hashes are beside the store, or in the cache if its folder cannot be written. While sizes and times of change are those
of the hashed files, nothing is read again; otherwise the whole store is, once: the same bytes are remembered with their
new times, others are a change, which is named and never remembered. The tokens of
a store that was copied without its hashes are compared with the fingerprint in its .json.
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from threefold.data.store.blocks import (
    LOSS_MASK,
    SUFFIX,
    Blocks,
    Change,
    IdRange,
    hashed,
    with_suffix,
)
from threefold.data.store.store import TokenStore, fingerprint_of_content
from threefold.data.text.known_bytes import content_digest
from threefold.errors import DataError

# All blocks of a file of up to 64 MiB are read again at every start, and as many of a larger one.
SAMPLED = 64


class Known(NamedTuple):
    """The bytes when hashed, where their hashes are kept (None: nowhere), and the first change since."""

    blocks: Blocks
    place: Path | None
    change: Change | None


def known(store: TokenStore, *, cache: Path, sampled: int = SAMPLED) -> Known:
    """The hashes of a store, compared with its files; one rank of each host calls it.

    Args:
        sampled: blocks of each file to read again, at random places; all of them, if there are no more.

    Raises:
        DataError: the hashes themselves are damaged, or a store without any is not what its .json describes.
    """
    own, kept = places_of(store.prefix, cache)
    if store.stored is not None and store.blocks is not None:
        # A start need not: each block is compared before it is used.
        changed = store.stored.read_again(sampled) if sampled > SAMPLED else None
        return Known(
            store.blocks,
            own,
            None if changed is None else Change(".bin", changed, store.stored.size),
        )
    beside, remembered = Blocks.read(own), Blocks.read(kept)
    if (
        beside is not None
        and remembered is not None
        and remembered.difference(beside) is not None
    ):
        remembered = None  # of a store that was here before
    for place, blocks in ((own, beside), (kept, remembered)):
        if blocks is not None and blocks.unchanged(store.prefix):
            return Known(blocks, place, sample(blocks, store.prefix, sampled))
    origin, made = beside or remembered, hashed_store(store)
    if origin is not None and (change := origin.difference(made)) is not None:
        return Known(origin, own if beside else kept, change)
    for place in (own, kept):
        with contextlib.suppress(OSError):
            made.write(place)
            return Known(made, place, None)
    return Known(made, None, None)


def places_of(prefix: Path, cache: Path) -> tuple[Path, Path]:
    """Possible places of a store's hashes: beside it, or in the cache."""
    name = content_digest(str(with_suffix(prefix, ".bin").resolve()))
    return with_suffix(prefix, SUFFIX), cache / "blocks" / f"{name}{SUFFIX}"


def sample(blocks: Blocks, prefix: Path, sampled: int) -> Change | None:
    """The first of some blocks of each file that has changed; others are chosen each time."""
    for suffix, kept in blocks.files.items():
        if suffix == ".json" and not with_suffix(prefix, suffix).exists():
            continue  # removed, to read the store as one made by another program
        numbers = np.arange(kept.num_blocks)
        if len(numbers) > sampled:
            numbers = np.sort(np.random.default_rng().choice(numbers, sampled, replace=False))
        if (change := blocks.change(prefix, suffix, numbers.tolist())) is not None:
            return change
    return None


def hashed_store(store: TokenStore) -> Blocks:
    """The hashes of a store's files as they are now, in one pass; a DataError if they contradict its .json."""
    ids, content = IdRange(), hashlib.blake2b(digest_size=16)
    others: list[Callable[[bytes], object]] = [
        lambda piece: ids.take(np.frombuffer(piece, store.dtype))
    ]
    recorded = with_suffix(store.prefix, SUFFIX).is_file()
    if store.info is not None and not recorded:
        others.append(content.update)
    files = {".idx": hashed(with_suffix(store.prefix, ".idx"))}
    files[".bin"] = hashed(with_suffix(store.prefix, ".bin"), *others)
    if store.has_loss_mask:
        files[LOSS_MASK] = hashed(with_suffix(store.prefix, LOSS_MASK), *others[1:])
    if store.info is not None:
        files[".json"] = hashed(with_suffix(store.prefix, ".json"))
        if not recorded:
            content.update(np.ascontiguousarray(store.lengths(), "<i4").data)
            _check_content(store, content.hexdigest())
    return Blocks(ids.low, ids.high, files)


def _check_content(store: TokenStore, content_hash: str) -> None:
    assert store.info is not None
    store.check()
    if (
        fingerprint_of_content(content_hash, store.info.tokenizer_fingerprint)
        != store.info.fingerprint
    ):
        others, parts = (
            (", .idx and .loss_mask", ", documents or loss mask")
            if store.has_loss_mask
            else (" and .idx", " or documents")
        )
        raise DataError(
            f"{with_suffix(store.prefix, '.bin')}{others} are not what {store.prefix.name}.json describes: their "
            f"tokens{parts} have another fingerprint",
            expected="the tokens as the store was made",
            fix="copy all files of the store again from their origin, or prepare the text again in another folder",
        )
