"""How a failed rank reports why: once for all ranks, by the one that failed first."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from threefold.errors import EXIT_FAILED, RunError, ThreefoldError
from threefold.mesh import environment
from threefold.mesh.exchange import OtherRankError, described_error, lost_peer
from threefold.mesh.mesh import FAILURES, Mesh
from threefold.mesh.rendezvous_errors import NoDeviceError, RendezvousError
from threefold.run.watch.watchdog import Watchdog

log = logging.getLogger("threefold")

# For the report of the rank that failed first.
_LINGER_S = 60.0
# A process with much memory takes its time to end.
_KILLED_WITHIN_S = 3.0


def report_failure(
    error: BaseException, mesh: Mesh | None, rank: int, watch: Watchdog | None = None, *, keep: str | None = None
) -> int:
    """Prints a failed rank's reason if it is the first of the run, logs it in any case, and returns the exit code.

    Args:
        keep: a file for the error, which is then not printed if it is one for users.
    """
    if watch is not None:
        watch.progress.enter("failure")
    expected = isinstance(error, ThreefoldError)
    text = str(error) if expected else "".join(traceback.format_exception(error)).rstrip()
    log.error("%s", text)
    if (lost := lost_peer(error)) is not None:
        text = str(lost)  # the traceback only shows where this rank waited
    first = _is_first_failure(error, mesh, rank, watch)
    # Ranks of a launcher have a file each; those that are started here have one, in which the first one's error stays.
    if keep is not None and (first or not Path(keep).exists()):
        what = f"a rank failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        other = RunError(what, expected="ranks that run to their end", fix="see the traceback that it has printed")
        Path(keep).write_text(json.dumps(described_error(error if expected else other)))
    if first:
        environment.tell_failure(text)
    if first and not (expected and keep is not None):  # the program is told, by an error that it raises
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write, which other ranks cannot split
    return error.exit_code if isinstance(error, ThreefoldError) else EXIT_FAILED


def _is_first_failure(error: BaseException, mesh: Mesh | None, rank: int, watch: Watchdog | None) -> bool:
    if isinstance(error, RendezvousError | NoDeviceError):
        return error.first
    store = mesh.store if mesh is not None else watch.store if watch is not None else None
    if store is None:
        return rank == 0
    try:
        if isinstance(error, OtherRankError):
            store.wait([FAILURES], timedelta(seconds=_LINGER_S))  # that rank's own report
            return False
        return bool(store.add(FAILURES, 1) == 1)
    except Exception:  # the store is gone with rank 0, which hosted it: it failed before, or was killed
        return watch is not None and _outlives(watch)


def _outlives(watch: Watchdog) -> bool:
    """Whether this rank speaks for its host, once a lower rank that has been killed is gone."""
    until = time.monotonic() + _KILLED_WITHIN_S
    while not (watch.speaks_for_its_host() or watch.told_by_another()) and time.monotonic() < until:
        time.sleep(0.1)
    return watch.speaks_for_its_host()
