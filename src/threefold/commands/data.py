"""`threefold data ...`: prepare a store, show rows, prove what a run has read, find out which rank read what and when.

The proof and the look-ups use the run's own record (audit.jsonl) and no torch. Texts and token contents come from the
source in the run's config.yaml, opened as the run opens it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from threefold.commands import show
from threefold.commands.endings import ending
from threefold.commands.source import SOURCE_HELP, own_flags, source_of, with_source_options
from threefold.errors import ConfigError, ranks_text

if TYPE_CHECKING:
    from threefold.audit.record import Segment
    from threefold.data.rows.concat import Rows
    from threefold.data.store.prepare import PrepareProgress

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Prepare data, and prove which rank read what and when."
)

_Run = Annotated[Path, typer.Argument(help="A run's folder.")]


@app.command("prepare", **ending("data prepare"))
@with_source_options
def prepare(
    source: Annotated[list[str], typer.Option(help=SOURCE_HELP)],
    tokenizer: Annotated[str, typer.Option(help="`bytes`, a Hub id or a folder.")],
    to: Annotated[Path, typer.Option(help="The folder to make; the same command resumes an unfinished one.")],
    workers: Annotated[
        int | None, typer.Option("--workers", "--num-workers", min=1, help="Processes; default: one per core.")
    ] = None,
    **given: Any,
) -> None:
    """Make a memory-mapped token store (Megatron-LM's .bin and .idx) from a text source, or from conversations."""
    from threefold.commands.documents import warn_of_no_end
    from threefold.data.conversations.labeller import labeller_for
    from threefold.data.store import prepare as stores
    from threefold.data.store.resolve import files_of, open_text
    from threefold.data.text.listing import summary, write_list
    from threefold.data.tokens import for_texts, load_tokenizer

    with own_flags():
        asked, encoder = source_of({"source": source, **given}), load_tokenizer(tokenizer)
        own = for_texts(encoder, bos=asked.labels.bos, control_tokens=asked.labels.control_tokens)
        text, lists = open_text(asked, labeller_for(asked, encoder)), files_of(asked)
    if lists:
        typer.echo(summary(lists), err=True)
    with own_flags(), _bar(text.name) as shown:
        made = stores.prepare(text, own, to=to, skip_bad=given["skip_bad_lines"], num_workers=workers, progress=shown)
    info = made.info
    how = "is there already" if made.reused else "is made"
    typer.echo(f"{made.prefix}.bin {how}: {info.num_tokens:,} tokens in {info.counted} ({info.tokenizer})")
    if info.labels is not None:
        typer.echo(f"  {info.learnt}")
        warn_of_no_end(info.labels, asked.labels.chat_template or encoder.name)
    if info.num_skipped:
        typer.echo(f"  {info.num_skipped:,} lines, rows or files could not be read and were skipped")
    if lists:
        typer.echo(f"the files are {write_list(lists, to)}", err=True)
    objective = "--train.objective dpo " if info.pairs else ""
    typer.echo(f"use it: threefold train {objective}--data.source {to} --data.tokenizer {tokenizer}")


@app.command("order", **ending("data order"))
def order(
    run: _Run,
    sample: Annotated[int | None, typer.Option(help="Show which ranks have read this row, and when.")] = None,
    step: Annotated[int | None, typer.Option(help="Show the rows that this step has read.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Also print the rows' text.")] = False,
) -> None:
    """Show which steps and ranks have read a row, or which rows a step has read."""
    from threefold.report.opened import check_files

    check_files(run)
    if sample is not None and step is None:
        lines = sample_lines(run, sample, show=show)
    elif step is not None and sample is None:
        lines = step_lines(run, step, show=show)
    else:
        what = "--sample and --step are both given" if step is not None else "neither --sample nor --step is given"
        fix = f"threefold data order {run} --step 1"
        raise ConfigError(what, expected="exactly one of them: a row or a step", fix=fix)
    for line in lines:
        typer.echo(line)


@app.command("audit", **ending("data audit"))
def audit(
    run: _Run,
    contents: Annotated[
        bool, typer.Option("--contents", help="Also read every token of the source again and compare it.")
    ] = False,
) -> None:
    """Prove that every sample was read exactly once an epoch, over all restarts and meshes of a run."""
    from threefold.report.opened import check_files

    check_files(run)
    for line in audit_lines(run, contents=contents):
        typer.echo(line)


app.command("show", **ending("data show"))(show.command)


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[PrepareProgress], None]]:
    """Progress over the bytes of a source: a live bar on a terminal, else a line at each tenth."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TaskProgressColumn())
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    bar = progress.Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal)
    task, shown = bar.add_task(f"preparing {name}", total=None), 0

    def show(made: PrepareProgress) -> None:
        nonlocal shown
        bar.update(task, total=made.total_bytes, completed=made.done_bytes)
        tenth = 10 * made.done_bytes // max(1, made.total_bytes)
        if not console.is_terminal and tenth > shown:
            shown = tenth
            line = f"{tenth * 10} %: {made.num_documents:,} documents, {made.num_tokens:,} tokens"
            console.print(line, highlight=False, markup=False)

    with bar:
        yield show


def audit_lines(run: Path, *, contents: bool = False) -> Iterator[str]:
    """The proof of what a run has read, as lines; RunError names the first wrong step."""
    from threefold.report.verdict import proof_lines

    def rows_of(run: Path, segments: Sequence[Segment]) -> Rows:
        from threefold.commands.documents import rows_of_run

        return rows_of_run(run, segments)[0]

    yield from proof_lines(run, rows_of if contents else None)


def sample_lines(run: Path, sample: int, *, show: bool = False) -> Iterator[str]:
    """Which steps and ranks have read a row."""
    from threefold.audit import record
    from threefold.audit.lookup import find_sample
    from threefold.audit.proof import stretches_of

    segments = record.read(run / record.FILE)
    num_rows = segments[0].start.num_rows
    if not 0 <= sample < num_rows:
        what = f"--sample {sample} is not a row of the source"
        raise ConfigError(what, expected=f"a row from 0 to {num_rows - 1}", fix=f"--sample {num_rows - 1}")
    stretches = stretches_of(segments)
    found = find_sample(stretches, sample) if stretches else []
    yield from (f"row {sample}: {read}" for read in found)
    if not found:
        yield f"row {sample}: not read yet"
    if show:
        from threefold.commands.documents import texts_of_rows

        yield from texts_of_rows(run, segments, [sample])


def step_lines(run: Path, step: int, *, show: bool = False) -> Iterator[str]:
    """Which rows a step has read, by dp rank."""
    from threefold.audit import record
    from threefold.audit.lookup import find_step
    from threefold.report.verdict import first_and_last_step

    segments = record.read(run / record.FILE)
    read = find_step(segments, step)
    if read is None:
        known = [line for segment in segments for line in segment.steps]
        first, last = first_and_last_step(segments) if known else (0, 0)
        what = f"--step {step} is not in the record of {run}"
        expected = f"a step from {first} to {last}" if known else "a run with an audited step"
        fix = f"--step {last}" if known else "wait for the first audit (audit.every steps)"
        raise ConfigError(what, expected=expected, fix=fix)
    topology = read.topology
    where = ", ".join(f"epoch {epoch}, positions from {position:,} on" for epoch, position in read.places)
    yield f"step {step:,}: {where}, {topology}"
    size = topology.cp * topology.tp
    for dp_rank in range(topology.dp):
        ranks = ranks_text(range(dp_rank * size, (dp_rank + 1) * size))
        rows = [int(row) for row in read.rows[dp_rank :: topology.dp] if row >= 0]
        yield f"  dp rank {dp_rank} ({ranks}): rows {', '.join(map(str, rows))}"
    if show:
        from threefold.commands.documents import texts_of_rows

        yield from texts_of_rows(run, segments, [int(row) for row in read.rows if row >= 0])
