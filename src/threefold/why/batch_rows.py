"""The rows of a step, each with its loss, that of comparable rows, source, documents and, on demand, its text."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from threefold.arrays import Float64
from threefold.errors import ConfigError, shell_word
from threefold.why.contents import Contents
from threefold.why.lookback import Lookback
from threefold.why.scores import scores_of_rows

# Steps on each side that a row's like are taken from.
_NEAR = 60


@dataclass(frozen=True)
class BatchRow:
    """A row that a step read.

    Attributes:
        place: in the step, from 0; the dp rank is place % dp.
        row: its number among all rows; None if the order is not known.
        loss: of a target; None if it was not kept, NaN if it was not finite.
        targets: tokens that count; of pairs of answers, pairs.
        like: what rows of its source have around this step.
        score: how far it is from that, in robust standard deviations.
    """

    step: int
    place: int
    row: int | None
    source: str
    loss: float | None
    targets: int
    like: float | None
    score: float
    _contents: Contents = field(repr=False, compare=False)

    @property
    def documents(self) -> list[int]:
        """Numbers of its documents in its source's store; [] if they are not known."""
        return [] if self.row is None else self._contents.documents(self.row)

    @property
    def files(self) -> list[str]:
        """The files of its documents; [] if they are not known."""
        return [] if self.row is None else self._contents.files(self.row)

    @property
    def text(self) -> str | None:
        """The beginning of its text, as it is in the data: to be escaped where it is shown."""
        return None if self.row is None else self._contents.text(self.row)

    def to_values(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        names = (
            "place",
            "row",
            "source",
            "loss",
            "targets",
            "like",
            "score",
            "documents",
            "files",
            "text",
        )
        values = {name: getattr(self, name) for name in names}
        return {name: _finite(value) for name, value in values.items()}


class StepBatches:
    """The rows of any step of a run; data read for one step is kept for the next."""

    def __init__(self, run: Lookback) -> None:
        self.run = run
        self.contents = Contents(run.run, run.segments)
        self._known: dict[int, list[BatchRow]] = {}

    def rows_of(self, step: int) -> list[BatchRow]:
        """The rows of a step, in their order.

        Raises:
            ConfigError: nothing is known about the step.
        """
        if step not in self._known:
            self._known[step] = self._found(step)
        return self._known[step]

    def _found(self, step: int) -> list[BatchRow]:
        run, table = self.run, self.run.table
        at = table.index(step)
        rows = run.rows_of(step) if 0 < step <= run.last_step else None
        if at is None and rows is None:
            first, last = self.known
            raise ConfigError(
                f"step {step} of {run.run} has no record",
                expected=f"a step from {first} to {last}",
                fix=f"threefold why {shell_word(run.run)} --step {min(max(step, first), last)}",
            )
        if at is None:
            assert rows is not None
            nothing, none = np.full(len(rows), np.nan), np.zeros(len(rows))
            return self._rows(step, rows.tolist(), nothing, none, nothing, none)
        near = slice(max(0, at - _NEAR), at + _NEAR + 1)
        scores, like = scores_of_rows(
            table.means[near], table.counts[near], table.sources[near]
        )
        here = at - near.start
        width = len(run.kept.of(step).sums)  # type: ignore[union-attr]
        numbers = [None] * width if rows is None else rows.tolist()[:width]
        return self._rows(
            step, numbers, table.means[at], table.counts[at], like[here], scores[here]
        )

    @property
    def known(self) -> tuple[int, int]:
        """The first and the last step of which something is known."""
        steps = [*self.run.kept.steps, *self.run.logged]
        return min(steps), max(steps)

    def _rows(
        self,
        step: int,
        rows: list[Any],
        means: Float64,
        counts: Any,
        like: Float64,
        scores: Float64,
    ) -> list[BatchRow]:
        names = self.run.sources[0]
        broken = {place for number, place in self.run.table.broken if number == step}
        batch = []
        for place, row in enumerate(rows):
            if row is not None and row < 0:
                continue  # a place that holds no row
            source = (
                names[int(self.run.source_of(np.array([row]))[0])]
                if row is not None
                else "source"
            )
            loss = float("nan") if place in broken else _number(means[place])
            values = (loss, int(counts[place]), _number(like[place]), float(scores[place]))
            batch.append(BatchRow(step, place, row, source, *values, self.contents))
        return batch


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
