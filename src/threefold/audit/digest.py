"""What a rank really read, as digests, and what it should have read by the order.

In: the batches as the steps used them, and the few numbers that define an order. Out: one short message for each rank
and audit; all ranks' messages together show whether every dp rank read its own samples, its cp and tp ranks read the
same ones, and the tokens were the source's. Invariants: the prediction is made from the order alone, without any
loader, so a loader that is wrong cannot agree with it; and equal messages lead every rank to the same conclusion. No
communication, no torch.

Digests are 64 bits of XXH3 over little-endian int64 values, seeded with the digest of the steps before:

    samples    (step, row indices in the order of the batch)
    contents   the tensors of those rows: input_ids, labels, position_ids and, with document_mask, document_ids

So they depend on the order of the steps and on the places in a batch. Rows of -1 have no sample and are left out.
"""

import time
from typing import NamedTuple

import numpy as np
import xxhash

from threefold.arrays import Int64
from threefold.data.rows.concat import Rows
from threefold.data.rows.known_rows import Changed, KnownRows
from threefold.mesh.topology import Topology

TOKEN_FIELDS = ("input_ids", "labels", "position_ids", "document_ids")

# Blocks of the rows that were read are hashed again for this share of the time that the window took.
CHECKED_SHARE = 0.005


def fold_samples(digest: int, step: int, indices: Int64) -> int:
    """`digest` with one step's row indices [rows] folded in."""
    content = step.to_bytes(8, "little") + _bytes(indices[indices >= 0])
    return xxhash.xxh3_64_intdigest(content, seed=digest)


def fold_contents(digest: int, *contents: Int64) -> int:
    """`digest` with one step's tensors folded in, each [rows, seq_len]."""
    for values in contents:
        digest = xxhash.xxh3_64_intdigest(_bytes(values), seed=digest)
    return digest


def _bytes(values: Int64) -> memoryview:
    return (
        np.ascontiguousarray(values, "<i8").data.cast("B") if values.size else memoryview(b"")
    )


class TokenDifference(NamedTuple):
    """The first token of a row that is not the source's."""

    step: int
    row: int
    column: int
    field: int
    """place in TOKEN_FIELDS."""
    found: int
    expected: int


class Message(NamedTuple):
    """A rank's report of the steps since the last audit; sent as seven int64."""

    last_step: int
    samples: int
    contents: int
    source: int
    """digest of the fingerprint of the rows that the rank compares with."""
    differing_step: int
    """first step with a token that is not the source's, 0: none."""
    checked: int = 0
    """rows whose blocks were read again and compared with their hashes."""
    changed: int = 0
    """1 if a block has changed."""

    def pack(self) -> Int64:
        """[7] int64; digests keep their bits."""
        return np.array(self, np.uint64).view(np.int64)

    @classmethod
    def unpack(cls, values: Int64) -> "Message":
        """The inverse of `pack`."""
        return cls(*np.ascontiguousarray(values, np.int64).view(np.uint64).tolist())


class AuditWindow:
    """What one rank read since the last audit: digests, indices, and the first token that is not the source's.

    Every row is read again from the source and compared, place by place; without `rows` there is no source. At the end
    of the window, blocks of its rows are compared with their hashes, if they are `known`.
    """

    def __init__(
        self, rows: Rows | None, *, first_step: int, known: KnownRows | None = None
    ) -> None:
        self.first_step = first_step
        self.indices: list[Int64] = []
        """of each step, [rows]; kept to name the samples if something is wrong."""
        self.samples = 0
        self.contents = 0
        self.difference: TokenDifference | None = None
        self.checked = 0
        self.changed: Changed | None = None
        self._rows, self._known, self._began_s = rows, known, time.monotonic()
        self._source = (
            xxhash.xxh3_64_intdigest(rows.fingerprint.encode()) if rows is not None else 0
        )

    @property
    def num_steps(self) -> int:
        return len(self.indices)

    @property
    def last_step(self) -> int:
        return self.first_step + len(self.indices) - 1

    def add(self, indices: Int64, *contents: Int64) -> None:
        """Takes one step's batch: row indices [rows], and its tensors.

        With a source these are the first of TOKEN_FIELDS, each [rows, seq_len]; without, anything that identifies
        contents.
        """
        step = self.last_step + 1
        real = indices >= 0
        if not real.all():
            indices = indices[real]
            contents = tuple(values[real] for values in contents)
        self.indices.append(indices)
        self.samples = fold_samples(self.samples, step, indices)
        self.contents = fold_contents(self.contents, *contents)
        if self._rows is not None and self.difference is None and len(indices):
            batch = dict(zip(TOKEN_FIELDS, contents, strict=False))
            self.difference = self._compare(self._rows, step, indices, batch)

    def _compare(
        self, rows: Rows, step: int, indices: Int64, batch: dict[str, Int64]
    ) -> TokenDifference | None:
        inside = (indices >= 0) & (indices < rows.num_rows)
        if not inside.all():
            place = int(np.argmin(inside))
            return TokenDifference(
                step, int(indices[place]), 0, 0, int(batch["input_ids"][place, 0]), -1
            )
        source = rows.rows(indices)
        for field, name in enumerate(batch):
            if not np.array_equal(batch[name], source[name]):
                place, column = np.argwhere(batch[name] != source[name])[0].tolist()
                actual = int(batch[name][place, column])
                expected = int(source[name][place, column])
                return TokenDifference(
                    step, int(indices[place]), column, field, actual, expected
                )
        return None

    def check_blocks(self) -> None:
        """Compares blocks of the window's rows with their hashes: at least of one row, then while time is left."""
        if self._known is None or self._rows is None:
            return
        indices = np.concatenate(self.indices)
        inside = indices[indices < self._rows.num_rows]
        within_s = CHECKED_SHARE * (time.monotonic() - self._began_s)
        self.checked, self.changed = self._known.check(inside, within_s=within_s)

    def message(self) -> Message:
        """This rank's report to the others."""
        differing_step = self.difference.step if self.difference else 0
        changed = int(self.changed is not None)
        sent = self.last_step, self.samples, self.contents, self._source, differing_step
        return Message(*sent, self.checked, changed)

    def evidence(self, rows_per_step: int) -> Int64:
        """The first difference and the first changed block, then all indices, of the same size on every rank.

        [9 + num_steps * rows_per_step] int64; a step with fewer rows is padded with -1.
        """
        difference = self.difference or TokenDifference(0, 0, 0, 0, 0, 0)
        changed = self.changed
        block = (
            (changed.part + 1, changed.change.block, changed.change.size_bytes)
            if changed is not None
            else (0, 0, 0)
        )
        steps = np.full((self.num_steps, rows_per_step), -1, np.int64)
        for step, indices in zip(steps, self.indices, strict=True):
            taken = indices[:rows_per_step]
            step[: len(taken)] = taken
        return np.concatenate([np.array([*difference, *block], np.int64), steps.ravel()])


def predicted_samples(rows: Int64, *, first_step: int, dp_size: int) -> list[int]:
    """The `samples` digest that each dp rank must have of steps whose rows are [num_steps, global_batch]."""
    digests = [0] * dp_size
    for step, indices in enumerate(rows, start=first_step):
        digests = [
            fold_samples(digest, step, indices[rank::dp_size])
            for rank, digest in enumerate(digests)
        ]
    return digests


def agree(messages: list[Message], predicted: list[int], topology: Topology) -> bool:
    """Whether each dp rank's cp and tp ranks report the same, and what the order predicts.

    The predicted shares of the dp ranks are disjoint and together all positions of the steps, so ranks that have read
    them have left nothing out and read nothing twice.

    Args:
        messages: by global rank.
        predicted: `samples` by dp rank.
    """
    ranks_per_dp = topology.cp * topology.tp
    return all(
        message.samples == predicted[rank // ranks_per_dp]
        and message.contents == messages[rank - rank % ranks_per_dp].contents
        and message.source == messages[0].source
        and not message.differing_step
        and not message.changed
        for rank, message in enumerate(messages)
    )
