"""The runs of a folder, found two folders deep, with state and last step: only the end of long files is read."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from threefold.config.paths import JOURNAL, METRICS, RUN_CONFIG, is_run
from threefold.config.yaml_text import parse
from threefold.errors import ThreefoldError
from threefold.jsonl import Lines
from threefold.records.files import MOST_OF_CONFIG, content_of
from threefold.records.state import state_of
from threefold.report.facts import resolved
from threefold.report.headline import differing, measured, section
from threefold.report.markup import Html, table, tag

_MOST_RUNS = 200
# Columns of keys in which the runs differ.
_MOST_KEYS = 12
_END = 1 << 18


def runs_in(folder: Path) -> dict[str, Path]:
    """The runs of a folder by their paths in it, the newest first, and at most 200; itself as `.`, if it is one."""
    if is_run(folder):
        return {".": folder}
    runs = [
        path
        for pattern in ("*", "*/*")
        for path in folder.glob(pattern)
        if path.is_dir() and is_run(path)
    ]
    newest = sorted(runs, key=_changed, reverse=True)[:_MOST_RUNS]
    return {path.relative_to(folder).as_posix(): path for path in newest}


def _changed(path: Path) -> float:
    try:
        return (path / METRICS).stat().st_mtime
    except OSError:
        return 0.0


def listed(runs: Mapping[str, Path]) -> Html:
    """The table of the runs, each with a box to tick for comparing, and the button that does."""
    rows, configs = [], []
    for key, path in runs.items():
        logged = [
            line.values
            for line in Lines(path / METRICS, most_bytes=_END).read()
            if "loss" in line.values
        ]
        last = logged[-1] if logged else {}
        events = [line.values for line in Lines(path / JOURNAL, most_bytes=_END).read()]
        events = [event for event in events if isinstance(event.get("event"), str)]
        state, why = state_of(path, events)
        starts = [event for event in events if event["event"] == "start"]
        configs.append(resolved(_config(path), starts[-1] if starts else {}))
        tick = tag(
            "input", type_="checkbox", name="run", value=key, aria_label=f"compare {key}"
        )
        name = tag("a", key, href=f"run?{urlencode({'run': key})}")
        word = tag("span", state, class_=f"state {state}", title=why)
        cells = [
            measured(number, last.get(number)) or "-"
            for number in ("step", "loss", "tokens_per_s")
        ]
        rows.append((name, tick, word, *cells))
    differ = differing(configs)
    keys = list(differ[0])[:_MOST_KEYS] if differ else []
    rows = [
        (*row, *(config[key] for key in keys)) for row, config in zip(rows, differ, strict=True)
    ]
    head = ("run", "compare", "state", "step", "loss", "tokens/s", *keys)
    if not rows:
        return section(
            "list",
            "Runs",
            tag("p", "There is no run here yet: a run's folder has a metrics.jsonl."),
        )
    button = tag("p", tag("button", "compare the ticked runs", type_="submit"))
    form = tag(
        "form", table("The newest first", head, rows), button, action="run", method="get"
    )
    return section("list", "Runs", form)


def _config(run: Path) -> Mapping[str, Any]:
    """A run's config.yaml, parsed again when it has changed; empty if it cannot be read."""
    try:
        status = (run / RUN_CONFIG).stat()
        return _parsed(run / RUN_CONFIG, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, RecursionError, ThreefoldError):
        return {}


@lru_cache(maxsize=2 * _MOST_RUNS)
def _parsed(path: Path, changed: int, size: int) -> Mapping[str, Any]:
    config = parse(content_of(path, MOST_OF_CONFIG).decode("utf-8"), RUN_CONFIG)
    return config if isinstance(config, dict) else {}
