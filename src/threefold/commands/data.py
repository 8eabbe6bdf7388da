"""`threefold data ...`: prepare a store, prove what a run has read, say who read what and when.

The proof and the look-ups use the run's own record (audit.jsonl) and no torch. Texts and token contents are read from
the source that the run's config.yaml names, opened as the run opens it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from threefold.audit import record
from threefold.audit.lookup import SampleRead, coverage, find_sample, find_step, turns
from threefold.audit.proof import Stretch, prove, stretches_of
from threefold.audit.record import Line, Segment, SegmentLine, StepsLine
from threefold.checkpoint.layout import CheckpointFolder
from threefold.config import loading
from threefold.config.schema import Config
from threefold.data.order import Order, Place
from threefold.data.rows.concat import PADDING, Rows
from threefold.data.store.prepare import PrepareProgress, prepare
from threefold.data.text.source import Source, open_text
from threefold.data.tokens import Tokenizer, load_tokenizer
from threefold.errors import ConfigError, RunError, ranks_text, rows_text


def prepare_store(source: Source, tokenizer: str, to: Path, *, num_workers: int | None = None) -> Iterator[str]:
    """Makes the token store of a source in a folder; yields what there is to tell."""
    text = open_text(source)
    with _Bar(text.name) as bar:
        made = prepare(
            text,
            load_tokenizer(tokenizer),
            to=to,
            skip_bad=source.skip_bad_lines,
            num_workers=num_workers,
            progress=bar.show,
        )
    info = made.info
    how = "is there already" if made.reused else "is made"
    yield f"{made.prefix}.bin {how}: {info.num_tokens:,} tokens in {info.num_documents:,} documents ({info.tokenizer})"
    if info.num_skipped:
        yield f"  {info.num_skipped:,} lines, rows or files could not be read and were skipped"
    yield f"use it: threefold train --data.source {to} --data.tokenizer {tokenizer}"


class _Bar:
    """Progress over the bytes of a source: a live bar on a terminal, else a line at each tenth."""

    def __init__(self, name: str) -> None:
        self._console = Console(stderr=True, soft_wrap=True)
        columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(
            TextColumn("{task.description}"),
            *columns,
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(f"preparing {name}", total=None)
        self._tenth = 0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, progress: PrepareProgress) -> None:
        """Moves to where the making has come."""
        self._bar.update(self._task, total=progress.total_bytes, completed=progress.done_bytes)
        tenth = 10 * progress.done_bytes // max(1, progress.total_bytes)
        if not self._console.is_terminal and tenth > self._tenth:
            self._tenth = tenth
            line = f"{tenth * 10} %: {progress.num_documents:,} documents, {progress.num_tokens:,} tokens"
            self._console.print(line, highlight=False, markup=False)


def audit(run: Path, *, contents: bool = False) -> Iterator[str]:
    """Proves what a run has read; yields what is proved.

    Args:
        contents: read every token again and compare it with what the run has read.

    Raises:
        RunError: the first step that offends.
    """
    lines = record.read_lines(run / record.FILE)
    segments = record.standing(lines)
    stretches = prove(segments, _rows_of_run(run, segments)[0] if contents else None)
    _check_checkpoints(run, lines)
    if not any(stretch.first_step for stretch in stretches):
        raise RunError(
            f"{run} has no audited step yet",
            expected="at least one line of kind steps in audit.jsonl",
            fix="wait for the first audit (audit.every steps), or run it with audit.every > 0",
        )
    first, last = _first_and_last_step(segments)
    starts = "1 start" if len(segments) == 1 else f"{len(segments)} starts"
    yield f"{run}: steps {first:,} to {last:,}, {starts}"
    for segment in segments:
        end = segment.last_step or last
        if end >= segment.start.first_step:
            yield f"  steps {segment.start.first_step:,} to {end:,} on {segment.start.topology}"
    yield from _coverage_lines(stretches)
    num_read = sum(stretch.stop - stretch.start for stretch in stretches if stretch.first_step)
    what = "samples and tokens" if contents else "samples (tokens were compared during the run; --contents reads again)"
    if not segments[-1].start.data:
        what = "samples (of a Trainer's dataset, whose contents have no fingerprint)"
    yield f"proved: {num_read:,} reads, each by exactly one dp rank in exactly one step: {what}"


def _coverage_lines(stretches: Sequence[Stretch]) -> Iterator[str]:
    if stretches[0].segment.mixture is not None:
        for name, size, read in turns(stretches):
            yield f"  {name}: {read:,} reads of {size:,} rows ({read / size:.2f} epochs of its own)"
    else:
        for epoch in coverage(stretches):
            first = stretches[0]
            begun = epoch.epoch != first.epoch or first.start == 0
            why = "they fill no batch at the end" if begun else "read before this record, or in no batch at the end"
            line = f"  epoch {epoch.epoch}: {epoch.read:,} of {epoch.num_rows:,} rows, each exactly once"
            if not epoch.finished:
                yield f"{line}; {epoch.unread:,} not yet" if epoch.unread else line
            elif epoch.unread:
                more = ", ..." if epoch.unread > len(epoch.named) else ""
                named = ", ".join(map(str, epoch.named)) + more
                yield f"{line}; {epoch.unread:,} not: {why} (rows {named})"
            else:
                yield line
    for stretch in stretches:
        if not stretch.first_step:
            rows = stretch.segment.order.rows_at(stretch.epoch, np.arange(stretch.start, stretch.stop))
            yield (
                f"  left out by data.skip: positions {stretch.start:,} to {stretch.stop - 1:,} of epoch "
                f"{stretch.epoch} ({rows_text(rows)})"
            )


def _first_and_last_step(segments: Sequence[Segment]) -> tuple[int, int]:
    lasts = [line.first + segment.stands(line) - 1 for segment in segments for line in segment.steps]
    return segments[0].start.first_step, max(lasts)


def _check_checkpoints(run: Path, lines: Sequence[Line]) -> None:
    """Each checkpoint that is there was saved where the record says that its step ended.

    A checkpoint of steps that were read again since stays until it is pruned, so any reading of its step counts.
    """
    first_step = lines[0].first_step if isinstance(lines[0], SegmentLine) else 1
    for checkpoint in CheckpointFolder(run).complete():
        data = checkpoint.manifest()["data"]
        saved = Place(data["epoch"], data["position"])
        readings = _places_after(lines, checkpoint.step)
        if checkpoint.step < first_step or saved in readings:
            continue
        if not readings:
            raise RunError(
                f"step {checkpoint.step} has no record, but {checkpoint.path} was saved after it",
                expected="every step that was saved in audit.jsonl",
                fix="restore the file where lines were lost; what was not recorded cannot be proved",
            )
        raise RunError(
            f"{checkpoint.path} was saved at position {saved.position} of epoch {saved.epoch}, but by audit.jsonl step "
            f"{checkpoint.step} ended at position {readings[-1].position} of epoch {readings[-1].epoch}",
            expected="one place after each step",
            fix="restore the file that was changed",
        )


def _places_after(lines: Sequence[Line], step: int) -> list[Place]:
    found: list[Place] = []
    order: Order | None = None
    for line in lines:
        if isinstance(line, SegmentLine):
            order = line.order
        elif isinstance(line, StepsLine) and line.first <= step <= line.last:
            assert order is not None
            found.append(order.after(line.place, step - line.first + 1))
    return found


def order_of_sample(run: Path, sample: int, *, show: bool = False) -> Iterator[str]:
    """Which steps and ranks have read a row."""
    segments = record.read(run / record.FILE)
    num_rows = segments[0].start.num_rows
    if not 0 <= sample < num_rows:
        raise ConfigError(
            f"--sample {sample} is no row of the source",
            expected=f"a row from 0 to {num_rows - 1}",
            fix=f"--sample {num_rows - 1}",
        )
    stretches = stretches_of(segments)
    found = find_sample(stretches, sample) if stretches else []
    yield from (f"row {sample}: {_what_became_of(read)}" for read in found)
    if not found:
        yield f"row {sample}: not read yet"
    if show:
        yield from _texts(run, segments, [sample])


def _what_became_of(read: SampleRead) -> str:
    where = f"epoch {read.epoch}, position {read.position:,}"
    if read.step is None:
        return f"not read in epoch {read.epoch} (it has position {read.position:,})"
    if read.step == 0:
        return f"left out by data.skip ({where})"
    return f"step {read.step:,} ({where}), dp rank {read.dp_rank}: {ranks_text(read.ranks)}"


def order_of_step(run: Path, step: int, *, show: bool = False) -> Iterator[str]:
    """Which rows a step has read, by dp rank."""
    segments = record.read(run / record.FILE)
    read = find_step(segments, step)
    if read is None:
        known = [line for segment in segments for line in segment.steps]
        first, last = _first_and_last_step(segments) if known else (0, 0)
        raise ConfigError(
            f"--step {step} is not in the record of {run}",
            expected=f"a step from {first} to {last}" if known else "a run with an audited step",
            fix=f"--step {last}" if known else "wait for the first audit (audit.every steps)",
        )
    topology = read.topology
    yield f"step {step:,}: epoch {read.place.epoch}, positions from {read.place.position:,} on, {topology}"
    size = topology.cp * topology.tp
    for dp_rank in range(topology.dp):
        ranks = ranks_text(range(dp_rank * size, (dp_rank + 1) * size))
        rows = [int(row) for row in read.rows[dp_rank :: topology.dp] if row >= 0]
        yield f"  dp rank {dp_rank} ({ranks}): rows {', '.join(map(str, rows))}"
    if show:
        yield from _texts(run, segments, [int(row) for row in read.rows if row >= 0])


def _texts(run: Path, segments: Sequence[Segment], indices: Sequence[int]) -> Iterator[str]:
    rows, tokenizer = _rows_of_run(run, segments)
    for index in indices:
        row = rows.rows(np.array([index], np.int64))
        tokens = row["input_ids"][0][row["document_ids"][0] != PADDING]
        yield f"row {index}:"
        yield from (f"  | {line}" for line in tokenizer.decode(tokens.tolist()).splitlines())


def _rows_of_run(run: Path, segments: Sequence[Segment]) -> tuple[Rows, Tokenizer]:
    """The rows that a run reads and their tokenizer.

    Raises:
        RunError: the source is not what the run has read.
    """
    # Opening a run's data is the rank's; it brings torch.
    import torch

    from threefold.mesh.mesh import Mesh
    from threefold.mesh.topology import Topology
    from threefold.run import assemble

    config = _config_of(run)
    tokenizer = assemble.tokenizer_of(config)
    rows = assemble.rows_of(config, tokenizer, Mesh(Topology(), 0, torch.device("cpu")))
    recorded = segments[-1].start.data
    if rows.fingerprint != recorded:
        raise RunError(
            f"the source of {run}/config.yaml has the fingerprint {rows.fingerprint}, the run has read {recorded}",
            expected="the source as it was: its rows have other tokens now, or other numbers",
            fix="restore the source, or run this command in the folder in which the run was started",
        )
    return rows, tokenizer


def _config_of(run: Path) -> Config:
    return loading.load(str(run / "config.yaml"), environ={}).config
