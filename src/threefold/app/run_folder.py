"""A run's folder: what is in it, and where a run goes on."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from threefold import config_loading
from threefold.checkpoint.layout import Checkpoint, CheckpointFolder, find
from threefold.config import Config
from threefold.errors import CheckpointError, ConfigError

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """An opened run folder, and the checkpoint to go on from (None: from step 1)."""

    path: Path
    resume: Checkpoint | None

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path)

    def to_json(self) -> str:
        """What other ranks need to open the same."""
        return json.dumps({"path": str(self.path), "resume": str(self.resume.path) if self.resume else None})

    @classmethod
    def from_json(cls, text: str) -> RunFolder:
        """The inverse of `to_json`."""
        values = json.loads(text)
        resume = find(Path(values["resume"])) if values["resume"] else None
        return cls(Path(values["path"]), resume)


def open_run(config: Config) -> RunFolder:
    """Makes or reopens the run's folder and decides where the run goes on; one rank calls it.

    Raises:
        ConfigError: the folder holds a run and `checkpoint.resume` is `never`, or it cannot be written.
        CheckpointError: a checkpoint given by path is not there.
    """
    path = Path(config.log.dir) if config.log.dir is not None else _new_path()
    checkpoints = CheckpointFolder(path)
    holds_run = (path / METRICS).exists() or checkpoints.newest() is not None
    resume: Checkpoint | None = None
    if config.checkpoint.resume == "auto":
        resume = checkpoints.newest()
    elif config.checkpoint.resume == "never":
        if holds_run:
            raise ConfigError(
                f"log.dir = {path} holds a run, and checkpoint.resume is never",
                expected="an empty folder, so that no earlier run is mixed into this one",
                fix="--log.dir ANOTHER_FOLDER, or --checkpoint.resume auto to go on with it",
            )
    else:
        asked = Path(config.checkpoint.resume)
        if not asked.exists():
            raise CheckpointError(
                f"checkpoint.resume = {asked} does not exist",
                expected="auto, never, or the folder of a run or of one of its checkpoints",
                fix="check the path; `ls RUN/checkpoints` lists what a run has kept",
            )
        resume = find(asked)
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        checkpoints.path.mkdir(exist_ok=True)
        (path / "config.yaml").write_text(config_loading.dump(config))
    except OSError as error:
        raise ConfigError(
            f"log.dir = {path} cannot be written: {error.strerror}",
            expected="a folder that this user can write, with room for checkpoints",
            fix="--log.dir ANOTHER_FOLDER",
        ) from error
    return RunFolder(path, resume)


def _new_path() -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path, number = Path("runs") / stamp, 2
    while path.exists():
        path, number = Path("runs") / f"{stamp}-{number}", number + 1
    return path


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
