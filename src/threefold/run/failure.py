"""How a failed rank reports why: once for all ranks, by the one that failed first.

Printed texts are for people. Programs read an `Ending` in the run's journal: the first rank that fails writes it
before it exits, or the process that started it does, if the rank could not (it was killed, or exited silently).
"""

import json
import logging
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from threefold.checkpoint.lineage import Ending
from threefold.errors import (
    EXIT_FAILED,
    EXIT_WRONG_REQUEST,
    NO_SPACE,
    OtherRankError,
    RunError,
    ThreefoldError,
    described_error,
    full_disk,
)
from threefold.mesh import environment
from threefold.mesh.exchange import lost_peer
from threefold.mesh.mesh import FAILURES, Mesh
from threefold.mesh.rendezvous_errors import NoDeviceError, RendezvousError
from threefold.run.watch.watchdog import Watchdog

log = logging.getLogger("threefold")

# For the report of the rank that failed first.
_LINGER_S = 60.0
# A process with much memory takes its time to end.
_KILLED_WITHIN_S = 3.0
# Limits in the journal: for an error not meant for users, the rows of a step, and the calls.
_LONGEST, _MOST_ROWS, _CALLS = 2000, 1000, 4


def report_failure(
    error: BaseException,
    mesh: Mesh | None,
    rank: int,
    watch: Watchdog | None = None,
    *,
    keep: str | None = None,
) -> int:
    """Prints a failed rank's reason if it is the first of the run, logs it in any case, and returns the exit code.

    Args:
        keep: a file for the error, which is then not printed if it is one for users.
    """
    if watch is not None:
        # Rows may be on a device that no longer answers; the error is reported all the same.
        with suppress(Exception):
            note_error(error, rank, watch)
        watch.progress.enter("failure")
    expected = isinstance(error, ThreefoldError)
    text = str(error) if expected else "".join(traceback.format_exception(error)).rstrip()
    log.error("%s", text)
    if (lost := lost_peer(error)) is not None:
        text = str(lost)  # the traceback only shows where this rank waited
    elif (full := full_disk(error)) is not None:
        text = str(full)
    first = _is_first_failure(error, mesh, rank, watch)
    # Ranks of a launcher have a file each; those that are started here have one, in which the first one's error stays.
    if keep is not None and (first or not Path(keep).exists()):
        other = RunError(
            f"a rank failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}",
            expected="all ranks to run until the end",
            fix="see the traceback that it printed",
        )
        Path(keep).write_text(json.dumps(described_error(error if expected else other)))
    if first:
        environment.tell_failure(text)
    # Reported to the program, by an error that it raises.
    if first and not (expected and keep is not None):
        # One write, which other ranks cannot split.
        print(f"{text}\n", end="", file=sys.stderr, flush=True)
    return error.exit_code if isinstance(error, ThreefoldError) else EXIT_FAILED


def _is_first_failure(
    error: BaseException, mesh: Mesh | None, rank: int, watch: Watchdog | None
) -> bool:
    if isinstance(error, RendezvousError | NoDeviceError):
        return error.first
    # The watch's first: a rank that is still joining has no mesh, and its store is another.
    store = next((each.store for each in (watch, mesh) if each and each.store), None)
    if store is None:
        return rank == 0
    try:
        if isinstance(error, OtherRankError):
            store.wait([FAILURES], timedelta(seconds=_LINGER_S))  # that rank's own report
            return False
        return bool(store.add(FAILURES, 1) == 1)
    except Exception:
        # The store is gone with rank 0, which hosted it: it failed before, or was killed.
        return watch is not None and _outlives(watch)


def _outlives(watch: Watchdog) -> bool:
    """Whether this rank speaks for its host, once a lower rank that has been killed is gone."""
    until = time.monotonic() + _KILLED_WITHIN_S
    while (
        not (watch.speaks_for_its_host() or watch.told_by_another())
        and time.monotonic() < until
    ):
        time.sleep(0.1)
    return watch.speaks_for_its_host()


def note_error(error: BaseException, rank: int, watch: Watchdog) -> None:
    """Notes the run's end in the journal, if this rank is the first to know it; a refused request leaves no note.

    About a lost peer, the process that starts the ranks knows more, if it is one of ours.
    """
    place = watch.progress.place
    lost = lost_peer(error)
    ours = error if isinstance(error, ThreefoldError) else None
    refused = ours is not None and ours.exit_code == EXIT_WRONG_REQUEST and not place.step
    if refused or isinstance(error, OtherRankError) or (lost is not None and watch.pulse):
        return
    text = str(error) if ours else f"{type(error).__name__}: {str(error)[:_LONGEST]}"
    rows = tuple(int(row) for row in watch.progress.rows)[:_MOST_ROWS]
    calls = "".join(traceback.format_tb(error.__traceback__)[-_CALLS:])
    host = environment.current().host
    ending = Ending(_how(error), (rank,), host, 0, place.name, place.step, rows, text, calls)
    if lost is not None:
        until = time.monotonic() + _KILLED_WITHIN_S
        while not (gone := watch.gone()) and time.monotonic() < until:
            time.sleep(0.1)
        ending = replace(ending, how="lost", error=str(lost))
        for _, step, phase in [*gone.values()][:1]:
            ending = replace(
                ending, how="gone", ranks=tuple(gone), phase=phase, step=step, rows=()
            )
    elif ours is not None:
        ranks, rows = ((rank,), rows) if ours.ranks is None else (ours.ranks, ())
        ending = replace(
            ending,
            ranks=ranks,
            rows=rows,
            phase=ours.phase or place.name,
            step=ours.step or place.step,
        )
    watch.note(ending)


def _how(error: BaseException | None) -> str:
    """What an error concerns, as a word of `Ending`; errors of ours carry it."""
    match error:
        case ThreefoldError(how="error") if (how := _how(error.__cause__)) != "exception":
            return how
        case ThreefoldError(how=how):
            return how
        case OSError() if error.errno in NO_SPACE:
            return "disk"
        case torch.OutOfMemoryError():
            return "device"
        case MemoryError():
            return "memory"
    return "exception"
