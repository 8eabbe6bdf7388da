"""Rows of complete documents with padding at the end: `none` (one document per row) and `best_fit` (several).

A document longer than a row is cut every S tokens, or truncated. A piece is a span of the stream inside one
document; a row is one or several adjacent pieces, then padding. A place's label is the token after it in the row; at
the end of a piece that was cut it is the document's next token, so that a cut loses no label. The end of a row's last
document has nothing to predict: -100.

Two kinds of single tokens make no piece: a document of one token, which is counted as dropped, and the last token of a
document of k*S + 1 tokens, which is a label in the row before it.

Best-fit decreasing takes pieces `lookahead` at a time: inside such a group the longest goes first, and each goes to the
row with the least room for it. So rows hold only near neighbours of the corpus, memory for the open rows is bounded,
and the plan depends on the lengths alone.

From a store of pairs, whole pairs are placed: the chosen document and the rejected one after it, in one row. They are
its documents 2k and 2k + 1, so a loss finds the pairs by the document ids alone (even: chosen, odd: rejected).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from threefold.arrays import Bool, Indices, Int64
from threefold.data.rows.concat import (
    IGNORED,
    PADDING,
    PackingReport,
    RowArrays,
    checked,
    counted,
    fingerprint_of,
    numbered,
)
from threefold.data.rows.pieces import cut_documents, cut_pairs
from threefold.data.store.store import TokenStore, starts_of
from threefold.errors import DataError


class Placement(NamedTuple):
    """A way to put pieces into rows.

    Attributes:
        kind: of a fingerprint: its name, the version of its algorithm and its settings.
        place: (lengths [pieces], capacity=tokens of a row) -> (order, row_ends), as `best_fit`; it can be pickled.
    """

    kind: str
    place: Callable[..., tuple[Int64, Int64]]


@dataclass(eq=False)
class PaddedRows:
    """Rows of pieces, padded with the end token (0 in another program's store); a DataError if there is no piece.

    Args:
        placement: which pieces (of pairs: pairs) share a row.
        truncate: keep the first row of a longer document instead of cutting it.
    """

    store: TokenStore
    _: KW_ONLY
    seq_len: int
    placement: Placement = field(default_factory=lambda: PLACEMENTS["none"])
    document_mask: bool = False
    truncate: bool = False

    def __post_init__(self) -> None:
        cut: dict[str, Any] = {"seq_len": self.seq_len, "truncate": self.truncate}
        if self.store.has_pairs:
            self._pieces, together = cut_pairs(self.store, **cut), 2
        else:
            self._pieces, together = cut_documents(self.store.document_ends, **cut), 1
        # For each unit that is placed, [placed].
        lengths = self._pieces.lengths.reshape(-1, together).sum(axis=1)
        if not len(lengths):
            documents = counted(self.store.num_documents, "document")
            raise DataError(
                f"data.source has {documents}, none with 2 or more tokens: no row",
                expected="a document with a token and one to predict after it",
                fix="--data.packing concat   (or a larger source)",
            )
        # order: the pieces row by row; row_ends: one past each row's last piece in it.
        order, row_ends = self.placement.place(lengths, capacity=self.seq_len)
        self._order = (order[:, None] * together + np.arange(together)).reshape(-1)
        self._row_ends = row_ends * together
        self.num_rows = len(row_ends)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(
            PaddedRows, **{each.name: getattr(self, each.name) for each in fields(self)}
        ), ()

    @cached_property
    def fingerprint(self) -> str:
        kind = f"pairs 1 {self.placement.kind}" if self.store.has_pairs else self.placement.kind
        return fingerprint_of(self.store, kind, self.seq_len, self.document_mask, self.truncate)

    @cached_property
    def report(self) -> PackingReport:
        return PackingReport(
            num_rows=self.num_rows,
            num_tokens=self.store.num_tokens,
            num_documents=self.store.num_documents,
            dropped_tokens=self._pieces.dropped_tokens,
            padding_share=1
            - float(self._pieces.lengths.sum()) / float(self.num_rows * self.seq_len),
            split_documents=self._pieces.split_documents,
            truncated_documents=self._pieces.truncated_documents,
            num_pairs=self.store.num_documents // 2 if self.store.has_pairs else 0,
            dropped_pairs=self._pieces.dropped_pairs,
        )

    @property
    def document_ends(self) -> Int64:
        """[rows]: how many documents the rows up to each one have, it included; of pairs: two for each."""
        return self._row_ends

    def lengths(self, indices: Int64) -> Int64:
        """Tokens of some rows of one piece, or one pair, each: [rows]."""
        assert self.num_rows == len(self._pieces.lengths) // (2 if self.store.has_pairs else 1)
        return self._pieces.lengths.reshape(self.num_rows, -1)[indices].sum(axis=-1)

    def rows(self, indices: Indices) -> RowArrays:
        indices = checked(indices, self.num_rows)
        shape = (len(indices), self.seq_len)
        input_ids = np.full(shape, self.store.end_id or 0, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        begins = np.zeros(shape, np.bool_)
        used = np.zeros(len(indices), np.int64)
        for row, index in enumerate(indices.tolist()):
            used[row] = self._fill(index, input_ids[row], labels[row], begins[row])
        if not self.document_mask:
            begins[:] = False
        position_ids, document_ids = numbered(begins)
        document_ids[np.arange(self.seq_len) >= used[:, None]] = PADDING
        return {
            "input_ids": input_ids,
            "labels": labels,
            "position_ids": position_ids,
            "document_ids": document_ids,
        }

    def _fill(self, index: int, input_ids: Int64, labels: Int64, begins: Bool) -> int:
        """Writes row `index` into arrays of one row, [seq_len] each; returns the number of places that hold a token."""
        used = 0
        for piece in self._pieces_of(index).tolist():
            start, length = int(self._pieces.starts[piece]), int(self._pieces.lengths[piece])
            # Includes the token after a cut: it is the label of the piece's last place.
            tokens = self.store.read(
                start, stop := start + length + int(self._pieces.cut[piece])
            ).astype(np.int64)
            input_ids[used : used + length] = tokens[:length]
            if self.store.has_loss_mask:
                tokens[~self.store.trained_on(start, stop)] = IGNORED
            masked = self.document_mask or bool(self._pieces.continued[piece])
            # Otherwise its first token is a label, of the place before it.
            first = int(masked or not used)
            labels[used - 1 + first : used - 1 + len(tokens)] = tokens[first:]
            used += length
            if used < self.seq_len:
                begins[used] = True
        return used

    def _pieces_of(self, row: int) -> Int64:
        return self._order[self._row_ends[row - 1] if row else 0 : self._row_ends[row]]

    @cached_property
    def num_targets(self) -> Int64:
        """As `PackedRows`."""
        return np.add.reduceat(self._targets, starts_of(self._row_ends))

    def targets_of_documents(self) -> Int64:
        """As `PackedRows`."""
        documents = self._documents[self._order]
        return np.bincount(documents, self._targets, self.store.num_documents).astype(np.int64)

    cut_by = "truncation"

    def spans_of_documents(self) -> tuple[Int64, Int64]:
        """As `PackedRows`."""
        of, ends = self._pieces, self.store.document_ends
        # Without a piece: of a pair that was dropped, nothing; else the document is one token, its first.
        stops = starts_of(ends) if self.store.has_pairs else ends.copy()
        # In their order, so the last piece's stays.
        stops[self._documents] = of.starts + of.lengths + of.cut
        return np.bincount(self._documents, minlength=len(ends)), stops

    @property
    def _documents(self) -> Int64:
        """The document of each piece, [pieces]."""
        return np.searchsorted(self.store.document_ends, self._pieces.starts, "right")

    @property
    def _targets(self) -> Int64:
        """How many labels of each piece are trained on, [pieces], in the order of the rows."""
        of, order = self._pieces, self._order
        # As in `_fill`: whether a piece's first token is no label.
        unseen = of.continued[order] | self.document_mask
        unseen[starts_of(self._row_ends)] = True
        stops = of.starts[order] + of.lengths[order] + of.cut[order]
        return self.store.count_trained_on(of.starts[order] + unseen, stops)

    def stretches(self, row: int) -> Iterator[tuple[int, int]]:
        """As `PackedRows`."""
        places, of = self._pieces_of(row), self._pieces
        stops = of.starts[places] + of.lengths[places] + of.cut[places]
        return zip(of.starts[places].tolist(), stops.tolist(), strict=True)

    def readers(self, start: int, stop: int) -> Int64:
        """As `PackedRows`."""
        of = self._pieces
        # The last token of a piece that was cut is a label there, and begins the next piece.
        pieces = np.flatnonzero((of.starts < stop) & (of.starts + of.lengths + of.cut > start))
        places = np.flatnonzero(np.isin(self._order, pieces))
        return np.unique(np.searchsorted(self._row_ends, places, side="right"))


def one_per_row(lengths: Int64, *, capacity: int) -> tuple[Int64, Int64]:
    """A row for each piece; returns as `best_fit`."""
    return np.arange(len(lengths)), np.arange(1, len(lengths) + 1)


def best_fit(lengths: Int64, *, capacity: int, lookahead: int) -> tuple[Int64, Int64]:
    """Rows of pieces whose lengths sum to `capacity` at most.

    Args:
        lengths: of the pieces, [pieces], each from 1 to `capacity`.
        lookahead: pieces that are placed together.

    Returns:
        (order, row_ends): the pieces row by row, [pieces], and one past each row's last piece in it, [rows]. Inside a
        row pieces keep their order; rows are ordered by their first piece within each group.
    """
    order = np.empty(len(lengths), np.int64)
    row_ends: list[Int64] = []
    for start in range(0, len(lengths), lookahead):
        group = lengths[start : start + lookahead]
        row_of_piece = _rows_of_group(group, capacity=capacity)
        # Rows are numbered as they were opened; renumber them by the first piece each holds.
        _, first_piece, row_of_piece = np.unique(
            row_of_piece, return_index=True, return_inverse=True
        )
        rank = np.empty(len(first_piece), np.int64)
        rank[np.argsort(first_piece)] = np.arange(len(first_piece))
        row_of_piece = rank[row_of_piece]
        order[start : start + len(group)] = start + np.argsort(row_of_piece, kind="stable")
        row_ends.append(start + np.cumsum(np.bincount(row_of_piece)))
    return order, np.concatenate(row_ends) if row_ends else np.empty(0, np.int64)


def _rows_of_group(lengths: Int64, *, capacity: int) -> Int64:
    """Row number of each piece, by best-fit decreasing.

    `rooms` has bit r set while some open row has r tokens of room: the tightest row for a piece of length n is the
    lowest bit from n on, found in one operation on an integer of `capacity` bits.
    """
    rows_with_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms = 0
    num_rows = 0
    row_of_piece = np.empty(len(lengths), np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    for piece, length in zip(
        longest_first.tolist(), lengths[longest_first].tolist(), strict=True
    ):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, num_rows
            num_rows += 1
        row_of_piece[piece] = row
        left = room - length
        if left:
            if not rows_with_room[left]:
                rooms |= 1 << left
            rows_with_room[left].append(row)
    return row_of_piece


def best_fit_among(lookahead: int) -> Placement:
    """`best_fit` with so many pieces placed together."""
    return Placement(f"best_fit 1 {lookahead}", partial(best_fit, lookahead=lookahead))


# By data.packing; to choose among more pieces saves less than 0.1 % of padding.
PLACEMENTS: dict[str, Placement] = {
    "best_fit": best_fit_among(8192),
    "none": Placement("none 1", one_per_row),
}
