"""A store with a share of its documents held out of training, for evaluation.

The choice depends only on `data.seed` and document numbers: it is the same on any mesh and after a resume. Both
documents of a pair are on one side. Each side is a separate stream, and its rows are packed as from any store: no
training row has a token of a held-out document, as label or as input.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from threefold.arrays import Array, Bool, Int64
from threefold.data.order.permutation import hash_counters, key_words
from threefold.data.store.store import TokenStore
from threefold.data.text.known_bytes import content_digest
from threefold.errors import DataError


class StoreSide(TokenStore):
    """One side of a store: the documents that are held out, or the others, in their order and without gaps.

    Pickles as its recipe. Its bytes are those of the whole store: `places` locates its tokens in them.
    """

    def __init__(self, whole: TokenStore, share: float, seed: int, held_out: bool) -> None:
        """Takes the documents; a DataError if one side has none."""
        super().__init__(whole.prefix)
        self.blocks, self.blocks_at = whole.blocks, whole.blocks_at
        self._whole, self._recipe = whole, (share, seed, held_out)
        self.held_out = held_out_documents(whole, share=share, seed=seed)
        taken = self.held_out == held_out
        ends = whole.document_ends
        lengths = np.diff(ends, prepend=0)
        self.document_numbers = np.flatnonzero(taken)
        self.document_ends = np.cumsum(lengths[taken])
        # Runs of documents that follow one another: where they begin in the whole [runs], and here [runs + 1].
        edges = np.flatnonzero(np.diff(taken.astype(np.int8), prepend=0, append=0))
        self._begins, stops = (ends - lengths)[edges[::2]], ends[edges[1::2] - 1]
        self._offsets = np.concatenate(([0], np.cumsum(stops - self._begins)))
        self.num_tokens, self.num_documents = int(self._offsets[-1]), len(self.document_numbers)
        if self.info is not None:
            count = self.info.num_loss_tokens
            if self.has_loss_mask:
                count = int(self.count_trained_on(np.zeros(1, np.int64), self._offsets[-1:])[0])
            self.info = replace(
                self.info,
                num_tokens=self.num_tokens,
                num_documents=self.num_documents,
                num_loss_tokens=count,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreSide, (self._whole, *self._recipe)

    @cached_property
    def fingerprint(self) -> str:
        return content_digest(f"{self._whole.fingerprint} held out 1 {self._recipe!r}")

    def places(self, start: int, stop: int) -> list[tuple[int, int]]:
        """As `TokenStore`."""
        first, last = np.searchsorted(self._offsets, (start, stop), side="right").tolist()
        return [
            (at := int(self._of_whole(np.array([begin]))[0]), at + end - begin)
            for begin, end in pairwise([start, *self._offsets[first:last].tolist(), stop])
            if end > begin
        ]

    def has_held_out(self) -> bool:
        """Whether a token of this side is in a held-out document."""
        ends = self._whole.document_ends
        return any(
            self.held_out[
                np.searchsorted(ends, start, side="right") : np.searchsorted(ends, stop)
            ].any()
            for start, stop in self.places(0, self.num_tokens)
        )

    def inside(self, start: int, stop: int) -> tuple[int, int]:
        """As `TokenStore`."""
        run = np.searchsorted(self._begins, (start, stop), side="right") - 1
        # For a place before the first run: none; for one after a run's end: all of that run.
        into = np.minimum(
            np.array([start, stop]) - self._begins[run], np.diff(self._offsets)[run]
        )
        first, last = np.where(run < 0, 0, self._offsets[run] + into).tolist()
        return first, last

    def read(self, start: int, stop: int) -> Array:
        return self._joined(self._whole.read, start, stop)

    def trained_on(self, start: int, stop: int) -> Bool:
        return self._joined(self._whole.trained_on, start, stop)

    def count_trained_on(self, starts: Int64, stops: Int64) -> Int64:
        count, ends = self._whole.count_trained_on, self._begins + np.diff(self._offsets)
        before = np.concatenate(([0], np.cumsum(count(self._begins, ends))))

        def up_to(places: Int64) -> Int64:
            run = np.searchsorted(self._offsets[:-1], places, side="right") - 1
            return before[run] + count(
                self._begins[run], self._begins[run] + places - self._offsets[run]
            )

        return up_to(stops) - up_to(starts)

    def _of_whole(self, places: Int64) -> Int64:
        """Where tokens of this side are in the whole."""
        run = np.searchsorted(self._offsets, places, side="right") - 1
        return self._begins[run] + places - self._offsets[run]

    def _joined(self, read: Callable[[int, int], Array], start: int, stop: int) -> Array:
        parts = [read(*place) for place in self.places(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([read(0, 0), *parts])


def held_out_documents(store: TokenStore, *, share: float, seed: int) -> Bool:
    """Whether each document of a store is held out, [documents]: a share of them, and one at least.

    Raises:
        DataError: none is left to train on.
    """
    together = 2 if store.has_pairs else 1
    number = store.num_documents // together
    count = max(1, round(share * number))
    if count >= number:
        of_source = store.info.source if store.info is not None else store.named
        smaller = "a smaller data.eval_share" if number > 1 else "leave data.eval_share out"
        raise DataError(
            f"data.eval_share = {share:g} holds out {count:,} of {number:,} documents: {of_source}",
            expected="documents on both sides: those that are evaluated are not trained on",
            fix=f"{smaller}, or a source of more documents   (each file of text is one)",
        )
    # The order of random numbers: a longer source keeps most of its documents on their sides.
    keys = hash_counters(
        np.arange(number, dtype=np.uint64), key=key_words("held out", seed, count=1)[0]
    )
    held_out = np.zeros(number, np.bool_)
    held_out[np.argpartition(keys, count)[:count]] = True
    return np.repeat(held_out, together)
