"""The state of a run: by its journal, by the process that holds its lock, and by when it has logged."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from threefold.config.paths import METRICS

STILL_S = 120.0


def state_of(run: Path, events: list[dict[str, Any]], *, still_s: float = STILL_S) -> tuple[str, str]:
    """The state in a word, and what shows it; `still_s`: for how long a running one may log nothing."""
    last = next((event for event in reversed(events) if event["event"] in ("start", "stop", "done")), None)
    if last is not None and last["event"] != "start":
        word = "done" if last["event"] == "done" else "stopped"
        return word, f"after step {last.get('step')}, {shown_time(str(last.get('time', '')))}"
    if (holder := lock_holder(run)) is not None:
        return "running", f"process {holder} of this host holds its lock"
    try:
        age = time.time() - (run / METRICS).stat().st_mtime
    except OSError:
        return ("ended", "it has logged no step, and no process of this host holds its lock") if last else ("empty", "")
    if age < still_s:
        return "running", f"it logged a step {age:.0f} s ago, on another host or by another program"
    return "ended", "without a trace: no stop is in its journal, and no process of this host holds its lock"


def lock_holder(run: Path) -> int | None:
    """The process of this host that holds a run's lock, by /proc/locks: looking takes no lock."""
    try:
        status = os.stat(run / "run.lock")
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    held = [line.split() for line in lines if device in line and "->" not in line]
    return next((int(words[4]) for words in held if len(words) > 5 and words[5] == device), None) or None


def shown_time(text: str) -> str:
    """A time of a file as `2026-11-22 17:36:02 UTC`; the text itself if it is none."""
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return text
