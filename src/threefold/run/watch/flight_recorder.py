"""What torch knows of this rank's collectives: how many it has begun in each process group, and the last ones."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch.distributed as dist
from torch._C import _distributed_c10d

log = logging.getLogger("threefold")

# torch's Flight Recorder as JSON: of NCCL, else of gloo.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def begun() -> dict[str, int]:
    """The number of collectives that this rank has begun, by the ranks and the name of the process group."""
    found: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
            found[f"{ranks}/{group.group_name}"] = group._get_sequence_number_for_group()
        except (
            RuntimeError,
            ValueError,
            KeyError,
        ) as error:
            # It is being made, or ends, or counts nothing.
            log.info("watchdog: %s", error)
    return found


def keep(folder: Path, rank: int) -> None:
    """Writes the last collectives of this rank to logs/flight_recorder_rank_0001.json of a run's folder, for `explain`.

    In a thread of its own: it waits for a lock that a stuck driver may hold.
    """
    threading.Thread(
        target=_keep, args=(folder, rank), name="flight recorder", daemon=True
    ).start()


def _keep(folder: Path, rank: int) -> None:
    dump = next(
        (found for name in _RECORDERS if (found := getattr(_distributed_c10d, name, None))),
        None,
    )
    if dump is None:
        return
    try:
        (folder / "logs" / f"flight_recorder_rank_{rank:04}.json").write_bytes(dump())
    except (OSError, RuntimeError) as error:
        log.warning("watchdog: %s", error)
