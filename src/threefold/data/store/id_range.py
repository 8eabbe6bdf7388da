"""Whether a model has an embedding for every id of a token store.

Under tensor parallelism an id that no rank has would be trained in silence: its embedding is zero and its target is
never hit. So the range of the ids is compared with the model before a run; it is found with the store's hashes
(`known`), in the same pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from threefold.data.store.blocks import Blocks, with_suffix
from threefold.data.store.store import TokenStore
from threefold.errors import DataError

_CHUNK = 1 << 24


def check_ids(store: TokenStore, blocks: Blocks, *, vocab_size: int) -> None:
    """DataError if a store has an id below 0, or one that a model of `vocab_size` has no embedding for."""
    path = with_suffix(store.prefix, ".bin")
    if store.dtype.kind == "f":
        raise DataError(
            f"{path} holds numbers of type {store.dtype.name}",
            expected="token ids, which are whole numbers; these would be cut off to such",
            fix="threefold data prepare --source TEXT --tokenizer TOKENIZER --to DIR   (makes a new store)",
        )
    if blocks.min_id >= 0 and blocks.max_id < vocab_size:
        return
    place = _first_outside(store.tokens, vocab_size)
    document = int(np.searchsorted(store.document_ends, place, "right"))
    raise DataError(
        f"{path} has the id {int(store.tokens[place])} as token {place:,}, in document {document:,} "
        f"(both counted from 0); its ids are {blocks.min_id} to {blocks.max_id}",
        expected=f"ids from 0 to {vocab_size - 1}: the model has {vocab_size} of them in its vocabulary",
        fix="prepare the text again with the model's tokenizer, or use the model that the store was made for",
    )


def _first_outside(tokens: npt.NDArray[Any], vocab_size: int) -> int:
    for start in range(0, len(tokens), _CHUNK):
        part = tokens[start : start + _CHUNK].astype(np.int64)
        if len(outside := np.flatnonzero((part < 0) | (part >= vocab_size))):
            return start + int(outside[0])
    raise AssertionError("no id is outside")
