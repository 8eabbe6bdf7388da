"""A run's folder: its files, where a run resumes, and whether all hosts see the same folder."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.checkpoint.layout import Checkpoint, CheckpointFolder, damaged, find
from threefold.config import text as config_text
from threefold.config.schema import Config
from threefold.errors import CheckpointError, ConfigError
from threefold.mesh import environment
from threefold.run.lock import RunLock

if TYPE_CHECKING:
    from threefold.mesh.mesh import Mesh

METRICS = "metrics.jsonl"
# Network file systems show a new file to other hosts after a moment.
_SEEN_WITHIN_S = 15.0
_LOOK_S = 0.1


@dataclass(frozen=True)
class RunFolder:
    """An opened run folder, and the checkpoint to resume from (None: start at step 1).

    Attributes:
        candidates: checkpoints to resume from, newest first; the first undamaged one becomes `resume`.
        asked: the user named the only candidate.
    """

    path: Path
    resume: Checkpoint | None = None
    candidates: tuple[Checkpoint, ...] = ()
    asked: bool = False

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path)

    def to_values(self) -> dict[str, Any]:
        """Returns plain values from which other ranks open the same folder."""
        candidates = [[str(candidate.path), candidate.step] for candidate in self.candidates]
        return {"path": str(self.path), "candidates": candidates, "asked": self.asked}

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> RunFolder:
        candidates = tuple(Checkpoint(Path(path), step) for path, step in values["candidates"])
        return cls(Path(values["path"]), None, candidates, values["asked"])

    def resuming(self, chosen: Checkpoint | None, passed: Sequence[tuple[Checkpoint, str]]) -> RunFolder:
        """Returns the folder with the chosen candidate.

        Args:
            passed: the candidates before it, and what is wrong with each.

        Raises:
            CheckpointError: all candidates are damaged; training must not start over on top of them.
        """
        if chosen is None and passed:
            if self.asked:
                raise damaged(*passed[0])
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints.path} is undamaged: "
                + "; ".join(f"{checkpoint.path.name}: {reason}" for checkpoint, reason in passed),
                expected="at least one checkpoint as it was written; otherwise the run would restart at step 1",
                fix="restore one from a copy, or --log.dir ANOTHER_FOLDER for a new run",
            )
        return dataclasses.replace(self, resume=chosen)

    def accept(self, config: Config) -> list[Path]:
        """Makes the folder this run's: writes its config and sets later checkpoints aside; one rank calls it.

        Call this when nothing can refuse the request any more; until then, the folder is unchanged. Returns the new
        paths of the checkpoints later than the step that the run resumes from.
        """
        aside = self.checkpoints.set_aside_after(self.resume.step) if self.resume is not None else []
        temporary = self.path / ".config.yaml"
        temporary.write_text(config_text.dump(config))
        os.replace(temporary, self.path / "config.yaml")
        return aside


def open_run(config: Config, lock: RunLock | None = None) -> RunFolder:
    """Makes or reopens the run's folder, with `lock`, and finds where the run may resume; one rank calls it.

    Raises:
        ConfigError: the folder holds a run and `checkpoint.resume` is `never`, another run is using it, or it cannot
            be written.
        CheckpointError: a checkpoint given by path does not exist.
    """
    path = Path(config.log.dir) if config.log.dir is not None else new_path()
    _candidates(config, path)  # refuse before anything is made
    fresh = not path.exists()
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        CheckpointFolder(path).path.mkdir(exist_ok=True)
        if lock is not None:
            lock.take(path, fresh=fresh)
    except OSError as error:
        raise ConfigError(
            f"log.dir = {path} cannot be written: {error.strerror}",
            expected="a folder that this user can write, with room for checkpoints",
            fix="--log.dir ANOTHER_FOLDER",
        ) from error
    return RunFolder(path, None, *_candidates(config, path))


def _candidates(config: Config, path: Path) -> tuple[tuple[Checkpoint, ...], bool]:
    checkpoints = CheckpointFolder(path)
    if config.checkpoint.resume == "auto":
        return tuple(reversed(checkpoints.all())), False
    if config.checkpoint.resume == "never":
        if (path / METRICS).exists() or checkpoints.all():
            raise ConfigError(
                f"log.dir = {path} holds a run, and checkpoint.resume is never",
                expected="an empty folder, so that no earlier run is mixed into this one",
                fix="--log.dir ANOTHER_FOLDER, or --checkpoint.resume auto to resume it",
            )
        return (), False
    asked = Path(config.checkpoint.resume)
    if not asked.exists():
        raise CheckpointError(
            f"checkpoint.resume = {asked} does not exist",
            expected="auto, never, or the folder of a run or of one of its checkpoints",
            fix="check the path; `ls RUN/checkpoints` lists what a run has kept",
        )
    return (find(asked),), True


def new_path() -> Path:
    """Returns a new folder for a run without log.dir, named after the time."""
    stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    paths = (Path("runs") / name for name in chain([stamp], (f"{stamp}-{number}" for number in count(2))))
    return next(path for path in paths if not path.exists())


def log_to_file(path: Path, rank: int) -> None:
    """Sends this rank's log records to logs/rank-NNNN.log."""
    handler = logging.FileHandler(path / "logs" / f"rank-{rank:04d}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("threefold", "py.warnings"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    logging.getLogger("threefold").info("process %d", os.getpid())


def require_shared(folder: Path, mesh: Mesh) -> None:
    """Checks that all hosts see one run folder; all ranks call it.

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
        blind = "" if _seen(mark) else environment.current().host
        mesh.decide("shared folder", blind, lambda parts: _judge(folder, parts))
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
    if blind := sorted({part for part in parts if part}):
        raise ConfigError(
            f"log.dir = {folder} on {' and '.join(blind)} is not the folder that rank 0 writes to",
            expected="one folder that all hosts share: each rank writes its part of a checkpoint there",
            fix="--log.dir FOLDER_ON_A_SHARED_FILE_SYSTEM   (NFS, Lustre, EFS)",
        )
    return ""
