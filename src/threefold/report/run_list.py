"""The runs of a folder: found two folders deep, each with its state, its last step and a small picture of its loss.

A long file is not read as a whole for that: of one above 1 MB some blocks are, evenly spread, and its end.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from threefold.checkpoint.lineage import JOURNAL
from threefold.report.gathered import is_run
from threefold.report.headline import measured, section
from threefold.report.markup import Html, table, tag
from threefold.report.opened import opened
from threefold.report.standing import METRICS, state_of

_MOST_RUNS = 200
_WHOLE, _BLOCKS, _BLOCK, _END = 1 << 20, 64, 4096, 1 << 18
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


def some_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a file of JSON lines: all of a short one, of a long one some from everywhere and the last ones."""
    try:
        with opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            if size <= _WHOLE:
                file.seek(0)
                texts = file.read().split(b"\n")
            else:
                texts = []
                for number in range(_BLOCKS + 1):
                    file.seek(max(0, (size - _BLOCK) * number // _BLOCKS))
                    texts += file.read(_BLOCK).split(b"\n")[1:-1]
    except OSError:
        return []
    found = []
    for text in texts:
        line = _object(text)
        if line is not None and type(line.get("step")) is int and isinstance(line.get("loss"), int | float):
            found.append(line)
    return found


def _last_events(journal: Path) -> list[dict[str, Any]]:
    """The events at the end of a journal: how a run stands is among them."""
    try:
        with opened(journal) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END))
            texts = file.read(_END).split(b"\n")[1 if size > _END else 0 :]
    except OSError:
        return []
    return [line for text in texts if (line := _object(text)) is not None and isinstance(line.get("event"), str)]


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def spark(lines: list[dict[str, Any]]) -> Html:
    """The loss over the steps as a small picture; gaps where it is not finite."""
    latest = {line["step"]: float(line["loss"]) for line in lines if abs(line["step"]) < 1 << 53}
    steps = sorted(latest)
    steps = steps[:: max(1, len(steps) // _POINTS)] + steps[-1:]
    finite = [latest[step] for step in steps if math.isfinite(latest[step])]
    if len(finite) < 2:
        return Html("-")
    low, high, first, last = min(finite), max(finite), steps[0], max(steps[-1], steps[0] + 1)
    pieces, open_ = [], False
    for step in steps:
        if not math.isfinite(latest[step]):
            open_ = False
            continue
        x = 1 + (_WIDTH - 2) * (step - first) / (last - first)
        y = 2 + (_HEIGHT - 4) * (1 - (latest[step] - low) / ((high - low) or 1.0))
        pieces.append(f"{'L' if open_ else 'M'}{x:.1f} {y:.1f}")
        open_ = True
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
        lines = some_lines(path / METRICS)
        last: Mapping[str, Any] = lines[-1] if lines else {}
        state, why = state_of(path, _last_events(path / JOURNAL))
        tick = tag("input", type_="checkbox", name="run", value=key, aria_label=f"compare {key}")
        name = tag("a", key, href=f"run?{urlencode({'run': key})}")
        word = tag("span", state, class_=f"state {state}", title=why)
        cells = [f"{last['step']:,}" if last else "-", measured("loss", last.get("loss")) or "-", spark(lines)]
        rows.append((name, tick, word, *cells, measured("tokens_per_s", last.get("tokens_per_s")) or "-"))
    head = ("run", "compare", "state", "step", "loss", "curve", "tokens/s")
    if not rows:
        return section("list", "Runs", tag("p", "There is no run here yet: a run's folder has a metrics.jsonl."))
    button = tag("p", tag("button", "compare the ticked runs", type_="submit"))
    form = tag("form", table("The newest first", head, rows), button, action="run", method="get")
    return section("list", "Runs", form)
