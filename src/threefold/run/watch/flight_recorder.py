"""The last collectives of this rank, as torch knows them."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from torch._C import _distributed_c10d

log = logging.getLogger("threefold")

# torch's Flight Recorder as JSON: of NCCL, else of gloo.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def keep(folder: Path, rank: int) -> None:
    """Writes the last collectives of this rank to logs/flight_recorder_rank_0001.json of a run's folder, for `explain`.

    In its own thread: it waits for a lock that a stuck driver may hold.
    """
    threading.Thread(
        target=_keep, args=(folder, rank), name="flight recorder", daemon=True
    ).start()


def _keep(folder: Path, rank: int) -> None:
    dump = next(
        (dumper for name in _RECORDERS if (dumper := getattr(_distributed_c10d, name, None))),
        None,
    )
    if dump is None:
        return
    try:
        (folder / "logs" / f"flight_recorder_rank_{rank:04}.json").write_bytes(dump())
    except (OSError, RuntimeError) as error:
        log.warning("watchdog: %s", error)
