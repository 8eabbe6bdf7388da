"""Anomalies in a run, and the rows of a step, for a page: the findings of `threefold why`, ready for JSON.

For long runs with many rows this is slow, so it is computed once and kept; above a size it is left to the command.
"""

from pathlib import Path
from typing import Any

from threefold.audit.lookup import ordered_step
from threefold.audit.row_losses import FOLDER
from threefold.errors import ThreefoldError, first_line, shell_word
from threefold.records.files import unsafe_files
from threefold.records.metrics import Points
from threefold.why.batch_rows import StepBatches
from threefold.why.findings import Anomaly, findings, telling
from threefold.why.lookback import Lookback

_MOST_BYTES = 1 << 25
_MOST_ROWS = 12
_ERRORS = (ThreefoldError, OSError, ValueError, KeyError, TypeError, IndexError, RecursionError)


class Reasons:
    """The findings about one run.

    Attributes:
        found: anomalies, the most telling first.
        note: why there are no findings; None: the run was examined.
    """

    def __init__(self, run: Path) -> None:
        self.found: list[Anomaly] = []
        self.note: str | None = None
        self._batches: StepBatches | None = None
        if (odd := next(unsafe_files(run), None)) is not None:
            self.note = f"the cause of its spikes is not known: {': '.join(odd)}"
            return
        try:
            size = sum(path.stat().st_size for path in (run / FOLDER).glob("rank-*.bin"))
            if size > _MOST_BYTES:
                large = f"the losses of rows take {size / 2**20:,.0f} MiB"
                self.note = f"{large}: `threefold why {shell_word(run)}` reads them"
                return
            self._batches = StepBatches(Lookback.of(run))
            self.found = findings(self._batches)
            missing = self._batches.contents.missing
            self.note = f"rows without documents and text: {missing}" if missing else None
        except _ERRORS as error:
            self.note = f"the cause of its spikes is not known: {first_line(error)}"

    @property
    def losses(self) -> Points | None:
        """The loss of every step whose rows are kept; None if they were not read."""
        return Points(*self._batches.run.table.losses()) if self._batches is not None else None

    @property
    def steps(self) -> list[int]:
        """The steps that are named, the most telling first."""
        return list(dict.fromkeys(step for each in self.found for step in each.steps[:3]))

    def of_step(self, step: int) -> dict[str, Any] | None:
        """What a step read and where, the rows farthest from comparable ones first; None if nothing is known."""
        if self._batches is None:
            return None
        try:
            rows = telling(self._batches.rows_of(step))
            read = ordered_step(self._batches.run.segments, step)
            top_rows = [row.to_values() for row in rows[:_MOST_ROWS]]
        except _ERRORS:
            return None
        batch: dict[str, Any] = {
            "step": step,
            "rows": top_rows,
            "more": max(0, len(rows) - _MOST_ROWS),
        }
        if read is not None:
            places = [
                f"epoch {epoch}, positions from {position:,} on"
                for epoch, position in read.places
            ]
            batch |= {
                "where": ", ".join(places),
                "mesh": str(read.topology),
                "dp": read.topology.dp,
            }
        return batch
