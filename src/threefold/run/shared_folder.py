"""Checks once that all hosts of a run see one folder, before anything is written that only some would find."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from threefold.errors import ConfigError
from threefold.mesh import environment
from threefold.mesh.mesh import Mesh

# Network file systems show a new file to other hosts with a delay.
_SEEN_WITHIN_S = 15.0
_LOOK_S = 0.1


def require_shared(folder: Path, mesh: Mesh) -> None:
    """Refuses a run folder that is not the same on every host; all ranks call it.

    Raises:
        ConfigError: a host does not see what rank 0 writes.
    """
    if mesh.num_hosts == 1:
        return

    def make() -> str:
        name = f".seen-by-all-{uuid.uuid4().hex}"
        (folder / name).touch()
        return name

    mark = folder / mesh.share("mark", make)
    try:
        mesh.decide(
            "shared folder", "" if _seen(mark) else environment.current().host, lambda parts: _judge(folder, parts)
        )
    finally:
        if mesh.rank == 0:
            mark.unlink(missing_ok=True)


def _seen(mark: Path) -> bool:
    until = time.monotonic() + _SEEN_WITHIN_S
    while not mark.exists():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


def _judge(folder: Path, parts: list[str]) -> str:
    blind = sorted({part for part in parts if part})
    if blind:
        raise ConfigError(
            f"log.dir = {folder} on {' and '.join(blind)} is not the folder that rank 0 writes to",
            expected="one folder that all hosts share: each rank writes its part of a checkpoint there",
            fix="--log.dir FOLDER_ON_A_SHARED_FILE_SYSTEM   (NFS, Lustre, EFS)",
        )
    return ""
