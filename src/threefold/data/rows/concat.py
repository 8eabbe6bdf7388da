"""Rows of fixed length from the documents of a token store: index arithmetic, no communication.

In: a store and three ways to cut it. Out: an object with a number of rows that reads any of them:

    concat     row i holds the tokens [i*S, i*S + S] of the stream: S inputs, and the labels one to the right
    best_fit   complete documents next to one another, chosen for little padding (`padded`); longer ones are cut
    none       one document per row, padded; a longer one continues in the next row, or is truncated

Invariants: the content of a row depends on the store and the settings only, never on the mesh. Labels are shifted
already, and -100 if nothing is to be predicted. With `document_mask`, `document_ids` count the documents inside a row
and positions restart with each of them; without, a row is one document, 0, at positions 0 to S-1. Padding has the
document id -1. A token is a label at most once, and with `document_mask` a document's first token never. In a store
with a loss mask, only the tokens in the mask are labels.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from threefold.arrays import Bool, Indices, Int64
from threefold.data.store.store import TokenStore, starts_of
from threefold.data.text.known_bytes import content_digest
from threefold.errors import DataError

RowArrays = dict[str, Int64]

IGNORED = -100
PADDING = -1


@dataclass(frozen=True)
class PackingReport:
    """The result of packing a store.

    `dropped_tokens` are neither input nor label of any row, `dropped_pairs` those cut to no two answers;
    `padding_share` is the share of the rows' places without a token (0 to 1).
    """

    num_rows: int
    num_tokens: int
    num_documents: int
    dropped_tokens: int
    padding_share: float = 0.0
    split_documents: int = 0
    truncated_documents: int = 0
    num_pairs: int = 0
    dropped_pairs: int = 0

    def __str__(self) -> str:
        rows, documents = counted(self.num_rows, "row"), counted(self.num_documents, "document")
        if self.num_pairs:
            documents = counted(self.num_pairs, "pair")
        parts = [f"{rows} of {counted(self.num_tokens, 'token')} in {documents}"]
        if self.padding_share:
            parts.append(f"{self.padding_share:.2%} padding")
        for number, what in (
            (self.split_documents, "split"),
            (self.truncated_documents, "truncated"),
        ):
            if number:
                parts.append(f"{counted(number, 'document')} {what}")
        if self.dropped_pairs:
            parts.append(
                f"{counted(self.dropped_pairs, 'pair')} dropped (no two answers before the cut)"
            )
        parts.append(f"{counted(self.dropped_tokens, 'token')} dropped")
        return ", ".join(parts)


class Rows(Protocol):
    """Rows that can be read in any order. Pickles as its recipe."""

    @property
    def seq_len(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def fingerprint(self) -> str:
        """Equal for equal rows: of the store and the way it is cut."""

    @property
    def report(self) -> PackingReport: ...
    def rows(self, indices: Indices) -> RowArrays:
        """`input_ids`, `labels`, `position_ids` and `document_ids` of some rows, each [len(indices), seq_len] int64."""


@dataclass(eq=False)
class ConcatRows:
    """The stream cut into windows, row i = tokens [i*S, i*S + S]; a DataError if it is shorter than one."""

    store: TokenStore
    _: KW_ONLY
    seq_len: int
    document_mask: bool = False

    def __post_init__(self) -> None:
        self.num_rows = max(0, self.store.num_tokens - 1) // self.seq_len
        if self.num_rows == 0:
            raise DataError(
                f"data.source has {counted(self.store.num_tokens, 'token')}: too few for one row",
                expected=f"more than data.seq_len = {self.seq_len:,} tokens",
                fix=f"--data.seq_len {max(1, (self.store.num_tokens - 1) // 2)}   (or a larger source)",
            )

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.store, "concat 1", self.seq_len, self.document_mask)

    @cached_property
    def report(self) -> PackingReport:
        dropped = (self.store.num_tokens - 1) % self.seq_len
        return PackingReport(
            self.num_rows, self.store.num_tokens, self.store.num_documents, dropped
        )

    def rows(self, indices: Indices) -> RowArrays:
        starts = checked(indices, self.num_rows) * self.seq_len
        # windows: (rows, seq_len + 1)
        windows = np.empty((len(starts), self.seq_len + 1), np.int64)
        for window, start in zip(windows, starts.tolist(), strict=True):
            window[:] = self.store.read(start, start + self.seq_len + 1)
        begins = np.zeros(windows.shape, np.bool_)
        if self.document_mask:
            mark_documents(begins, starts, self.store.document_ends)
        position_ids, document_ids = numbered(begins[:, :-1])
        labels = windows[:, 1:].copy()
        labels[begins[:, 1:]] = IGNORED
        if self.store.has_loss_mask:
            for row, start in zip(labels, starts.tolist(), strict=True):
                row[~self.store.trained_on(start + 1, start + 1 + self.seq_len)] = IGNORED
        return {
            "input_ids": windows[:, :-1].copy(),
            "labels": labels,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }

    @cached_property
    def num_targets(self) -> Int64:
        """As `PackedRows`."""
        starts = np.arange(self.num_rows) * self.seq_len + 1
        counts = self.store.count_trained_on(starts, starts + self.seq_len)
        if self.document_mask:
            # A document's first token is no label; rows have none of the last tokens.
            first = np.unique(self.store.document_ends)
            first = first[
                (first > 0)
                & (first <= self.num_rows * self.seq_len)
                & (first < self.store.num_tokens)
            ]
            np.subtract.at(
                counts,
                (first - 1) // self.seq_len,
                self.store.count_trained_on(first, first + 1),
            )
        return counts

    def targets_of_documents(self) -> Int64:
        """As `PackedRows`."""
        ends = self.store.document_ends
        starts = starts_of(ends) + self.document_mask
        stops = np.minimum(ends, self.num_rows * self.seq_len + 1)
        return self.store.count_trained_on(np.minimum(np.maximum(starts, 1), stops), stops)

    cut_by = "tail"

    def spans_of_documents(self) -> tuple[Int64, Int64]:
        """As `PackedRows`."""
        ends = self.store.document_ends
        starts = starts_of(ends)
        # As inputs: a row's last label is the first input of the next one.
        inputs = np.minimum(ends, self.num_rows * self.seq_len)
        in_rows = np.where(
            inputs > starts, (inputs - 1) // self.seq_len - starts // self.seq_len + 1, 0
        )
        return in_rows, np.maximum(starts, np.minimum(ends, self.num_rows * self.seq_len + 1))

    def stretches(self, row: int) -> Iterator[tuple[int, int]]:
        """As `PackedRows`."""
        yield row * self.seq_len, (row + 1) * self.seq_len + 1

    def readers(self, start: int, stop: int) -> Int64:
        """As `PackedRows`."""
        # A row's last token is the next row's first.
        return np.arange(
            max(0, (start - 1) // self.seq_len),
            min(self.num_rows, (stop - 1) // self.seq_len + 1),
        )


def mark_documents(begins: Bool, starts: Int64, ends: Int64) -> None:
    """Sets `begins[r, s]` where a document begins s > 0 tokens into the window of row r.

    Args:
        begins: [rows, length].
        starts: where each window begins in the stream, [rows].
        ends: the documents' ends in the stream, ascending; empty documents repeat an end.
    """
    first = np.searchsorted(ends, starts, "right")
    counts = np.maximum(np.searchsorted(ends, starts + begins.shape[1], "left") - first, 0)
    row = np.repeat(np.arange(len(starts)), counts)
    # The k-th end inside row r is ends[first[r] + k].
    k = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins[row, ends[first[row] + k] - starts[row]] = True


def numbered(begins: Bool) -> tuple[Int64, Int64]:
    """Positions that restart at each mark, and the number of marks up to each place; both [rows, length]."""
    places = np.arange(begins.shape[1], dtype=np.int64)
    last_begin = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return places - last_begin, np.cumsum(begins, axis=1, dtype=np.int64)


def checked(indices: Indices, num_rows: int) -> Int64:
    """`indices` as int64, each in [0, num_rows)."""
    rows = np.asarray(indices, np.int64)
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < num_rows):
        raise IndexError(
            f"row {int(rows.min())} or {int(rows.max())} is not in [0, {num_rows})"
        )
    return rows


def fingerprint_of(store: TokenStore, *settings: object) -> str:
    """Identity of rows: the store's content and every setting of the cut."""
    return content_digest(f"{store.fingerprint} {settings!r}")


def counted(number: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
