"""Spans of a store's documents that fit into rows: the units of a packing.

A document longer than a row is cut every S tokens, or truncated; the documents of a pair are never split. A piece
that was cut has the document's next token as the label of its last place.
"""

from dataclasses import dataclass

import numpy as np

from threefold.arrays import Bool, Int64
from threefold.data.store.store import TokenStore, starts_of
from threefold.errors import DataError


@dataclass(frozen=True)
class Pieces:
    """Stretches of the stream in its order, and what was lost by cutting the documents.

    `starts` and `lengths` are [pieces]; `cut` is true if the document continues after the piece, `continued` if it
    began before it.
    """

    starts: Int64
    lengths: Int64
    cut: Bool
    continued: Bool
    dropped_tokens: int
    split_documents: int
    truncated_documents: int
    dropped_pairs: int = 0


def cut_documents(ends: Int64, *, seq_len: int, truncate: bool) -> Pieces:
    """Pieces of at most `seq_len` tokens of the documents that end at `ends`; with `truncate`, the first of each."""
    starts, lengths = _stretches(ends)
    # S inputs take S + 1 tokens of the document with their labels, so a document of L tokens needs (L - 1) / S rows.
    counts = np.maximum(-((1 - lengths) // seq_len), 0)
    dropped = int(np.count_nonzero(lengths == 1))
    longer = int(np.count_nonzero(counts > 1))
    if truncate:
        dropped += int(np.maximum(lengths - seq_len - 1, 0).sum())
        counts = np.minimum(counts, 1)
    document = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.cumsum(counts) - counts
    offset = (np.arange(len(document)) - first_piece[document]) * seq_len
    left = lengths[document] - offset
    return Pieces(
        starts=starts[document] + offset,
        lengths=np.minimum(left, seq_len),
        cut=left > seq_len,
        continued=offset > 0,
        dropped_tokens=dropped,
        split_documents=0 if truncate else longer,
        truncated_documents=longer if truncate else 0,
    )


def cut_pairs(store: TokenStore, *, seq_len: int, truncate: bool) -> Pieces:
    """Two pieces of each pair, chosen and rejected, that fit into a row of `seq_len` tokens together.

    Of a pair that does not fit, with `truncate`, each document keeps its first seq_len // 2 tokens at most, and the
    label after them. If one of them then has no label that is trained on, or both are the same, the pair is dropped.

    Raises:
        DataError: a pair does not fit, without `truncate`, or all are dropped.
    """
    starts, lengths = (each.reshape(-1, 2) for each in _stretches(store.document_ends))
    if len(short := np.flatnonzero((lengths < 2).any(axis=1))):
        raise DataError(
            f"{store.prefix}: the pair in row {int(short[0]):,} has a document of less than 2 tokens",
            expected="a prompt and an answer in each document, as they are written by `threefold data prepare`",
            fix="copy all files of the store again from their origin, or prepare the source again",
        )
    kept = lengths.copy()
    too_long = np.flatnonzero(lengths.sum(axis=1) > seq_len)
    if len(too_long) and not truncate:
        raise _too_long(lengths, too_long, seq_len)
    kept[too_long] = np.minimum(lengths[too_long], seq_len // 2)
    cut = kept < lengths
    stays = np.ones(len(lengths), np.bool_)
    for pair, begins, stops in zip(
        too_long, starts[too_long], (starts + kept + cut)[too_long], strict=True
    ):
        stays[pair] = _compares(store, *zip(begins.tolist(), stops.tolist(), strict=True))
    if len(too_long) and not stays.any():
        raise _too_long(lengths, too_long, seq_len, dropped=True)
    lost = lengths - kept - cut
    return Pieces(
        starts=starts[stays].reshape(-1),
        lengths=kept[stays].reshape(-1),
        cut=cut[stays].reshape(-1),
        continued=np.zeros(2 * int(stays.sum()), np.bool_),
        dropped_tokens=int(lost[stays].sum() + lengths[~stays].sum()),
        split_documents=0,
        truncated_documents=int(np.count_nonzero(lost[stays])),
        dropped_pairs=int(np.count_nonzero(~stays)),
    )


def _compares(store: TokenStore, chosen: tuple[int, int], rejected: tuple[int, int]) -> bool:
    """Whether two stretches of the stream, as (start, stop), differ, and something is trained on of each."""
    # A document's first token is no label; the one after a cut is.
    trained_on = (
        stop - start > 1 and store.trained_on(start + 1, stop).any()
        for start, stop in (chosen, rejected)
    )
    return all(trained_on) and not np.array_equal(store.read(*chosen), store.read(*rejected))


def _stretches(ends: Int64) -> tuple[Int64, Int64]:
    """Where each document begins in the stream, and how many tokens it has; both [documents]."""
    starts = starts_of(ends).astype(np.int64)
    return starts, ends - starts


def _too_long(
    lengths: Int64, too_long: Int64, seq_len: int, *, dropped: bool = False
) -> DataError:
    pair = int(too_long[0])
    chosen, rejected = lengths[pair].tolist()
    what = f"data.seq_len = {seq_len}: {len(too_long):,} of {len(lengths):,} pairs do not fit in a row"
    if dropped:
        what += f", and the first {seq_len // 2:,} tokens, which data.truncate keeps, do not reach both answers"
    cut = (
        ""
        if dropped
        else f"; or --data.truncate true: each document keeps {seq_len // 2:,} tokens"
    )
    return DataError(
        f"{what}; the first, in row {pair:,}, has {chosen + rejected:,} tokens: {chosen:,} with the chosen answer and "
        f"{rejected:,} with the rejected one",
        expected="both answers of a pair in one row, each after the whole prompt",
        fix=f"--data.seq_len {int(lengths.sum(axis=1).max())}   (of the longest pair{cut})",
    )
