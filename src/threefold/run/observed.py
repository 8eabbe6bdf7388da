"""What looks on while a run trains: metrics, the terminal, trackers and hooks; losses of rows; times of phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from threefold.audit.compare import Audit
from threefold.data.loader import Batch
from threefold.jsonl import MetricsFile, Tracker
from threefold.run import assemble
from threefold.run.assemble import Built
from threefold.run.hooks import Hooks
from threefold.run.terminal import Screen, Terminal
from threefold.training.kept_rows import KeptRows, count_pairs
from threefold.training.timeline import Timeline


def trackers_on(console: Screen, run: Built, hooks: Hooks) -> list[Tracker]:
    """All that get the metrics, on rank 0."""
    if run.mesh.rank != 0:
        return []
    go_on = run.config.checkpoint.on_error == "continue"
    terminal = Terminal(console, num_steps=run.num_steps, done=run.done)
    return [
        MetricsFile(run.folder.metrics, continue_on_error=go_on, timed=True),
        terminal,
        *assemble.trackers_of(run, say=console.print),
        hooks,
    ]


def kept_rows_of(run: Built, audit: Audit) -> KeptRows | None:
    """Keeps the rows' losses on the first rank of each tp group, if they are asked for and known."""
    asked, mesh = run.config.audit, run.mesh
    if not (asked.rows and asked.every) or mesh.tp_rank or run.given.loss is not None:
        return None
    count = count_pairs if run.pairs is not None else None
    spread = run.config.train.reduce == "exact"
    return KeptRows(run.folder.path, mesh, segment=audit.start.segment, count=count, spread=spread)


def timeline_of(run: Built) -> Timeline | None:
    """Notes the times of the phases, if log.timeline asks for it."""
    if (timed := run.config.log.timeline) is None:
        return None
    make_event = partial(torch.cuda.Event, enable_timing=True) if run.mesh.device.type == "cuda" else None
    return Timeline(run.folder.path, run.mesh.rank, timed, make_event)


def shown_evaluation(console: Screen, run: Built) -> Callable[[], Iterable[Batch]] | None:
    """Makes the held-out batches again, with a bar of how many are evaluated; None without an evaluation."""
    make = assemble.held_out_of(run)
    if make is None or run.held_out is None:
        return make
    total = -(-run.held_out.num_rows // (run.micro_batch * run.mesh.dp_size))
    return lambda: console.bars.track(make(), "evaluation", total)
