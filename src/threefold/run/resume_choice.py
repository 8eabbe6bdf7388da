"""Where a run resumes: decided by the request and the history of the folder's run, never by names alone.

A fork is accepted once: from then on the run resumes itself, whatever command started it. Going back to one of
its own checkpoints is repeated when a person asks again, and not when the same job is restarted or requeued.
"""

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from threefold.checkpoint.checkpoint_folder import Checkpoint, CheckpointFolder, find, others
from threefold.checkpoint.lineage import Identity, Journal, Origin
from threefold.checkpoint.lock import Words
from threefold.checkpoint.seal import checksum_of
from threefold.config.paths import METRICS, RUN_FILE, is_run
from threefold.config.schema import Config
from threefold.errors import CheckpointError, ConfigError
from threefold.jsonl import utc_now
from threefold.mesh import environment

_COMMAND = Words()
# Prefix of folders with checkpoints of other runs, fetched from a store.
FETCHED = ".fork-of-"


class Choice(NamedTuple):
    """The checkpoints to resume from, newest first; whether the user named one; the origin of a run that it forks."""

    candidates: tuple[Checkpoint, ...] = ()
    asked: bool = False
    origin: Origin | None = None


def of(config: Config, path: Path, words: Words = _COMMAND) -> Choice:
    """Where the run in a folder may resume, as the request asks and the folder's own history allows.

    Args:
        words: the caller's terms, for errors.

    Raises:
        ConfigError: the folder holds a run and `checkpoint.resume` is `never`, another run than the one asked for, a
            checkpoint of another timeline, or a run's files without run.json.
        CheckpointError: a checkpoint given by path does not exist.
    """
    checkpoints = CheckpointFolder(path)
    identity = Identity.read(path)
    asked = config.checkpoint.resume
    if identity is None and is_run(path):
        raise unnamed(path, words)
    if foreign := checkpoints.foreign():
        raise ConfigError(
            f"{words.at(path)} has a checkpoint that {writer(foreign[0], identity)} wrote: {foreign[0].path.name}",
            expected="checkpoints of one run in a folder, by the starts in its run.json: a resume would mix two",
            fix=f"move it out of {checkpoints.path}; to fork it: {words.resume(foreign[0].path, 'ANOTHER_FOLDER')}",
        )
    own = tuple(each for each in reversed(checkpoints.own()) if checkpoints.stands(each))
    if asked == "never" and not _was_restarted(path, own):
        if (path / METRICS).exists() or own:
            raise ConfigError(
                f"{words.at(path)} holds a run, and checkpoint.resume is never",
                expected="an empty folder, so that no earlier run is mixed into this one",
                fix=f"{words.another()}   (or {words.resume('auto')} to resume it)",
            )
        return Choice()
    named, place = None, place_of(asked, path)
    if asked not in ("auto", "never") and not asked_before(path, place, identity):
        named = _named(place)
        origin = _origin(named)
        _refuse_left(named, identity, words)
        if not _taken_up(path, named, origin, identity, own, words):
            return Choice((named,), True, None if _is_own(named, path, identity) else origin)
    if (
        not own
        and named is None
        and any(line["event"] == "save" for line in Journal(path).lines())
    ):
        raise CheckpointError(
            f"{words.at(path)} holds a run that has saved checkpoints, and none of them is left",
            expected="at least one of them: otherwise the run would restart at step 1",
            fix=f"restore one from a copy, or {words.another()} for a new run",
        )
    if not own and identity is not None and identity.origin is not None:
        # A fork that has not saved yet.
        return Choice((named or _at_its_place(identity.origin, path, words),), True)
    return Choice(own)


def place_of(asked: str, run: Path) -> Path:
    """Where the requested checkpoint is; one in a store is fetched into the run's folder."""
    return (
        run / f"{FETCHED}{checksum_of(asked.encode())[:8]}" if "://" in asked else Path(asked)
    )


def unnamed(path: Path, words: Words = _COMMAND) -> ConfigError:
    """The error for a run's files without the file that identifies the run."""
    what = f"{path} has a run's files, but no {RUN_FILE} that names the run"
    expected = f"{RUN_FILE}, which a run's folder has from its first start: a copy may have left it out"
    journal = Journal(path)
    authors = [each.author for each in CheckpointFolder(path).all()]
    starts = [line.get("run") for line in journal.starts()]
    ids = sorted(
        {
            str(run)
            for run in (*starts, *(author.run for author in authors if author is not None))
            if run
        }
    )
    fix = f"{words.another()}   (its files name {' and '.join(ids) or 'no run'})"
    if len(ids) == 1:
        values = {"id": ids[0], "created": utc_now(), "origin": None, "starts": journal.chain()}
        with suppress(ValueError, KeyError, TypeError):
            identity = Identity.of(values)
            if all(author is None or identity.has(author) for author in authors):
                # Text to paste, so that a person decides that these files are of one run.
                file = shlex.quote(str(path / RUN_FILE))
                fix = f"echo {shlex.quote(json.dumps(values))} > {file}   # the run that its files name"
    return ConfigError(what, expected=expected, fix=fix)


def writer(checkpoint: Checkpoint, identity: Identity | None) -> str:
    """The writer of a checkpoint that is not of the run in the folder."""
    author = checkpoint.author
    if author is None:
        return "no run"
    if identity is None or author.run != identity.id:
        return "another run"
    return f"start {author.start} of a copy of this run, which has diverged,"


def _origin(of: Checkpoint) -> Origin:
    author = of.author
    return Origin(
        str(of.path.resolve()), of.step, author.run if author is not None else None, of.checksum
    )


def _at_its_place(origin: Origin, path: Path, words: Words) -> Checkpoint:
    """The checkpoint that a fork came from, at its original place.

    Raises:
        CheckpointError: there is another one, or none.
    """
    place, what = Path(origin.path), "is gone"
    if place.exists():
        checkpoint = find(place)
        if origin.is_same(now := _origin(checkpoint)):
            return checkpoint
        what = f"is another checkpoint now, of {f'run {now.run}' if now.run else 'no run'}"
    raise CheckpointError(
        f"{words.at(path)} forks step {origin.step} of run {origin.run}, and {place} {what}",
        expected="the checkpoint that the run forks: it has saved none of its own yet",
        fix=f"{words.resume('WHERE_IT_LIES_NOW')}   (or {words.resume(place, 'ANOTHER_FOLDER')})",
    )


def _named(asked: Path) -> Checkpoint:
    if not asked.exists():
        raise CheckpointError(
            f"checkpoint.resume = {asked} does not exist",
            expected="auto, never, or the folder of a run or of one of its checkpoints",
            fix=f"check the path; {others(asked)}",
        )
    return find(asked)


def _is_own(named: Checkpoint, path: Path, identity: Identity | None) -> bool:
    """Whether a checkpoint is of the run in the folder: it is in it, or is a copy."""
    inside = named.path.resolve().parent == CheckpointFolder(path).path.resolve()
    return inside or (
        identity is not None and (author := named.author) is not None and identity.has(author)
    )


def _refuse_left(named: Checkpoint, identity: Identity | None, words: Words) -> None:
    """Raises ConfigError for a checkpoint of the run's own that an earlier return to an older step has left behind."""
    author = named.author
    if (
        identity is None
        or author is None
        or not identity.has(author)
        or identity.stands(author, named.step)
    ):
        return
    later = enumerate(identity.starts[author.start :], author.start + 1)
    number, back = next(
        (number, start.step) for number, start in later if start.step < named.step
    )
    raise ConfigError(
        f"checkpoint.resume = {named.path} is abandoned: start {number} of the run went back to step {back}",
        expected=f"a checkpoint of the run's current history: its records after step {back} are from later starts",
        fix=f"{words.resume(named.path, 'ANOTHER_FOLDER')}   to fork it",
    )


def asked_before(path: Path, asked: Path, identity: Identity | None) -> bool:
    """Whether an earlier start did what `checkpoint.resume` asks: a fork once, a return to an own one once a job.

    By its path, for the checkpoint itself may have been removed since.
    """
    starts = Journal(path).starts()
    resolved = os.path.realpath(asked)  # unlike `resolve`, for a link to itself too
    if (
        identity is not None
        and identity.origin is not None
        and starts
        and starts[0].get("asked") == resolved
    ):
        return True
    return _was_restarted(path, ()) and starts[-1].get("asked") == resolved


def _taken_up(
    path: Path,
    named: Checkpoint,
    origin: Origin,
    identity: Identity | None,
    own: Sequence[Any],
    words: Words,
) -> bool:
    """Whether the run in the folder is the fork of the named checkpoint that is asked for.

    Raises:
        ConfigError: the folder holds a run that does not come from there.
    """
    if _is_own(named, path, identity):
        return False
    forked_from = identity.origin if identity is not None else None
    taken = forked_from is not None and forked_from.is_same(origin)
    if not taken and (own or identity is not None or (path / METRICS).exists()):
        raise ConfigError(
            f"{words.at(path)} holds a run, and {writer(named, identity)} wrote checkpoint.resume = {named.path}",
            expected="a new folder for the fork: two runs would be mixed in this one",
            fix=f"{words.another()}   (or {words.resume('auto')} to resume the existing run)",
        )
    return taken


def _was_restarted(path: Path, own: Sequence[Checkpoint]) -> bool:
    """Whether an earlier start of this very job, before a restart or a requeue, has made the folder's run."""
    if (job := environment.restarted_job()) is None:
        return bool(own) and environment.current().restart > 0
    last = next(reversed(Journal(path).starts()), None)
    return last is not None and last.get("job") == job
