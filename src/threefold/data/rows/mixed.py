"""The rows of several sources under one numbering: first all rows of the first source, then of the second, and so on.

In: named `Rows` of equal length. Out: `Rows`, so that whatever reads, audits or prints rows does not know that there
are several sources. Which row is read when is `mixture`'s; the numbers here are those of `Mixture.rows_at`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from threefold.data.rows.concat import PackingReport, RowArrays, Rows, checked


class MixedRows:
    """Rows of several sources, read by one number."""

    def __init__(self, parts: Mapping[str, Rows]) -> None:
        """Number the rows of `parts`, which are of one length; their order is part of the numbering."""
        self.parts = dict(parts)
        self._rows = list(self.parts.values())
        self._ends = np.cumsum([part.num_rows for part in self._rows], dtype=np.int64)
        self.num_rows = int(self._ends[-1])
        self.seq_len = self._rows[0].seq_len
        assert {part.seq_len for part in self._rows} == {self.seq_len}

    @property
    def sizes(self) -> dict[str, int]:
        """Rows of each source, by name."""
        return {name: part.num_rows for name, part in self.parts.items()}

    @cached_property
    def fingerprint(self) -> str:
        recipe = repr([(name, part.fingerprint) for name, part in self.parts.items()])
        return hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()

    @cached_property
    def report(self) -> PackingReport:
        reports = [part.report for part in self._rows]
        return PackingReport(
            num_rows=self.num_rows,
            num_tokens=sum(report.num_tokens for report in reports),
            num_documents=sum(report.num_documents for report in reports),
            dropped_tokens=sum(report.dropped_tokens for report in reports),
            padding_share=sum(report.padding_share * report.num_rows for report in reports) / self.num_rows,
            split_documents=sum(report.split_documents for report in reports),
            truncated_documents=sum(report.truncated_documents for report in reports),
        )

    def locate(self, row: int) -> tuple[str, int]:
        """(name of the source, number of the row in it) of one row."""
        part = int(np.searchsorted(self._ends, row, side="right"))
        name = list(self.parts)[part]
        return name, row - (int(self._ends[part]) - self._rows[part].num_rows)

    def rows(self, indices: npt.NDArray[np.integer[Any]]) -> RowArrays:
        """As `Rows.rows`; each source is asked once."""
        wanted = checked(indices, self.num_rows)
        part_of = np.searchsorted(self._ends, wanted, side="right")
        batch: RowArrays = {}
        for number in np.unique(part_of):
            part = self._rows[number]
            mine = np.flatnonzero(part_of == number)
            read = part.rows(wanted[mine] - (self._ends[number] - part.num_rows))
            for name, values in read.items():
                # values: (rows of this source, seq_len)
                batch.setdefault(name, np.empty((len(wanted), *values.shape[1:]), np.int64))[mine] = values
        return batch
