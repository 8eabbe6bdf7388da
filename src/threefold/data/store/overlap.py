"""What of an evaluation is trained on: rows that are equal, and spans of 64 tokens, wherever they begin.

In: the documents of two or more stores, as tokens. Out: for each document of the evaluation that is in the training,
where. Hashes only choose what is compared, token for token: nothing is found that is not there. A span counts if it has
a token that is trained on, or there would be no end of system prompts that all rows begin with.

The evaluation is held in memory, 40 bytes a token; the training is read once, in batches. If either is longer than a
caller allows, every k-th span of the evaluation is looked for, or every k-th batch of the training read: `share_read`
and `step` say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from threefold.data.order.permutation import hash_counters, key_words
from threefold.data.store.store import TokenStore

SPAN = 64
"""Tokens that are no coincidence."""
MOST_SPANS = 1 << 23
"""Spans of an evaluation that are looked for: 200 MB of memory."""

_BATCH = 1 << 18
_TABLE_BITS = 22
# Of a polynomial modulo 2^64: an odd number has an inverse, so that a sum of any stretch is moved to its beginning.
_BASE = 0x9E3779B97F4A7C15
_KEY = key_words("overlap", count=1)[0]

Words = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]


class Match(NamedTuple):
    """A document of the evaluation, by number, that is in the training: in a document of one of its sources.

    `num_tokens`: how many of its tokens are in spans that were found; 0: the documents are equal.
    """

    document: int
    source: str
    trained_document: int
    num_tokens: int = 0


@dataclass(frozen=True)
class Overlap:
    """What of `num_documents` documents of an evaluation is trained on; plain values in `asdict`.

    Attributes:
        num_exact, exact: documents that are equal to one of the training: how many, and those that are named.
        num_alike, alike: others, which have spans of `SPAN` tokens in common with it.
        share_read: of the training's tokens that were read.
        step: of so many spans of the evaluation, one was looked for.
    """

    num_documents: int
    num_exact: int
    num_alike: int
    exact: Sequence[Match]
    alike: Sequence[Match]
    share_read: float
    step: int

    def lines(self) -> Iterator[str]:
        """What was found, or that nothing was; and how much was compared, if not everything."""
        of = f"of {self.num_documents:,} held-out documents"
        parts = [f"in {self.share_read:.2%} of the training's tokens"] if self.share_read < 1 else []
        parts += [f"by 1 in {self.step} of its spans"] if self.step > 1 else []
        how = f" ({', '.join(parts)}: threefold data overlap reads all)" if parts else ""
        if self.num_exact:
            texts, are = _texts(self.exact, self.num_exact), "is" if self.num_exact == 1 else "are"
            yield f"{self.num_exact:,} {of} {are} trained on, token for token: {texts}{how}"
        if self.num_alike:
            have = "has" if self.num_alike == 1 else "have"
            what = f"{'more ' * bool(self.num_exact)}{of} {have} {SPAN} tokens or more in a row that are trained on"
            yield f"{self.num_alike:,} {what}: {_texts(self.alike, self.num_alike)}{how}"
        if not self.num_exact + self.num_alike:
            yield f"none {of}, nor {SPAN} tokens in a row of one, is trained on{how}"


def _texts(matches: Sequence[Match], number: int) -> str:
    texts = []
    for document, source, trained_document, num_tokens in matches:
        tokens = f", {num_tokens:,} tokens" if num_tokens else ""
        texts.append(f"document {document:,} (document {trained_document:,} of {source}{tokens})")
    return "; ".join([*texts, *(["..."] if number > len(matches) else [])])


def overlap(
    training: Mapping[str, TokenStore],
    evaluation: TokenStore,
    *,
    most: int | None = None,
    named: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Overlap:
    """What of an evaluation is trained on.

    Args:
        training: the stores that are trained on, by the names of their sources.
        most: tokens of the training to read, about; None: all.
        named: documents of each kind to name; None: all.
        progress: called with the tokens that were read, and how many there are.
    """
    looked_for = _Wanted(evaluation)
    total = sum(store.num_tokens for store in training.values())
    every = 1 if most is None else max(1, -(-total // most))
    passed = read = 0
    for name, store in training.items():
        for number, (first, ends) in enumerate(_batches(store)):
            passed += int(ends[-1] - ends[0])
            if number % every == 0:
                read += int(ends[-1] - ends[0])
                looked_for.look(name, store, first, ends)
                progress(passed, total)
    return looked_for.found(named, share_read=read / max(1, total))


def _batches(store: TokenStore) -> Iterator[tuple[int, Int64]]:
    """(number of the first document, its begin and the ends) of documents that are read together, in their order."""
    ends, first = np.concatenate(([0], store.document_ends)), 0
    while first < store.num_documents:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + _BATCH, side="right")) - 1)
        yield first, ends[first : last + 1]
        first = last


class _Hashes:
    """Hashes of stretches of up to `_BATCH` tokens: sums of their tokens' words times powers of a base."""

    def __init__(self) -> None:
        inverse = np.uint64(pow(_BASE, -1, 1 << 64))
        ones = np.ones(_BATCH + 1, np.uint64)
        ones[1:] = inverse
        self._inverse = np.multiply.accumulate(ones)
        ones[1:] = np.uint64(_BASE)
        self._power = np.multiply.accumulate(ones)

    def of(self, tokens: npt.NDArray[Any]) -> Callable[[Int64, Int64], Words]:
        """A function of (starts, stops) that hashes these stretches of the tokens."""
        words = hash_counters(tokens.astype(np.uint64), key=_KEY) * self._inverse[: len(tokens)]
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)))
        return lambda starts, stops: (sums[stops] - sums[starts]) * self._power[starts]


class _Wanted:
    """The documents and spans of an evaluation, and where in the training they have been found."""

    def __init__(self, evaluation: TokenStore) -> None:
        self._store, self._hashes = evaluation, _Hashes()
        self._step = max(1, -(-evaluation.num_tokens // MOST_SPANS))
        self._tokens = evaluation.read(0, evaluation.num_tokens)
        self._ends = np.concatenate(([0], evaluation.document_ends))
        documents, spans, places = [], [], []
        for _, ends in _batches(evaluation):
            for start, tokens in self._windows(evaluation, int(ends[0]), int(ends[-1])):
                begins = np.arange(start - start % -self._step, start + len(tokens) - SPAN + 1, self._step)
                places.append(begins := begins[self._counts(ends, begins, start, start + len(tokens))])
                spans.append(self._hashes.of(tokens)(begins - start, begins - start + SPAN))
            documents.append(self._documents(evaluation, ends))
        none = np.empty(0, np.uint64)
        self._by_hash = np.argsort(made := np.concatenate([none, *documents]), kind="stable")
        self._document_hashes = made[self._by_hash]
        hashes, self._places = np.concatenate([none, *spans]), np.concatenate([np.empty(0, np.int64), *places])
        order = np.argsort(hashes, kind="stable")
        self._spans, self._places = hashes[order], self._places[order]
        self._table = np.zeros(1 << _TABLE_BITS, np.bool_)
        self._table[self._spans >> np.uint64(64 - _TABLE_BITS)] = True
        # Where each was found: the source, -1: nowhere; and the document there.
        self._exact = np.full((len(self._document_hashes), 2), -1)
        self._found = np.full((len(self._spans), 2), -1)
        self._names: list[str] = []

    def _windows(self, store: TokenStore, start: int, stop: int) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """(begin, tokens) of stretches of at most `_BATCH` tokens that have every span of [start, stop)."""
        while start < stop:
            end = min(stop, start + _BATCH)
            yield start, store.read(start, end)
            start = end if end == stop else end - SPAN + 1

    def _documents(self, store: TokenStore, ends: Int64) -> Words:
        """The hashes of documents; of one that is longer than a batch, of its beginning, and its length."""
        start = int(ends[0])
        tokens = store.read(start, min(int(ends[-1]), start + _BATCH))
        stops = np.minimum(ends - start, len(tokens))
        lengths = hash_counters(np.diff(ends).astype(np.uint64), key=_KEY)
        return self._hashes.of(tokens)(stops[:-1], stops[1:]) ^ lengths

    def _counts(self, ends: Int64, begins: Int64, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Whether spans of [start, stop) are inside of one document, and something of them is trained on."""
        inside = _inside(ends, begins)
        if self._store.has_loss_mask:
            before = np.concatenate(([0], np.cumsum(self._store.trained_on(start, stop))))
            inside &= before[begins - start + SPAN] > before[begins - start]
        return inside

    def look(self, name: str, store: TokenStore, first: int, ends: Int64) -> None:
        """Looks for them in some documents of the training, whose first is given by number."""
        if name not in self._names:
            self._names.append(name)
        source, numbers = len(self._names) - 1, store.document_numbers[first : first + len(ends) - 1]
        hashes = self._documents(store, ends)
        low, high = (np.searchsorted(self._document_hashes, hashes, side=side) for side in ("left", "right"))
        for document in np.flatnonzero(high > low).tolist():
            for mine in self._by_hash[low[document] : high[document]].tolist():
                stretches = (self._ends[mine], self._ends[mine + 1]), (ends[document], ends[document + 1])
                if self._exact[mine, 0] < 0 and _equal(self._store, store, *stretches):
                    self._exact[mine] = source, numbers[document]
        windows = functools.partial(np.lib.stride_tricks.sliding_window_view, window_shape=SPAN)
        for start, tokens in self._windows(store, int(ends[0]), int(ends[-1])) if len(self._spans) else ():
            if len(tokens) < SPAN:
                continue
            begins = np.arange(len(tokens) - SPAN + 1)
            spans = self._hashes.of(tokens)(begins, begins + SPAN)
            begins = begins[self._table[spans >> np.uint64(64 - _TABLE_BITS)]]
            places = np.searchsorted(self._spans[:-1], spans[begins])
            new = (self._spans[places] == spans[begins]) & (self._found[places, 0] < 0)
            new[new] = _inside(ends, start + begins[new])
            places, which = np.unique(places[new], return_index=True)
            begins = start + begins[new][which]
            same = (windows(tokens)[begins - start] == windows(self._tokens)[self._places[places]]).all(axis=1)
            self._found[places[same], 0] = source
            self._found[places[same], 1] = numbers[np.searchsorted(ends, begins[same], side="right") - 1]

    def found(self, named: int | None, *, share_read: float) -> Overlap:
        """What has been found, with so many documents of each kind by name."""
        numbers = self._store.document_numbers

        def match(mine: int, where: Int64, num_tokens: int = 0) -> Match:
            return Match(int(numbers[mine]), self._names[where[0]], int(where[1]), num_tokens)

        exact = np.flatnonzero(self._exact[:, 0] >= 0)
        # Of equal spans of the evaluation, one is looked for.
        found = self._found[np.searchsorted(self._spans, self._spans)]
        order = np.argsort(self._places, kind="stable")
        order = order[found[order, 0] >= 0]
        begins, found = self._places[order], found[order]
        document = np.searchsorted(self._ends, begins, side="right") - 1
        tokens = np.bincount(document, np.diff(begins, append=1 << 62).clip(max=SPAN), len(numbers)).astype(np.int64)
        documents, where = np.unique(document, return_index=True)
        others = ~np.isin(documents, exact)
        documents, where = documents[others], where[others]
        return Overlap(
            num_documents=len(numbers),
            num_exact=len(exact),
            num_alike=len(documents),
            exact=[match(mine, self._exact[mine]) for mine in exact[:named].tolist()],
            alike=[
                match(mine, found[at], int(tokens[mine]))
                for mine, at in zip(documents[:named].tolist(), where[:named].tolist(), strict=True)
            ],
            share_read=share_read,
            step=self._step,
        )


def _inside(ends: Int64, begins: Int64) -> npt.NDArray[np.bool_]:
    """Whether spans lie in one document each."""
    return np.searchsorted(ends, begins, side="right") == np.searchsorted(ends, begins + SPAN, side="left")


def _equal(one: TokenStore, other: TokenStore, first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two stretches of streams, each (start, stop), have the same tokens."""
    (a, a_end), (b, b_end) = map(int, first), map(int, second)
    return a_end - a == b_end - b and all(
        np.array_equal(one.read(a + at, min(a_end, a + at + _BATCH)), other.read(b + at, min(b_end, b + at + _BATCH)))
        for at in range(0, a_end - a, _BATCH)
    )
