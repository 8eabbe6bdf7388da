"""Anomalies as lines for a terminal or one JSON object. Text from the data cannot control a terminal."""

from collections.abc import Iterator
from typing import Any

from threefold.errors import shell_word, visible
from threefold.why.batch_rows import BatchRow, StepBatches
from threefold.why.findings import Anomaly, findings, row_text, telling

# Findings without a step, and rows of a step, that are printed.
MOST, MOST_ROWS = 5, 8


def run_lines(batches: StepBatches) -> Iterator[str]:
    """The most telling of a run."""
    run = batches.run
    first, last = batches.known
    kept = (
        f"the rows' losses of {len(run.kept.steps):,} of them"
        if run.kept.steps
        else "without losses of rows"
    )
    yield f"{run.run}: steps {first:,} to {last:,}, {kept}"
    anomalies = findings(batches)
    if not anomalies:
        yield "nothing unusual"
    for finding in anomalies[:MOST]:
        yield from _finding(finding)
    if len(anomalies) > MOST:
        yield f"and {len(anomalies) - MOST:,} less important ones: threefold why {shell_word(run.run)} --json"
    yield from _ending(batches)


def step_lines(batches: StepBatches, step: int) -> Iterator[str]:
    """What concerns a step, and its rows, the most telling first."""
    rows = telling(batches.rows_of(step))
    yield f"{batches.run.run}: step {step:,}, {len(rows):,} rows{_numbers(batches, step)}"
    anomalies = findings(batches, step=step)
    if not anomalies:
        yield "nothing unusual"
    for finding in anomalies:
        finding.rows = []  # below, with all others
        yield from _finding(finding)
    yield (
        "rows, the largest outliers first:"
        if any(row.like is not None for row in rows)
        else "rows:"
    )
    for row in rows[:MOST_ROWS]:
        yield from _row(row)
    if len(rows) > MOST_ROWS:
        yield f"  and {len(rows) - MOST_ROWS:,} more: threefold why {shell_word(batches.run.run)} --step {step} --json"
    yield from _ending(batches)


def values(batches: StepBatches, step: int | None) -> dict[str, Any]:
    """The same, complete, ready for JSON; `rows` of one step, the most telling first."""
    first, last = batches.known
    fields: dict[str, Any] = {"run": str(batches.run.run), "steps": [first, last], "step": step}
    fields["findings"] = [each.to_values() for each in findings(batches, step=step)]
    if step is not None:
        fields["rows"] = [row.to_values() for row in telling(batches.rows_of(step))]
    return {**fields, "damaged": batches.run.damaged, "missing": batches.contents.missing}


def _numbers(batches: StepBatches, step: int) -> str:
    run = batches.run
    loss = dict(zip(*run.table.losses(), strict=True)).get(step, run.number(step, "loss"))
    norm = run.number(step, "grad_norm")
    return (f", loss {loss:.4f}" if loss is not None else "") + (
        f", grad norm {norm:.3g}" if norm is not None else ""
    )


def _finding(finding: Anomaly) -> Iterator[str]:
    steps = finding.steps
    where = (
        f"step {steps[0]:,}"
        if len(steps) == 1
        else f"steps {', '.join(f'{each:,}' for each in steps[:6])}"
    )
    where += ", ..." if len(steps) > 6 else ""
    yield f"{where + ': ' if steps else ''}{visible(finding.what)}"
    yield from (f"  {visible(fact)}" for fact in finding.facts)
    for row in finding.rows:
        yield from _row(row)


def _row(row: BatchRow) -> Iterator[str]:
    documents = row.documents
    named = f"documents {documents[0]:,} to {documents[-1]:,}" if len(documents) > 3 else ""
    named = (
        named
        or f"document{'s' * (len(documents) > 1)} {', '.join(f'{each:,}' for each in documents)}"
    )
    if files := row.files:
        named += f" of {', '.join(files[:3])}" + (", ..." if len(files) > 3 else "")
    yield f"  {visible(row_text(row))}" + (f" ({visible(named)})" if documents else "")
    if text := row.text:
        yield from (f"    | {line}" for line in visible(text).splitlines()[:6])


def _ending(batches: StepBatches) -> Iterator[str]:
    if batches.contents.missing is not None:
        yield f"rows without documents and text: {visible(batches.contents.missing)}"
    yield from (f"damaged: {visible(each)}" for each in batches.run.damaged)
