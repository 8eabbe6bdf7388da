"""The part of an evaluation that is trained on: equal documents, and spans of 64 tokens, wherever they begin.

In: the documents of two or more stores, as tokens. Out: for each document of the evaluation that is in the training,
where. Hashes of spans only choose what is compared, token for token: there are no false positives. A span counts
if it has a token that is trained on; otherwise every system prompt that all rows begin with would be reported.

The evaluation is held in memory, 40 bytes a token up to `_MOST_SPANS`; the training is read once, in batches. Beyond
that, every k-th span of the evaluation is searched; and every k-th batch of the training, if a caller asks for that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash

from threefold.arrays import Array, Bool, Int64, UInt64
from threefold.data.order.permutation import hash_counters, key_words
from threefold.data.store.store import TokenStore

SPAN = 64
"""Tokens that are no coincidence."""

_MOST_SPANS = 1 << 23
_BATCH = 1 << 18
_TABLE_SHIFT = np.uint64(64 - 22)
# Base of a polynomial modulo 2^64: odd, so with an inverse, with which the sum of any span is shifted to its start.
_BASE = 0x9E3779B97F4A7C15
_POWERS, _INVERSES = (
    np.multiply.accumulate(np.array([1] + [base % (1 << 64)] * (_BATCH + SPAN), np.uint64))
    for base in (_BASE, pow(_BASE, -1, 1 << 64))
)
_KEY = key_words("overlap", count=1)[0]


class TrainedOn(NamedTuple):
    """A document of the evaluation, by number, and where it is trained on: a document of one of the sources.

    `num_tokens`: how many of its tokens are in spans that were found; 0: the documents are equal.
    """

    document: int
    source: str
    trained_document: int
    num_tokens: int = 0


@dataclass(frozen=True)
class Overlap:
    """The part of `num_documents` evaluation documents that is trained on.

    Attributes:
        exact: documents that are equal to one of the training.
        alike: others, which have spans of `SPAN` tokens in common with it.
        share_read: of the training's tokens.
        step: of so many spans of the evaluation, one was looked for.
    """

    num_documents: int
    exact: Sequence[TrainedOn]
    alike: Sequence[TrainedOn]
    share_read: float
    step: int

    def to_values(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        exact, alike = (
            [match._asdict() for match in matches] for matches in (self.exact, self.alike)
        )
        return {**asdict(self), "exact": exact, "alike": alike}

    def lines(self, named: int | None = None) -> Iterator[str]:
        """The findings, some by name or all, a line each, or that there are none; and how much was compared."""
        of, how = f"of {self.num_documents:,} held-out documents", ""
        if self.share_read < 1 or self.step > 1:
            spans = f", 1 in {self.step} spans" * (self.step > 1)
            how = f"   (in {self.share_read:.2%} of the training{spans}; threefold data overlap reads all)"
        for matches, what in (
            (self.exact, "trained on, token for token"),
            (self.alike, f"trained on in part, {SPAN} consecutive tokens or more"),
        ):
            if matches:
                apart = named is None and len(matches) > 1
                between = "\n  " if apart else "; "
                texts = between.join(
                    f"document {each.document:,} (document {each.trained_document:,} of {each.source}"
                    + (f", {each.num_tokens:,} tokens)" if each.num_tokens else ")")
                    for each in matches[:named]
                )
                more = "; ..." * (len(matches) > len(matches[:named]))
                yield f"{len(matches):,} {of} {what}:{between if apart else ' '}{texts}{more}{how}"
        if not self.exact and not self.alike:
            yield f"none {of}, nor {SPAN} consecutive tokens of one, is trained on{how}"


def overlap(
    training: Mapping[str, TokenStore],
    evaluation: TokenStore,
    *,
    most: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Overlap:
    """The part of an evaluation that is trained on.

    Args:
        training: the stores that are trained on, by the names of their sources.
        most: tokens of the training to read, about; None: all.
        progress: called with the tokens that were read, and how many there are.
    """
    wanted, total, read = (
        _Wanted(evaluation),
        sum(store.num_tokens for store in training.values()),
        0,
    )
    every = max(1, -(-total // most)) if most else 1
    for name, store in training.items():
        ends = np.concatenate(([0], store.document_ends))
        for start, tokens in _batches(store, every):
            wanted.look(name, store, ends, start, tokens)
            read += min(len(tokens), _BATCH)
            progress(read, -(-total // every))
    return wanted.found(read / max(1, total))


def _batches(store: TokenStore, every: int = 1) -> Iterator[tuple[int, Array]]:
    """(begin, tokens) of pieces of a stream, each with the beginning of the next, for spans that are in both."""
    for start in range(0, store.num_tokens, _BATCH * every):
        yield start, store.read(start, min(store.num_tokens, start + _BATCH + SPAN - 1))


def _spans(tokens: Array, begins: Int64) -> UInt64:
    """Hashes of the spans that begin at some places of up to a batch of tokens."""
    words = hash_counters(tokens.astype(np.uint64), key=_KEY) * _INVERSES[: len(tokens)]
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)))
    return (sums[begins + SPAN] - sums[begins]) * _POWERS[begins]


def _digest(tokens: Array) -> bytes:
    return xxhash.xxh3_128_digest(tokens.astype("<i4").tobytes())


class _Wanted:
    """The documents and spans of an evaluation, and where in the training they have been found."""

    def __init__(self, evaluation: TokenStore) -> None:
        self._store, self._ends = evaluation, np.concatenate(([0], evaluation.document_ends))
        self._tokens = evaluation.read(0, evaluation.num_tokens)
        self._step = max(1, -(-evaluation.num_tokens // _MOST_SPANS))
        self._documents: dict[bytes, list[int]] = {}
        for number, (start, stop) in enumerate(pairwise(self._ends.tolist())):
            self._documents.setdefault(_digest(self._tokens[start:stop]), []).append(number)
        self._exact: dict[int, TrainedOn] = {}
        hashes, places = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for start, tokens in _batches(evaluation):
            begins = np.arange(-start % self._step, len(tokens) - SPAN + 1, self._step)
            begins = begins[self._counts(start, start + len(tokens), begins)]
            hashes.append(_spans(tokens, begins))
            places.append(start + begins)
        self._places = np.concatenate(places)
        # Of equal spans, the first is searched; a few bits of the hash rule out most others in the training.
        self._spans, self._first, self._which = np.unique(
            np.concatenate(hashes), return_index=True, return_inverse=True
        )
        self._table = np.zeros(1 << 22, np.bool_)
        self._table[self._spans >> _TABLE_SHIFT] = True
        self._names: list[str] = []
        # By number of the source, and document.
        self._found = np.full((len(self._spans), 2), -1)

    def _counts(self, start: int, stop: int, begins: Int64) -> Bool:
        """Whether spans of the tokens [start, stop) are inside of one document, with a token that is trained on."""
        first, last = (
            np.searchsorted(self._ends, start + begins + at, side="right")
            for at in (0, SPAN - 1)
        )
        inside: Bool = first == last
        if self._store.has_loss_mask:
            before = np.concatenate(([0], np.cumsum(self._store.trained_on(start, stop))))
            inside &= before[begins + SPAN] > before[begins]
        return inside

    def look(
        self, name: str, store: TokenStore, ends: Int64, start: int, tokens: Array
    ) -> None:
        """Looks for them in a batch of the training: in documents that begin in it, and in spans."""
        first, last = np.searchsorted(ends[:-1], (start, start + _BATCH)).tolist()
        for number, (begin, end) in enumerate(pairwise(ends[first : last + 1].tolist()), first):
            for mine in self._documents.pop(_digest(store.read(begin, end)), ()):
                self._exact[mine] = TrainedOn(
                    self._number(mine), name, int(store.document_numbers[number])
                )
        if len(tokens) < SPAN or not len(self._spans):
            return
        hashes = _spans(tokens, begins := np.arange(len(tokens) - SPAN + 1))
        begins = begins[self._table[hashes >> _TABLE_SHIFT]]
        places = np.searchsorted(self._spans[:-1], hashes[begins])
        new = (self._spans[places] == hashes[begins]) & (self._found[places, 0] < 0)
        places, which = np.unique(places[new], return_index=True)
        begins = begins[new][which]
        theirs, ours = (
            np.lib.stride_tricks.sliding_window_view(each, SPAN)
            for each in (tokens, self._tokens)
        )
        same = (theirs[begins] == ours[self._places[self._first[places]]]).all(axis=1)
        self._names += [name] * (name not in self._names)
        self._found[places[same], 0] = self._names.index(name)
        self._found[places[same], 1] = store.document_numbers[
            np.searchsorted(ends, start + begins[same], side="right") - 1
        ]

    def found(self, share_read: float) -> Overlap:
        """The findings so far."""
        matches = self._found[self._which]
        begins, matches = self._places[matched := matches[:, 0] >= 0], matches[matched]
        document = np.searchsorted(self._ends, begins, side="right") - 1
        # Spans overlap: each counts for its tokens up to the next one.
        tokens = np.bincount(document, np.diff(begins, append=1 << 62).clip(max=SPAN))
        alike = [
            TrainedOn(
                self._number(mine), self._names[source], trained_document, int(tokens[mine])
            )
            for mine, at in zip(
                *(each.tolist() for each in np.unique(document, return_index=True)), strict=True
            )
            for source, trained_document in [matches[at].tolist()]
            if mine not in self._exact
        ]
        exact = [self._exact[mine] for mine in sorted(self._exact)]
        return Overlap(self._store.num_documents, exact, alike, share_read, self._step)

    def _number(self, mine: int) -> int:
        return int(self._store.document_numbers[mine])
