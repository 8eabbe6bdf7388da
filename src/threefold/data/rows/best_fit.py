"""Which documents share a row: best-fit decreasing over a bounded look-ahead.

In: the lengths of pieces (documents, or what a cut left of them). Out: for each row the pieces that fill it. Pieces
are taken `lookahead` at a time; inside such a group the longest goes first, and each goes to the row where it leaves
least room. So rows hold only near neighbours of the corpus, memory for the open rows is bounded, and the plan is a
function of the lengths alone.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

DEFAULT_LOOKAHEAD = 8192


def best_fit(lengths: Int64, *, capacity: int, lookahead: int) -> tuple[Int64, Int64]:
    """Rows of pieces whose lengths sum to `capacity` at most.

    Args:
        lengths: of the pieces, [pieces], each from 1 to `capacity`.
        lookahead: pieces that are looked at together.

    Returns:
        (order, row_ends): the pieces row by row, [pieces], and one past each row's last piece in it, [rows]. Inside a
        row pieces keep the order they came in; rows are ordered by their first piece within each group.
    """
    order = np.empty(len(lengths), np.int64)
    row_ends: list[Int64] = []
    for start in range(0, len(lengths), lookahead):
        group = lengths[start : start + lookahead]
        row_of_piece = _rows_of_group(group, capacity=capacity)
        # Rows are numbered as they were opened; renumber them by the first piece each holds.
        _, first_piece, row_of_piece = np.unique(row_of_piece, return_index=True, return_inverse=True)
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
    for piece, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
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
