"""A run's folder: what is in it, and where a run goes on."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from threefold.checkpoint.layout import Checkpoint, CheckpointFolder, damaged, find
from threefold.config import text as config_text
from threefold.config.schema import Config
from threefold.errors import CheckpointError, ConfigError
from threefold.run.lock import RunLock

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """An opened run folder, and the checkpoint to go on from (None: from step 1).

    Attributes:
        candidates: what may be gone on from, newest first; the first that is undamaged becomes `resume`.
        asked: there is one candidate, and the user has named it.
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

    def to_json(self) -> str:
        """What other ranks need to open the same."""
        candidates = [[str(candidate.path), candidate.step] for candidate in self.candidates]
        return json.dumps({"path": str(self.path), "candidates": candidates, "asked": self.asked})

    @classmethod
    def from_json(cls, text: str) -> RunFolder:
        """The inverse of `to_json`."""
        values = json.loads(text)
        candidates = tuple(Checkpoint(Path(path), step) for path, step in values["candidates"])
        return cls(Path(values["path"]), None, candidates, values["asked"])

    def resuming(self, chosen: Checkpoint | None, passed: Sequence[tuple[Checkpoint, str]]) -> RunFolder:
        """The folder with the candidate that was chosen.

        Args:
            passed: those before it, and what is wrong with each.

        Raises:
            CheckpointError: none is left, but there are some: training must not begin anew over them.
        """
        if chosen is None and passed:
            if self.asked:
                raise damaged(*passed[0])
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints.path} is undamaged: "
                + "; ".join(f"{checkpoint.path.name}: {reason}" for checkpoint, reason in passed),
                expected="at least one that is as it was written; otherwise the run would begin at step 1 again",
                fix="restore one from a copy, or --log.dir ANOTHER_FOLDER for a new run",
            )
        return dataclasses.replace(self, resume=chosen)

    def accept(self, config: Config) -> list[Path]:
        """Makes the folder this run's: writes its config, sets later checkpoints aside; one rank calls it.

        Called when nothing can refuse the request any more; until then the folder is as it was.

        Returns:
            Checkpoints behind the step that the run goes on from, by their new names.
        """
        aside = self.checkpoints.set_aside_after(self.resume.step) if self.resume is not None else []
        temporary = self.path / ".config.yaml"
        temporary.write_text(config_text.dump(config))
        os.replace(temporary, self.path / "config.yaml")
        return aside


def open_run(config: Config, lock: RunLock | None = None) -> RunFolder:
    """Makes or reopens the run's folder and says where the run may go on; one rank calls it.

    Args:
        lock: takes the folder for this process.

    Raises:
        ConfigError: the folder holds a run and `checkpoint.resume` is `never`, another run is in it, or it cannot be
            written.
        CheckpointError: a checkpoint given by path is not there.
    """
    path = Path(config.log.dir) if config.log.dir is not None else new_path()
    _candidates(config, path)  # a refusal comes before anything is made
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
                fix="--log.dir ANOTHER_FOLDER, or --checkpoint.resume auto to go on with it",
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
    """A folder for a run that was given none: named by the time, and not there yet."""
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
