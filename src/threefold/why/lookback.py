"""A run's records that can explain anomalies: losses of rows, metrics, the order, the journal. Read only; no torch.

Lines superseded by a later start are left out, and damaged ones are left out and named.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from threefold.arrays import Bool, Float64, Int64
from threefold.audit.lookup import ordered_rows, ordered_step
from threefold.audit.row_losses import FOLDER
from threefold.config.paths import METRICS
from threefold.errors import ConfigError
from threefold.records.run import RunRecord

# Steps whose rows are computed together.
_AT_A_TIME = 256


class Lookback:
    """A run's records as tables by step and row.

    Attributes:
        segments: its audited history that still holds; empty: it has no record, and no row can be named.
        kept: the losses of its rows.
        logged: its logged steps, ascending.
        skipped: why steps made no update, by step.
        events: the lines of its journal.
        ending: how its last start failed.
        damaged: what could not be read, in words.
    """

    def __init__(self, record: RunRecord) -> None:
        self.run, self._metrics = record.path, record.metrics
        self.segments, self.kept = record.segments, record.rows
        self.logged, self.skipped = self._metrics.steps, self._metrics.skipped
        self.events, self.ending, self.damaged = record.events, record.ending, record.damaged

    @classmethod
    def of(cls, run: Path) -> Lookback:
        """Reads a run's folder.

        Raises:
            ConfigError: nothing in it shows what the run did.
            RunError: its audit.jsonl is damaged.
        """
        back = cls(RunRecord(run))
        if not back.logged and not back.kept.steps:
            raise ConfigError(
                f"{run} has no logged step yet",
                expected=f"a run that has trained: {METRICS}, and {FOLDER}/ with the losses of its rows",
                fix=f"wait for its first step, or check the path: ls {run}",
            )
        return back

    @property
    def last_step(self) -> int:
        return max([*self.kept.steps[-1:], *self.logged[-1:]])

    @cached_property
    def table(self) -> Table:
        return Table.of(self)

    def number(self, step: int, name: str) -> float | None:
        """A number of a logged step; None if it is not there, or not finite."""
        return self._metrics.number(step, name)

    def series(self, name: str) -> tuple[Int64, Float64]:
        """(steps, values) of a number of the logged steps, where it is finite."""
        return self._metrics.points(name).finite()

    def rows_of(self, step: int) -> Int64 | None:
        """The row at each place of a step, [global batch], -1 where there is none; None if the order is not known."""
        read = ordered_step(self.segments, step)
        return None if read is None else read.rows

    @cached_property
    def sources(self) -> tuple[list[str], Int64]:
        """(names of the sources, one past the last row of each)."""
        mixture = self.segments[-1].start.mixture if self.segments else None
        if mixture is None:
            return ["source"], np.array(
                [self.segments[-1].start.num_rows if self.segments else 1 << 62], np.int64
            )
        return [name for name, *_ in mixture], np.cumsum(
            [size for _, size, _ in mixture], dtype=np.int64
        )

    def sources_of(self, steps: list[int], width: int) -> Int64:
        """The number of the source at each place of some steps, ascending, [steps, width]; 0 where there is no row."""
        sources = np.zeros((len(steps), width), np.int64)
        rows = None
        begin = 0
        for number, step in enumerate(steps if len(self.sources[0]) > 1 else ()):
            if rows is None or step - begin >= len(rows):
                begin = step
                rows = ordered_rows(self.segments, step, _AT_A_TIME)
            if rows is not None:
                own = self.source_of(rows[step - begin, :width])
                sources[number, : len(own)] = own
        return sources

    def source_of(self, rows: Int64) -> Int64:
        """The number of each row's source."""
        return np.searchsorted(self.sources[1], rows, side="right")


@dataclass(frozen=True)
class Table:
    """The loss of a target of every row that was kept, [steps, places]; NaN where there is none, or it is not finite.

    Attributes:
        steps: [steps], ascending.
        counts: targets, [steps, places].
        sources: number of the row's source, [steps, places].
        broken: (step, place) of rows with a loss that is not finite.
        whole: [steps], whether the losses of all rows of a step were kept.
    """

    steps: Int64
    means: Float64
    counts: Int64
    sources: Int64
    broken: list[tuple[int, int]]
    whole: Bool

    @classmethod
    def of(cls, run: Lookback) -> Table:
        steps = np.array(run.kept.steps, np.int64)
        kept = [losses for step in steps.tolist() if (losses := run.kept.of(step)) is not None]
        width = max((len(each.sums) for each in kept), default=0)
        means = np.full((len(steps), width), np.nan)
        counts = np.zeros((len(steps), width), np.int64)
        sources = run.sources_of(steps.tolist(), width)
        for number, losses in enumerate(kept):
            own = slice(len(losses.sums))
            means[number, own], counts[number, own] = losses.means, losses.counts
        wrong = np.argwhere((counts > 0) & ~np.isfinite(means)).tolist()
        means[~np.isfinite(means)] = np.nan
        return cls(
            steps,
            means,
            counts,
            sources,
            [(int(steps[number]), place) for number, place in wrong],
            np.array([losses.whole for losses in kept], np.bool_),
        )

    def losses(self) -> tuple[Int64, Float64]:
        """(steps, the loss of each), without those of which rows were lost: the others' mean is no loss of the step."""
        counted = np.where(np.isnan(self.means), 0, self.counts).sum(1)
        with np.errstate(invalid="ignore"):  # 0 / 0, of a step without a target
            losses = np.nansum(self.means * self.counts, axis=1) / counted
        return self.steps[self.whole], losses[self.whole]

    def index(self, step: int) -> int | None:
        """The line of a step; None if nothing was kept of it."""
        at = int(np.searchsorted(self.steps, step))
        return at if at < len(self.steps) and self.steps[at] == step else None
