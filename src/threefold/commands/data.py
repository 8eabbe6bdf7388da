"""`threefold data ...`: prepare a store, show rows, prove what a run has read, find out which rank read what and when.

The proof and the look-ups use the run's own record (audit.jsonl) and no torch. Texts and token contents come from the
source in the run's config.yaml, opened as the run opens it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from threefold import jsonl
from threefold.commands.arguments import CONTEXT, AsJson, WithKeys, load_config, split
from threefold.commands.help_examples import ending
from threefold.commands.run_argument import run_here, runs_here
from threefold.config.paths import is_run
from threefold.errors import ConfigError, ranks_text, shell_word

if TYPE_CHECKING:
    from threefold.audit.record import Segment
    from threefold.data.rows.concat import Rows

_SHOWN = 3  # rows, without --first

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Prepare data, and prove which rank read what and when.",
)

_Run = Annotated[str, typer.Argument(autocompletion=runs_here, help="A run's folder.")]


@app.command("prepare", cls=WithKeys, context_settings=CONTEXT, **ending("data prepare"))
def prepare(
    context: typer.Context,
    to: Annotated[
        str,
        typer.Option(
            help="The folder to create, or s3://BUCKET/PREFIX; the same command resumes an unfinished one."
        ),
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", "--num-workers", min=1, help="Processes; default: one per core."
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "slurm", "ray"],
        typer.Option(help="Where to make the parts: here, in a Slurm array, on a Ray cluster."),
    ] = "local",
    task: Annotated[
        str | None,
        typer.Option(
            help="I/N: make only the parts of task I of N; `join`: join those of all tasks."
        ),
    ] = None,
) -> None:
    """Make a memory-mapped token store (Megatron-LM's .bin and .idx) from the source that data.source names.

    With --engine slurm, `threefold submit slurm --help` has the settings of the jobs: --partition, --time, ...
    """
    from threefold.commands import preparation

    preparation.prepare(context.args, to=to, workers=workers, engine=engine, task=task)


@app.command("order", **ending("data order"))
def order(
    run: _Run,
    sample: Annotated[
        int | None, typer.Option(help="Show which ranks read this row, and when.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Show the rows that this step read.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Also print the rows' text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which steps and ranks read a row, or which rows a step read."""
    folder = run_here(run)
    if as_json and show:
        raise ConfigError(
            "--show has no effect with --json",
            expected="rows as numbers",
            fix="leave out --show",
        )
    if (sample is None) == (step is None):
        raise ConfigError(
            "--sample and --step are both given"
            if step is not None
            else "neither --sample nor --step is given",
            expected="exactly one of them: a row or a step",
            fix=f"threefold data order {shell_word(run)} --step 1",
        )
    from threefold.audit import record

    segments = record.read(folder / record.FILE)
    answer = (
        _of_sample(segments, sample)
        if sample is not None
        else _of_step(folder, segments, step or 0)
    )
    if as_json:
        return typer.echo(jsonl.as_json(answer.values))
    for line in answer.lines:
        typer.echo(line)
    if show:
        from threefold.commands.show_rows import texts_of_rows

        for line in texts_of_rows(folder, segments, answer.rows):
            typer.echo(line)


@app.command("overlap", cls=WithKeys, context_settings=CONTEXT, **ending("data overlap"))
def overlap(context: typer.Context, as_json: AsJson = False) -> None:
    """Find evaluation documents, and 64-token spans of them, that are trained on, and name them all."""
    from threefold.commands.show_rows import sides_of
    from threefold.progress_bars import Bars
    from threefold.run.assemble import overlaps_of

    config = load_config(context.args).config
    if not config.evaluates:
        raise ConfigError(
            "nothing is held out to evaluate on",
            expected="evaluation data to look for in the training data",
            fix="--eval.source FILE_OR_FOLDER   (or --data.eval_share 0.01)",
        )
    with Bars().show("reading the training") as bar:
        overlaps = overlaps_of(
            *sides_of(config), progress=lambda done, total: bar.at(done, total=total)
        )
    if as_json:
        for each in overlaps:
            typer.echo(jsonl.as_json(each.to_values()))
    else:
        for line in (line for each in overlaps for line in each.lines()):
            typer.echo(line)
    raise typer.Exit(any(each.exact or each.alike for each in overlaps))


@app.command("audit", **ending("data audit"))
def audit(
    run: _Run,
    contents: Annotated[
        bool,
        typer.Option(
            "--contents", help="Also reread every token of the source and compare it."
        ),
    ] = False,
    rows: Annotated[
        bool,
        typer.Option(
            "--rows",
            help="Also list each document: its tokens, and those trained on after packing.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that every sample was read exactly once per epoch, across all restarts and meshes of a run.

    For a folder made by `threefold data prepare`: that each document of its source is in exactly one part.
    """
    from threefold.data.store.prepare import STORE_NAME

    folder = run_here(run)
    store = folder / STORE_NAME
    is_store = store.with_suffix(".parts").exists()
    if rows and (as_json or is_store):
        raise ConfigError(
            f"--rows has no effect {'on a token store' if is_store else 'with --json'}",
            expected="the proof as numbers",
            fix="leave out --rows",
        )
    if is_store:
        from threefold.data.store.parts_proof import prove

        proof = prove(store, read=contents)
        return typer.echo(
            jsonl.as_json({"run": run, "proved": proof, "epochs": []}) if as_json else proof
        )
    lines = audit_lines(folder, contents=contents)
    if as_json:
        from threefold.audit import record
        from threefold.audit.lookup import coverage
        from threefold.audit.proof import stretches_of

        *_, proved = lines
        epochs = [
            asdict(epoch) for epoch in coverage(stretches_of(record.read(folder / record.FILE)))
        ]
        return typer.echo(jsonl.as_json({"run": run, "proved": proved, "epochs": epochs}))
    for line in lines:
        typer.echo(line)
    if rows:
        from threefold.commands.show_rows import ledger_lines

        for line in ledger_lines(folder):
            typer.echo(line)


@app.command("show", cls=WithKeys, context_settings=CONTEXT, **ending("data show"))
def show(
    context: typer.Context,
    row: Annotated[
        int | None, typer.Option(min=0, help="Only this row, or document of the source.")
    ] = None,
    first: Annotated[
        int | None,
        typer.Option(min=1, help=f"The first N rows; default: {_SHOWN}, with --json all."),
    ] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Also print token ids; those trained on in brackets.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per row.")
    ] = False,
) -> None:
    """Show rows as text, with what is trained on in [[ ]] or colour: of data.source, or the packed rows of a RUN.

    Documents of a source are numbered as they are in it, before they are packed; rows of a run as in its audit. A token
    is trained on if it is the label of the token before it.
    """
    from threefold.commands import show_rows
    from threefold.commands.preparation import refuse_flags, source_of

    refuse_flags(context.args, "show")
    path, keys = split(context.args)
    run = path if path is not None and Path(path).suffix not in (".yaml", ".yml") else None
    if run is not None:
        is_source = "data.source" not in dict(keys) and Path(run).exists()
        is_source &= not is_run(Path(run))
        if is_source or keys:
            others = [each for each in context.args if each != run]
            source = shlex.join(["--data.source", run, *others])
            raise ConfigError(
                f"{run} is no run" if is_source else f"{run} and --{keys[0][0]} are both given",
                expected="a run, which has its own source, or a source",
                fix=f"threefold data show {source}" if is_source else f"leave out {run}",
            )
        rows, named = show_rows.run_rows(run_here(run), row)
    else:
        rows, named = show_rows.rows_of_source(*source_of(context.args, "show"), row)
    if as_json:
        lines = show_rows.json_lines(islice(rows, first))
    else:
        lines = show_rows.text_lines(
            rows, named, show=first or _SHOWN, ids=ids, count=row is None
        )
    printed = False
    for line in lines:
        typer.echo(line)
        printed = True
    if not printed:
        raise ConfigError(
            f"there is no row {row or 0}",
            expected="a row of the source or of the run, counted from 0",
            fix="a smaller --row, or a source with text",
        )


def audit_lines(run: Path, *, contents: bool = False) -> Iterator[str]:
    """The proof of what a run has read, as lines; RunError names the first wrong step."""
    from threefold.report.verdict import proof_lines

    def rows_of(run: Path, segments: Sequence[Segment]) -> Rows:
        from threefold.commands.show_rows import rows_of_run

        return rows_of_run(run, segments)[0]

    yield from proof_lines(run, rows_of if contents else None)


class _Answer(NamedTuple):
    """What a record has of a row or a step: for programs, in lines, and which rows these are."""

    values: dict[str, Any]
    lines: list[str]
    rows: list[int]


def _of_sample(segments: Sequence[Segment], sample: int) -> _Answer:
    """Which steps and ranks have read a row; for programs step 0 is one that was left out, null one not read."""
    from threefold.audit.lookup import find_sample
    from threefold.audit.proof import stretches_of

    num_rows = segments[0].start.num_rows
    if not 0 <= sample < num_rows:
        raise ConfigError(
            f"--sample {sample} is not a row of the source",
            expected=f"a row from 0 to {num_rows - 1}",
            fix=f"--sample {num_rows - 1}",
        )
    stretches = stretches_of(segments)
    reads = find_sample(stretches, sample) if stretches else []
    values = [
        {
            "epoch": read.epoch,
            "position": read.position,
            "step": read.step,
            "ranks": read.ranks if read.step else [],
        }
        for read in reads
    ]
    lines = [f"row {sample}: {read}" for read in reads] or [f"row {sample}: not read yet"]
    return _Answer({"row": sample, "read": values}, lines, [sample])


def _of_step(run: Path, segments: Sequence[Segment], step: int) -> _Answer:
    """Which rows a step has read, by dp rank; those below 0 are padding."""
    from threefold.audit.lookup import find_step
    from threefold.report.verdict import first_and_last_step

    read = find_step(segments, step)
    if read is None:
        audited = [line for segment in segments for line in segment.steps]
        first, last = first_and_last_step(segments) if audited else (0, 0)
        raise ConfigError(
            f"--step {step} is not in the record of {run}",
            expected=f"a step from {first} to {last}"
            if audited
            else "a run with an audited step",
            fix=f"--step {last}" if audited else "wait for the first audit (audit.every steps)",
        )
    topology = read.topology
    rows = [
        [int(row) for row in read.rows[dp_rank :: topology.dp] if row >= 0]
        for dp_rank in range(topology.dp)
    ]
    where = ", ".join(
        f"epoch {epoch}, positions from {position:,} on" for epoch, position in read.places
    )
    lines, size = [f"step {step:,}: {where}, {topology}"], topology.cp * topology.tp
    for dp_rank, own in enumerate(rows):
        ranks = ranks_text(range(dp_rank * size, (dp_rank + 1) * size))
        lines.append(f"  dp rank {dp_rank} ({ranks}): rows {', '.join(map(str, own))}")
    values = {"step": step, "mesh": str(topology), "rows": rows}
    return _Answer(values, lines, [int(row) for row in read.rows if row >= 0])
