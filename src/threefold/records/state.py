"""The state of a run: by its journal, by the process that holds its lock, and by when it has logged; how it ended."""

import os
import time
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from threefold.checkpoint.lineage import Ending
from threefold.config.paths import COPY_FILE, METRICS
from threefold.errors import ranks_text
from threefold.mesh.local_ranks import signal_name

STILL_S = 120.0
_ENDS = ("start", "stop", "done", "ending")
# In the words of `Ending.how`; any other is an error.
_HOW = {
    "signal": "ended by {signal}",
    "memory": "ended for lack of memory",
    "exit": "left with exit code {code}",
    "gone": "gone without a message",
    "lost": "lost its connection to another rank",
    "asked": "did not stop on {signal}",
    "vanished": "gone without a message: killed together, or their host went down",
    "stall": "made no progress",
    "worker": "got no rows from its loader's worker",
}


def last_end(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of a journal with the state of its last start: start, stop, done or ending; empty: there is none."""
    return next((event for event in reversed(events) if event["event"] in _ENDS), {})


def ending_of(events: list[dict[str, Any]]) -> Ending | None:
    """How the last start ended, if its journal ends so.

    The process that starts ranks knows most, and gives a code; then the rank that noted it first, unless all that it
    knew is that another rank was lost.
    """
    since = takewhile(
        lambda event: event["event"] not in ("start", "stop", "done"), reversed(events)
    )
    endings = [Ending.of(event) for event in since if event["event"] == "ending"]
    sound = [each for each in reversed(endings) if each is not None]
    return min(sound, key=lambda each: (not each.code, each.how == "lost"), default=None)


def ended_text(ending: Ending) -> str:
    """Which rank, how, and where: `rank 1 of host a: ended by SIGKILL, in backward of step 8`."""
    who = f"{ranks_text(ending.ranks)} of host {ending.host}" if ending.ranks else "all ranks"
    how = _HOW.get(ending.how, "failed").format(
        code=ending.code, signal=signal_name(ending.code)
    )
    where = (
        f"{ending.phase} of step {ending.step}"
        if ending.step
        else f"{ending.phase or 'the start'}, before a step"
    )
    return f"{who}: {how}, in {where}"


def state_of(
    run: Path, events: list[dict[str, Any]], *, still_s: float = STILL_S
) -> tuple[str, str]:
    """The state in a word, and what shows it; `still_s`: for how long a running one may log nothing."""
    last = last_end(events)
    if (ending := ending_of(events)) is not None:
        return "failed", ": ".join([ended_text(ending), *ending.error.splitlines()[:1]])
    if last and last["event"] != "start":
        word = "done" if last["event"] == "done" else "stopped"
        return word, f"after step {last.get('step')}, {shown_time(str(last.get('time', '')))}"
    if (run / COPY_FILE).is_file():
        return (
            "copied",
            f"as it was when {(run / COPY_FILE).read_text()} was sent: what came later is not in it",
        )
    if (holder := lock_holder(run)) is not None:
        return "running", f"process {holder} of this host holds its lock"
    try:
        age = time.time() - (run / METRICS).stat().st_mtime
    except OSError:
        return (
            ("ended", "it has logged no step, and no process of this host holds its lock")
            if last
            else ("empty", "")
        )
    if age < still_s:
        return (
            "running",
            f"it logged a step {age:.0f} s ago, on another host or by another program",
        )
    return (
        "ended",
        "without a trace: no stop is in its journal, and no process of this host holds its lock",
    )


def lock_holder(run: Path) -> int | None:
    """The process of this host that holds a run's lock, by /proc/locks: looking takes no lock."""
    try:
        status = os.stat(run / "run.lock")
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    held = [line.split() for line in lines if device in line and "->" not in line]
    return (
        next((int(words[4]) for words in held if len(words) > 5 and words[5] == device), None)
        or None
    )


def shown_time(text: str) -> str:
    """A time of a file as `2026-11-22 17:36:02 UTC`; the text itself if it is not a time."""
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return text
