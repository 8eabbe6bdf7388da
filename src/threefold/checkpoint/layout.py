"""Where checkpoints lie, and which are whole: names, manifest, commit, retention. No torch.

A checkpoint is written into a hidden folder that is renamed when every rank is done; the marker inside is written last.
So a folder with a marker is whole, and anything else is a remnant that the next save removes.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.errors import CheckpointError

_MARKER = "COMPLETE"
_MANIFEST = "manifest.json"
_BEST = "best.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def state(self) -> Path:
        """Folder with the tensors."""
        return self.path / "state"

    def manifest(self) -> dict[str, Any]:
        """What the checkpoint belongs to: config, mesh, versions, data and cursor."""
        try:
            return json.loads((self.path / _MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path / _MANIFEST} cannot be read: {error}",
                expected="the manifest that was written with the checkpoint",
                fix=f"remove {self.path}, and resume from an older checkpoint",
            ) from error


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, run: Path) -> None:
        self.path = run / "checkpoints"

    def partial(self, step: int) -> Path:
        """Hidden folder in which the checkpoint of `step` is being written."""
        return self.path / f".{_name(step)}.partial"

    def begin(self, step: int) -> Path:
        """An empty hidden folder for the checkpoint of `step`; called by one rank."""
        partial = self.partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "state").mkdir(parents=True)
        return partial

    def commit(self, step: int, manifest: dict[str, Any]) -> Checkpoint:
        """Writes the manifest and the marker, and gives the folder its name; called by one rank when all are done."""
        partial, final = self.partial(step), self.path / _name(step)
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        (partial / _MARKER).write_text(f"{step}\n")
        _sync_folder(partial)
        _remove(final)
        os.replace(partial, final)
        _sync_folder(self.path)
        return Checkpoint(final, step)

    def complete(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first."""
        found = [Checkpoint(path, step) for path, step in self._named() if (path / _MARKER).exists()]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def _named(self) -> list[tuple[Path, int]]:
        # A copy that a user gave another name is the user's.
        return [
            (path, step) for path in self.path.glob("step-*") if path.is_dir() and (step := _step(path)) is not None
        ]

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint, or None."""
        complete = self.complete()
        return complete[-1] if complete else None

    def best(self) -> tuple[int, float] | None:
        """Step and evaluation loss of the best checkpoint so far, or None."""
        try:
            found = json.loads((self.path / _BEST).read_text())
            return int(found["step"]), float(found["eval_loss"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def mark_best(self, step: int, eval_loss: float) -> None:
        """Records that the checkpoint of `step` is the best, so that it stays."""
        temporary = self.path / f".{_BEST}"
        temporary.write_text(json.dumps({"step": step, "eval_loss": eval_loss}) + "\n")
        os.replace(temporary, self.path / _BEST)

    def prune(self, keep: int) -> None:
        """Removes all but the `keep` newest complete checkpoints and the best one, and what broken saves left."""
        best = self.best()
        for checkpoint in self.complete()[:-keep]:
            if best is None or checkpoint.step != best[0]:
                _remove(checkpoint.path)
        remnants = [path for path, _ in self._named() if not (path / _MARKER).exists()]
        for path in [*remnants, *self.path.glob(".step-*.partial")]:
            _remove(path)


def find(path: Path) -> Checkpoint:
    """The checkpoint that a path names: its own folder, or the newest one of a run.

    Raises:
        CheckpointError: nothing complete is there.
    """
    if (path / _MARKER).exists() and (step := _step(path)) is not None:
        return Checkpoint(path, step)
    newest = CheckpointFolder(path).newest()
    if newest is not None:
        return newest
    raise CheckpointError(
        f"no complete checkpoint in {path}",
        expected="the folder of a run, or of one of its checkpoints (checkpoints/step-...)",
        fix="check the path; `ls RUN/checkpoints` lists what a run has kept",
    )


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int | None:
    digits = path.name.removeprefix("step-")
    return int(digits) if path.name == f"step-{digits}" and digits.isascii() and digits.isdecimal() else None


def _remove(folder: Path) -> None:
    # The marker goes first: a removal cut short must not look complete.
    (folder / _MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
