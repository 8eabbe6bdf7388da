"""The runs of a folder: found two folders deep, each with its state, its last step and a small picture of its loss.

A long file is not read as a whole for that: of one above 1 MB some blocks are, evenly spread, and its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from threefold.config.paths import JOURNAL, METRICS, is_run
from threefold.jsonl import Lines
from threefold.records.metrics import sampled_losses
from threefold.records.state import state_of
from threefold.report.headline import measured, section
from threefold.report.markup import Html, table, tag

_MOST_RUNS = 200
_END = 1 << 18
_WIDTH, _HEIGHT, _POINTS = 120, 28, 64


def runs_in(folder: Path) -> dict[str, Path]:
    """The runs of a folder by their paths in it, the newest first, and at most 200; itself as `.`, if it is one."""
    if is_run(folder):
        return {".": folder}
    found = [path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_dir() and is_run(path)]
    newest = sorted(found, key=_changed, reverse=True)[:_MOST_RUNS]
    return {path.relative_to(folder).as_posix(): path for path in newest}


def _changed(path: Path) -> float:
    try:
        return (path / METRICS).stat().st_mtime
    except OSError:
        return 0.0


def spark(latest: Mapping[int, float]) -> Html:
    """The loss over the steps as a small picture; gaps where it is not finite."""
    steps = sorted(latest)
    steps = steps[:: max(1, len(steps) // _POINTS)] + steps[-1:]
    finite = [latest[step] for step in steps if math.isfinite(latest[step])]
    if len(finite) < 2:
        return Html("-")
    low, high, first, last = min(finite), max(finite), steps[0], max(steps[-1], steps[0] + 1)
    pieces, is_open = [], False
    for step in steps:
        if not math.isfinite(latest[step]):
            is_open = False
            continue
        x = 1 + (_WIDTH - 2) * (step - first) / (last - first)
        y = 2 + (_HEIGHT - 4) * (1 - (latest[step] - low) / ((high - low) or 1.0))
        pieces.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}")
        is_open = True
    said = f"loss from {finite[0]:.4g} to {finite[-1]:.4g}"
    path = tag("path", d=" ".join(pieces))
    return tag(
        "svg", path, class_="spark", role="img", aria_label=said, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", width=_WIDTH,
        height=_HEIGHT,
    )  # fmt: skip


def listed(runs: Mapping[str, Path]) -> Html:
    """The table of the runs, each with a box to tick for comparing, and the button that does."""
    rows = []
    for key, path in runs.items():
        losses, last = sampled_losses(path / METRICS)
        events = [line.values for line in Lines(path / JOURNAL, most_bytes=_END).read()]
        state, why = state_of(path, [event for event in events if isinstance(event.get("event"), str)])
        tick = tag("input", type_="checkbox", name="run", value=key, aria_label=f"compare {key}")
        name = tag("a", key, href=f"run?{urlencode({'run': key})}")
        word = tag("span", state, class_=f"state {state}", title=why)
        cells = [f"{last['step']:,}" if last else "-", measured("loss", last.get("loss")) or "-", spark(losses)]
        rows.append((name, tick, word, *cells, measured("tokens_per_s", last.get("tokens_per_s")) or "-"))
    head = ("run", "compare", "state", "step", "loss", "curve", "tokens/s")
    if not rows:
        return section("list", "Runs", tag("p", "There is no run here yet: a run's folder has a metrics.jsonl."))
    button = tag("p", tag("button", "compare the ticked runs", type_="submit"))
    form = tag("form", table("The newest first", head, rows), button, action="run", method="get")
    return section("list", "Runs", form)
