"""A run's folder: its files, where a run resumes, and whether all hosts see the same folder."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.checkpoint.checkpoint_folder import Checkpoint, CheckpointFolder, damaged
from threefold.checkpoint.lineage import Author, Identity, Journal, Origin
from threefold.checkpoint.lock import RunLock, Words
from threefold.checkpoint.seal import Seal, sync
from threefold.config import yaml_text as config_text
from threefold.config.paths import (
    AUDIT,
    LOG_START,
    METRICS,
    RUN_CONFIG,
    RUN_FILE,
    is_run,
    with_absolute_paths,
)
from threefold.config.schema import Config
from threefold.errors import CheckpointError, ConfigError, RunError, ThreefoldError, shell_word
from threefold.jsonl import Values, write_whole
from threefold.mesh import environment
from threefold.run import resume_choice

if TYPE_CHECKING:
    from threefold.checkpoint.background_saver import Save
    from threefold.mesh.mesh import Mesh
    from threefold.places.mirror import Mirror

# Network file systems show a new file to other hosts after a moment.
_SEEN_WITHIN_S = 15.0
_LOOK_S = 0.1
# What a start leaves that ended before the run began, and what a submitted job puts there.
_NOT_YET_A_RUN = (
    "checkpoints",
    "logs",
    "memory",
    "run.lock",
    "submitted.yaml",
    "job.sh",
    ".lease.json",
    ".from-store",
)
_OUTPUTS = (".err", ".log", ".out")  # where a shell, or a scheduler, sends output


@dataclass(frozen=True)
class RunFolder:
    """An opened run folder, and the checkpoint to resume from (None: start at step 1).

    Attributes:
        candidates: checkpoints to resume from, newest first; the first undamaged one becomes `resume`.
        asked: the user named the only candidate.
        origin: for a new run: the checkpoint that it forks.
        accepts_changes: the user has confirmed changes that affect training.
        author: this start, as named in its checkpoints; known once it is accepted.
        program: the run has a program's custom loop.
        mirror: sends its checkpoints to its store, if it has one.
    """

    path: Path
    resume: Checkpoint | None = None
    candidates: tuple[Checkpoint, ...] = ()
    asked: bool = False
    origin: Origin | None = None
    accepts_changes: bool = False
    author: Author | None = None
    program: bool = False
    mirror: Mirror | None = None

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def done(self) -> int:
        """The last step done before (0: none)."""
        return self.resume.step if self.resume is not None else 0

    @property
    def resumed_from(self) -> str | None:
        """The path of the checkpoint that the run resumes from."""
        return str(self.resume.path) if self.resume is not None else None

    @property
    def resumed_run(self) -> Path | None:
        """The folder of the run that this one resumes, its own or another's."""
        return self.resume.path.parents[1] if self.resume is not None else None

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path)

    @property
    def journal(self) -> Journal:
        return Journal(self.path)

    def to_values(self) -> Values:
        """Returns plain values from which other ranks open the same folder."""
        candidates = [[str(candidate.path), candidate.step] for candidate in self.candidates]
        origin = dataclasses.asdict(self.origin) if self.origin is not None else None
        kind = {"asked": self.asked, "program": self.program}
        return {"path": str(self.path), "candidates": candidates, "origin": origin, **kind}

    @classmethod
    def from_values(cls, values: Values) -> RunFolder:
        candidates = tuple(Checkpoint(Path(path), step) for path, step in values["candidates"])
        return cls(
            Path(values["path"]),
            None,
            candidates,
            values["asked"],
            Origin(**values["origin"]) if values["origin"] is not None else None,
            program=values["program"],
        )

    def resuming(
        self, chosen: Checkpoint | None, passed: Sequence[tuple[Checkpoint, str]]
    ) -> RunFolder:
        """Returns the folder with the chosen candidate.

        Args:
            passed: the candidates before it, with the damage of each.

        Raises:
            CheckpointError: all candidates are damaged; training must not start over on top of them.
        """
        if chosen is None and passed:
            if self.asked:
                raise damaged(*passed[0])
            raise CheckpointError(
                f"no checkpoint in {self.checkpoints.path} is undamaged: "
                + "; ".join(
                    f"{checkpoint.path.name}: {reason}" for checkpoint, reason in passed
                ),
                expected="at least one checkpoint as it was written; otherwise the run would restart at step 1",
                fix=f"restore one from a copy, or {Words(self.program).another()} for a new run",
            )
        return dataclasses.replace(self, resume=chosen)

    def claim(self) -> Identity:
        """Makes the folder one of a run, before anything else is written there; one rank calls it.

        Call this when nothing can refuse the request any more; until then, the folder is unchanged.
        """
        if (identity := Identity.read(self.path)) is None:
            identity = Identity.new(self.origin, program=self.program)
            identity.write(self.path)
        return identity

    def begin(self) -> Author:
        """Makes this start the next of the run's chain: from now on, later steps of earlier starts are superseded."""
        resumed = self.resume.checksum if self.resume is not None else None
        identity = self.claim().begin(self.done, resumed)
        identity.write(self.path)
        return identity.author

    def accept(self, config: Config, *, facts: Values | None = None) -> Values:
        """Makes the folder that of a start that has begun: its config, later checkpoints set aside; one rank calls it.

        The config of a program's run is the program, so none is kept.

        Args:
            facts: of this start, for the journal.

        Returns:
            `author`, as plain values, and `aside`: the new paths of the checkpoints later than the step that the run
            resumes from.
        """
        identity, step = self.claim(), self.done
        aside = self.checkpoints.set_aside_after(step) if self.resume is not None else []
        if self.resume is not None:
            self.checkpoints.forget_best_after(step)
        if not self.program:
            # A path to resume from was given once: the run that is here now is resumed.
            resume = {} if config.checkpoint.resume == "never" else {"resume": "auto"}
            keep_config(self.path, config.changed(checkpoint=resume))
        for folder in (self.path, self.path.resolve().parent):
            sync(folder)
        asked = config.checkpoint.resume
        named = (
            str(resume_choice.place_of(asked, self.path).resolve())
            if asked not in ("auto", "never")
            else None
        )
        author = dataclasses.asdict(identity.author)
        start = dataclasses.asdict(identity.starts[-1])
        self.journal.append(
            "start", **author, **start, asked=named, job=environment.job(), **(facts or {})
        )
        if aside:
            names = [path.name for path in aside]
            self.journal.append("rewind", start=identity.author.start, step=step, aside=names)
        return {"author": author, "aside": [str(path) for path in aside]}

    def refusal(self) -> ThreefoldError | None:
        """Why this start may save no more: the folder is not there any more, or another start has begun in it."""
        try:
            identity = Identity.read(self.path)
        except ConfigError as error:
            # A transient refusal of the file system will meet the save too, with `checkpoint.on_error`.
            return None if isinstance(error.__cause__, OSError) else error
        if identity and identity.author == self.author:
            return None
        what = "now belongs to another start"
        if not identity:  # or the program is in another folder now
            what = f"is not at {self.path.absolute()} any more"
        return RunError(
            f"the run's folder {self.path} {what}, while this start trained",
            expected="only its own metrics, audit and checkpoints in the folder that it began in",
            fix="threefold resume FOLDER   (its new path), and move a folder only after its run has ended",
        )

    def save_of(
        self, step: int, manifest: Values, *, keep: int, best: float | None = None
    ) -> Save:
        """The save of a step, here and in the run's store.

        Args:
            keep: how many checkpoints to keep afterwards.
            best: its evaluation loss, if it is the best so far.
        """
        from threefold.checkpoint.background_saver import Save

        checkpoints, mirror = self.checkpoints, self.mirror
        job = Save(
            step,
            checkpoints.partial(step) / "state",
            partial(checkpoints.begin, step),
            partial(self._commit, step, manifest, keep, best),
            partial(checkpoints.abandon, step),
            self.refusal,
        )
        if mirror is None:
            return job
        from threefold.places.mirror import Sent

        sent = partial(mirror.send, Sent(checkpoints.at(step).path, step))
        return dataclasses.replace(
            job, refusal=lambda: self.refusal() or mirror.refusal(), done=sent
        )

    def prune(self, keep: int) -> None:
        """Removes all but the newest checkpoints, the best, and those that are still being sent."""
        self.checkpoints.prune(keep, self.mirror.pinned() if self.mirror is not None else ())

    def _commit(
        self,
        step: int,
        manifest: Values,
        keep: int,
        best: float | None,
        seals: Mapping[str, Seal],
    ) -> None:
        """Completes the checkpoint of `step`, which every rank has written, and removes old ones; one rank calls it."""
        assert self.author is not None
        manifest = {**dataclasses.asdict(self.author), **manifest}
        for record in (self.metrics, self.path / AUDIT):
            if record.exists():
                # After a power cut, every checkpoint's steps have a record.
                sync(record)
        self.checkpoints.commit(step, manifest, seals)
        if best is not None:
            self.checkpoints.mark_best(step, best)
        self.prune(keep)
        if self.resume is not None and (fetched := self.resume.path.parents[1]).name.startswith(
            resume_choice.FETCHED
        ):
            # The run now has its own checkpoint.
            shutil.rmtree(fetched, ignore_errors=True)
        self.journal.note("save", step=step, start=self.author.start)


def keep_config(path: Path, config: Config) -> None:
    """Writes a run's config.yaml, with absolute paths."""
    write_whole(path / RUN_CONFIG, [config_text.dump(with_absolute_paths(config)).encode()])


def open_run(
    config: Config, lock: RunLock | None = None, *, program: bool = False
) -> RunFolder:
    """Makes or reopens the run's folder, with `lock`, and finds where the run may resume; one rank calls it.

    Args:
        program: for a program with a custom loop.

    Raises:
        ConfigError: the folder holds a run and `checkpoint.resume` is `never`, it holds another run than the one that
            is asked for or files that no run wrote, another process is using it, or it cannot be written.
        CheckpointError: a checkpoint given by path does not exist.
    """
    words = Words(program)
    refuse = partial(resume_choice.of, config, words=words)
    path = open_folder(config, lock, words, refuse)
    return RunFolder(path, None, *refuse(path), program=program)


def open_folder(
    config: Config, lock: RunLock | None, words: Words, refuse: Callable[[Path], object] = str
) -> Path:
    """Makes the run's folder or finds it, with `lock`; one rank calls it.

    Args:
        refuse: called with the folder before anything is made.

    Raises:
        ConfigError: as `open_run`, except for the checks on resuming.
    """
    path = checked_path(config, words, refuse)
    with _written(path, words):
        fresh = _made(path)
        if lock is not None:
            lock.take(path, fresh=fresh, at=words.at(path), other=words.another())
        (path / "logs").mkdir(exist_ok=True)
        CheckpointFolder(path).path.mkdir(exist_ok=True)
    return path


def checked_path(config: Config, words: Words, refuse: Callable[[Path], object]) -> Path:
    """The run's folder, which may be still to make; errors as of `open_folder`, but for the lock."""
    path = Path(config.log.dir) if config.log.dir is not None else new_path()
    with _written(path, words):
        with suppress(FileNotFoundError):
            path.stat()
        if not is_run(path):
            _refuse_inside(path, words)
            _refuse_filled(path, words)
        refuse_other_kind(path, words)
        refuse(path)
        above = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not os.access(above, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return path


@contextmanager
def _written(path: Path, words: Words) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{words.at(path)} cannot be written: {error.strerror}",
            expected="a folder that this user can write, with room for checkpoints",
            fix=words.another(),
        ) from error


def refuse_other_kind(path: Path, words: Words) -> None:
    """Raises ConfigError if a program is to continue what the command began, or the command what a program began."""
    identity = Identity.read(path)
    if identity is None or identity.program == words.program:
        return
    whose = "threefold train"
    fix = f"threefold resume {shell_word(path)}"
    if identity.program:
        whose = "a program with a custom loop (threefold.Run)"
        fix = "run that program again, which resumes it"
    raise ConfigError(
        f"{words.at(path)} holds a run of {whose}",
        expected="what began the run: its checkpoints fit nothing else",
        fix=f"{fix}; or, for a new run, {words.another()}",
    )


def _refuse_inside(path: Path, words: Words) -> None:
    """Raises ConfigError for a new folder in that of another run, which would be moved, copied and removed with it."""
    for parent in path.resolve().parents:
        if (parent / RUN_FILE).is_file():
            raise ConfigError(
                f"{words.at(path)} is inside the folder of another run: {parent}",
                expected="a folder outside it: everything in a run's folder is part of that run",
                fix=words.another(str(parent.parent / path.name)),
            )


def _refuse_filled(path: Path, words: Words) -> None:
    """Raises ConfigError for a folder with files that no run, and no job before it, has written."""
    others = [
        each.name
        for each in (sorted(path.iterdir()) if path.is_dir() else [])
        if each.name not in _NOT_YET_A_RUN
        and each.suffix not in _OUTPUTS
        # The second is of a start that ended while it was written.
        and not each.name.startswith((resume_choice.FETCHED, f".{RUN_FILE}"))
    ]
    if others:
        more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
        raise ConfigError(
            f"{words.at(path)} is not empty and holds no run: it has {', '.join(others[:3])}{more}",
            expected=f"a run's folder, or a new or empty one: a run writes {RUN_CONFIG}, logs and much more there",
            fix=words.another(str(new_path())),
        )


def _made(path: Path) -> bool:
    """Makes a folder; returns whether this call made it."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        return False
    return True


def new_path() -> Path:
    """Returns a new folder for a run without log.dir, named after the time."""
    stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    paths = (
        Path("runs") / name
        for name in chain([stamp], (f"{stamp}-{number}" for number in count(2)))
    )
    return next(path for path in paths if not path.exists())


class _LogFile(logging.FileHandler):
    """A log that never fails loudly: on a full disk its lines are dropped; other write failures are reported."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def log_to_file(path: Path, rank: int) -> Callable[[], None]:
    """Sends this rank's log records to logs/rank-NNNN.log, until the returned function is called."""
    handler = _LogFile(path / "logs" / f"rank-{rank:04d}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("threefold", "py.warnings"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    logging.getLogger(LOG_START).info("%s", json.dumps({"process": os.getpid()}))

    def end() -> None:
        for name in ("threefold", "py.warnings"):
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).propagate = True
        handler.close()

    return end


def require_shared(folder: Path, mesh: Mesh, words: Words) -> None:
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
        mesh.decide("shared folder", blind, lambda parts: _judge(folder, parts, words))
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


def _judge(folder: Path, parts: list[str], words: Words) -> str:
    if blind := sorted({part for part in parts if part}):
        raise ConfigError(
            f"{words.at(folder)} on {' and '.join(blind)} is not the folder that rank 0 writes to",
            expected="one folder that all hosts share: each rank writes its part of a checkpoint there",
            fix=f"{words.another('FOLDER_ON_A_SHARED_FILE_SYSTEM')}   (NFS, Lustre, EFS)",
        )
    return ""
