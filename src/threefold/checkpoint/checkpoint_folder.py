"""Checkpoints on disk: their names, manifest, commit and retention, and whether they are complete. No torch.

A checkpoint is written into a hidden folder, which is renamed when every rank is done. The marker inside is written
last and holds the manifest's checksum. So a folder without a marker is incomplete, and a later change no longer matches
the marker (see `seal`). A folder with any other form of name is the user's and is left alone.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from threefold.checkpoint.lineage import Author, Identity
from threefold.checkpoint.seal import (
    Seal,
    checksum_of,
    shares,
    sync,
    write_sealed,
    wrong_checksums,
    wrong_sizes,
)
from threefold.errors import CheckpointError, shell_word
from threefold.jsonl import Values, from_json, write_whole

FORMAT = 2
_MARKER = "COMPLETE"
_MANIFEST = "manifest.json"
_BEST = "best.json"
_INSIDE = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    step: int

    @property
    def state(self) -> Path:
        """Folder with the tensors."""
        return self.path / "state"

    @property
    def complete(self) -> bool:
        return (self.path / _MARKER).exists()

    @property
    def author(self) -> Author | None:
        """The start of a run that wrote it; None if no run did, or it cannot be read."""
        try:
            return Author.of(from_json((self.path / _MANIFEST).read_bytes()))
        except (OSError, ValueError):
            return None

    @property
    def checksum(self) -> str | None:
        """The manifest's checksum, by which a checkpoint is known; None if it cannot be read."""
        try:
            return checksum_of((self.path / _MANIFEST).read_bytes())
        except OSError:
            return None

    def manifest(self) -> Values:
        """Returns what the checkpoint belongs to: config, mesh, versions, data and cursor, and the seals of its files.

        Raises:
            CheckpointError: the manifest has changed since it was written, or another release wrote it.
        """
        try:
            marker = (self.path / _MARKER).read_bytes()
            content = (self.path / _MANIFEST).read_bytes()
        except OSError as error:
            raise self._unreadable(str(error)) from error
        if marker != _marker(self.step, content):
            raise self._unreadable("the marker was written for another manifest")
        try:
            manifest = from_json(content)
            written_as = manifest["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._unreadable(f"it is not a manifest ({error!r})") from error
        if written_as != FORMAT:
            raise CheckpointError(
                f"{self.path} has the format {written_as}, which this release does not read",
                expected=f"format {FORMAT}",
                fix="resume with the release of threefold that wrote it, or start a new run",
            )
        return manifest

    def seals(self) -> dict[str, Seal]:
        """Returns size and checksum of every file except marker and manifest, by its path inside the checkpoint.

        Raises:
            CheckpointError: the manifest has changed since it was written, or holds no such list.
        """
        manifest = self.manifest()
        try:
            seals = {name: Seal.from_json(values) for name, values in manifest["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unreadable(f"it has no list of files ({error!r})") from error
        # An untrusted manifest must not lead out of its folder.
        if strange := [
            name for name in seals if not _INSIDE.fullmatch(name) or ".." in name.split("/")
        ]:
            raise self._unreadable(f"{strange[0]!r} is not a file of a checkpoint")
        return seals

    def refuse_damage(self) -> None:
        """CheckpointError if its bytes are not those that were written."""
        if (reason := self.damage()) is not None:
            raise damaged(self, reason)

    def damage(self, *, share: tuple[int, int] = (0, 1)) -> str | None:
        """Returns the damage of the checkpoint, or None.

        Args:
            share: (i, n): read the i-th of n equal parts of the files; all sizes are checked in any case.
        """
        try:
            seals = self.seals()
        except CheckpointError as error:
            return error.problems[0].what
        if not seals:
            return "its manifest lists no files"
        return wrong_sizes(self.path, seals) or wrong_checksums(
            self.path, seals, shares(seals, share[1])[share[0]]
        )

    def _unreadable(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path / _MANIFEST} cannot be read: {reason}",
            expected="the manifest that was written with the checkpoint",
            fix=f"remove {self.path}, and resume from an older checkpoint",
        )


class CheckpointFolder:
    """The checkpoints of one run.

    What no manifest shows to be written by one of this run's starts, a link, and what has no marker yet (a copy under
    way) are never removed. Only a checkpoint whose manifest is damaged is renamed all the same, when what comes later
    is set aside.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "checkpoints"
        self._run = run

    def partial(self, step: int) -> Path:
        """Returns the hidden folder in which the checkpoint of `step` is being written."""
        return self.path / f".{_name(step)}.partial"

    def at(self, step: int) -> Checkpoint:
        """Returns the checkpoint of `step` at its place, which need not be there yet."""
        return Checkpoint(self.path / _name(step), step)

    def begin(self, step: int) -> Path:
        """Makes an empty hidden folder for the checkpoint of `step`; one rank calls it."""
        self.abandon(step)
        (self.partial(step) / "state").mkdir(parents=True)
        return self.partial(step)

    def abandon(self, step: int) -> None:
        """Removes what a save of `step` wrote."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def commit(
        self, step: int, manifest: Values, seals: Mapping[str, Seal] | None = None
    ) -> Checkpoint:
        """Writes the manifest and the marker, and gives the folder its name; one rank calls it when all are done.

        Args:
            seals: of the files that the ranks wrote, by their paths inside the checkpoint.
        """
        return seal_folder(
            self.partial(step), self.path / _name(step), step, manifest, seals or {}
        )

    def own(self) -> list[Checkpoint]:
        """Returns the checkpoints of this run, oldest first, complete or not; all of them in a folder without an id."""
        identity = Identity.read(self._run)
        return [each for each in self.all() if identity is None or _is_of(identity, each)]

    def foreign(self) -> list[Checkpoint]:
        """Returns the checkpoints that no start of the run wrote, but another run, a copy or a loop; oldest first."""
        own = self.own()
        return [each for each in self.all() if each not in own]

    def complete(self) -> list[Checkpoint]:
        """Returns the run's complete checkpoints, oldest first; they may still be damaged.

        Those of steps before which a later start went back are left out, even if they have their names again.
        """
        return [each for each in self.own() if each.complete and self.stands(each)]

    def stands(self, checkpoint: Checkpoint) -> bool:
        """Whether one of the run's checkpoints is on the way to where the run is now."""
        identity, author = Identity.read(self._run), checkpoint.author
        return identity is None or author is None or identity.stands(author, checkpoint.step)

    def all(self) -> list[Checkpoint]:
        """Returns all folders with a checkpoint's name, oldest first, complete or not."""
        paths = [path for path in self.path.glob("step-*") if path.is_dir()]
        checkpoints = [
            Checkpoint(path, step) for path in paths if (step := _step(path)) is not None
        ]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    def newest(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint, or None."""
        return next(reversed(self.complete()), None)

    def best(self) -> tuple[int, float] | None:
        """Returns step and evaluation loss of the best checkpoint so far, or None.

        Raises:
            CheckpointError: the record was changed or cut: the best checkpoint would be lost.
        """
        try:
            record = from_json((self.path / _BEST).read_bytes())
            step, eval_loss = int(record["step"]), float(record["eval_loss"])
            if record["checksum"] != _of_best(step, eval_loss):
                raise ValueError("its checksum differs")
            return (step, eval_loss) if math.isfinite(eval_loss) else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise CheckpointError(
                f"{self.path / _BEST} cannot be read: {error!r}",
                expected="step and loss of the best checkpoint, as they were written: it is kept by this record",
                fix=f"copy the best checkpoint elsewhere, if you need it, and remove {self.path / _BEST}",
            ) from error

    def mark_best(self, step: int, eval_loss: float) -> None:
        """Records that the checkpoint of `step` is the best, so that it is kept."""
        record = {"step": step, "eval_loss": eval_loss, "checksum": _of_best(step, eval_loss)}
        write_whole(self.path / _BEST, [json.dumps(record).encode(), b"\n"])
        sync(self.path)

    def forget_best_after(self, step: int) -> None:
        """Removes the record of a best checkpoint later than `step`: it is not of this timeline any more."""
        best = self.best()
        if best is not None and best[0] > step:
            (self.path / _BEST).unlink()

    def prune(self, keep: int, pinned: Sequence[int] = ()) -> None:
        """Removes all but the `keep` newest complete checkpoints, the best, and those of the `pinned` steps.

        Also removes the remains of interrupted saves and removals.
        """
        best, _ = self.best() or (None, None)
        named = Identity.read(self._run) is not None
        for checkpoint in self.complete()[:-keep]:
            # A manifest without an author in a run's folder is damaged.
            kept = checkpoint.step == best or checkpoint.step in pinned
            if (
                not kept
                and not checkpoint.path.is_symlink()
                and (checkpoint.author or not named)
            ):
                _remove(checkpoint.path)
        for path in self.path.glob(".step-*.partial"):
            _remove(path)

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames checkpoints later than `step`, so that no later save or resume takes them for part of this run.

        Returns the new paths. Their content is unchanged; the user may remove them.
        """
        aside = []
        later = [
            each for each in self.own() if each.step > step and (each.complete or each.author)
        ]
        for checkpoint in [each for each in later if not each.path.is_symlink()]:
            targets = (
                self.path / f"aside-{number}-{checkpoint.path.name}" for number in count(1)
            )
            aside.append(
                checkpoint.path.rename(
                    next(target for target in targets if not target.exists())
                )
            )
        return aside


def seal_folder(
    partial: Path,
    final: Path,
    step: int,
    manifest: Values,
    seals: Mapping[str, Seal],
) -> Checkpoint:
    """Makes the written folder `partial` the checkpoint `final`: manifest, marker, name.

    Raises:
        FileExistsError: something else than a checkpoint of the same author has that name.
    """
    files = {name: seal.to_json() for name, seal in seals.items()}
    content = (
        json.dumps(
            {"format": FORMAT, "step": step, **manifest, "files": files}, indent=1
        ).encode()
        + b"\n"
    )
    write_sealed(partial / _MANIFEST, content)
    for folder in [path for path in partial.rglob("*") if path.is_dir()]:
        sync(folder)
    write_sealed(partial / _MARKER, _marker(step, content))
    sync(partial)
    same = (final / _MANIFEST).exists() and Checkpoint(final, step).author == Author.of(
        manifest
    )
    if final.is_symlink() or (final.exists() and not same):
        raise FileExistsError(
            errno.EEXIST, "move it away: this start did not write it", str(final)
        )
    _remove(final)
    os.replace(partial, final)
    sync(final.parent)
    return Checkpoint(final, step)


def newest_undamaged(
    candidates: Sequence[Checkpoint], damage: Callable[[Checkpoint], str | None]
) -> tuple[Checkpoint | None, list[tuple[Checkpoint, str]]]:
    """Returns the first undamaged checkpoint, and the damage of those before it.

    Args:
        candidates: newest first.
        damage: returns the damage of one, or None; called until it returns None.
    """
    passed: list[tuple[Checkpoint, str]] = []
    for candidate in candidates:
        if (reason := damage(candidate)) is None:
            return candidate, passed
        passed.append((candidate, reason))
    return None, passed


def find(path: Path) -> Checkpoint:
    """Returns the checkpoint that a path names: its own folder, or the newest one of a run.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if (path / _MARKER).exists() and (step := _step(path)) is not None:
        return Checkpoint(path, step)
    if (newest := CheckpointFolder(path).newest()) is not None:
        return newest
    raise CheckpointError(
        f"no complete checkpoint in {path}",
        expected="the folder of a run, or of one of its checkpoints (checkpoints/step-...)",
        fix=f"check the path; {others(path)}",
    )


def others(path: Path) -> str:
    """Where to look in place of a path that is no usable checkpoint: the newest others that its run has kept."""
    complete = CheckpointFolder(path.parent.parent).complete()
    kept = [shell_word(each.path) for each in complete if each.path != path]
    return (
        f"its run has kept {', '.join(kept[-3:])}"
        if kept
        else "`ls RUN/checkpoints` lists what a run has kept"
    )


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint in a folder of any name, of the step in its marker; without a marker, `damage` reports that."""
    try:
        return Checkpoint(path, int((path / _MARKER).read_bytes().split()[0]))
    except (OSError, ValueError, IndexError):
        return Checkpoint(path, -1)


def damaged(checkpoint: Checkpoint, reason: str) -> CheckpointError:
    """Returns the error for a requested checkpoint that is damaged, or that a run which continues has removed."""
    if not checkpoint.path.exists():
        return CheckpointError(
            f"{checkpoint.path} has been removed meanwhile",
            expected="a checkpoint that is kept: a run keeps its newest ones and its best",
            fix=others(checkpoint.path),
        )
    return CheckpointError(
        f"the checkpoint {checkpoint.path} is damaged: {reason}",
        expected="the files as they were written, with the recorded sizes and checksums",
        fix=f"copy it again from its source, or use another; {others(checkpoint.path)}",
    )


def _is_of(identity: Identity, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of a run, as far as can be seen: a damaged or incomplete one may be."""
    if (author := checkpoint.author) is not None:
        return identity.has(author)
    try:
        checkpoint.manifest()
    except CheckpointError:
        return True
    return False  # it is whole, and no run wrote it: a loop's


def _of_best(step: int, eval_loss: float) -> str:
    return checksum_of(f"{step} {eval_loss!r}".encode())


def _marker(step: int, manifest: bytes) -> bytes:
    return f"{step} {checksum_of(manifest)}\n".encode()


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _step(path: Path) -> int | None:
    digits = path.name.removeprefix("step-")
    return (
        int(digits)
        if path.name == f"step-{digits}" and digits.isascii() and digits.isdecimal()
        else None
    )


def _remove(folder: Path) -> None:
    """Removes a folder of ours; never the target of a link."""
    if folder.is_symlink() or not folder.exists():
        return
    # Hidden first: an interrupted removal must not look like a checkpoint, complete or being copied.
    if not folder.name.startswith("."):
        hidden = folder.with_name(f".{folder.name}.removed.partial")
        if hidden.exists():
            shutil.rmtree(hidden, ignore_errors=True)
        folder = folder.rename(hidden)
    shutil.rmtree(folder, ignore_errors=True)
