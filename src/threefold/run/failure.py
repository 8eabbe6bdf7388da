"""Reports why a rank failed: once for all ranks, in the error's three parts, with the exit code."""

from __future__ import annotations

import logging
import sys
import traceback

from threefold.errors import EXIT_FAILED, Problem, ThreefoldError
from threefold.mesh import environment
from threefold.mesh.mesh import FAILURES, Mesh
from threefold.mesh.rendezvous_errors import NoDeviceError, RendezvousError

log = logging.getLogger("threefold")

# How gloo and NCCL report that a peer's process is gone; the traceback only shows where this rank waited for it.
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


def _peer_gone(reason: str) -> Problem:
    return Problem(
        f"rank {environment.current().rank} lost its connection to another rank: {reason}",
        "every rank to stay until the run is over",
        "if no rank has reported an error, one was killed: look for `Out of memory` in the kernel's log (dmesg) of its "
        "host; the same command resumes from the newest checkpoint, and --max-restarts N does so automatically",
    )


def report_failure(error: BaseException, *, first: bool) -> int:
    """Prints a failed rank's reason if it is the first of the run, logs it in any case, and returns the exit code."""
    expected = isinstance(error, ThreefoldError)
    text = str(error) if expected else "".join(traceback.format_exception(error)).rstrip()
    log.error("%s", text)
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_GONE):
        text = str(_peer_gone(str(error).strip().splitlines()[0]))
    if first:
        environment.tell_failure(text)
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    return error.exit_code if isinstance(error, ThreefoldError) else EXIT_FAILED


def is_first_failure(mesh: Mesh | None, rank: int, error: BaseException | None = None) -> bool:
    """Returns whether this rank is the first of the run to fail, and so the one to report why."""
    if isinstance(error, RendezvousError | NoDeviceError):
        return error.first
    if mesh is None or mesh.store is None:
        return rank == 0
    try:
        return mesh.store.add(FAILURES, 1) == 1
    except Exception:  # the store is gone: rank 0 hosted it and failed before
        return False
