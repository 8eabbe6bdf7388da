"""A run that is also kept in a store (`checkpoint.store`), or resumes from one: what `places` sends and fetches.

Everything is fetched into the run's folder before it is opened, so that resuming, comparing and forking work as on
disk.
"""

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from threefold.checkpoint.checkpoint_folder import Checkpoint, CheckpointFolder
from threefold.checkpoint.lineage import Identity
from threefold.checkpoint.lock import RunLock, Words
from threefold.checkpoint.seal import wrong_sizes
from threefold.config.paths import AUDIT, JOURNAL, METRICS, RUN_CONFIG, RUN_FILE, is_run
from threefold.config.schema import Config
from threefold.errors import CheckpointError, ConfigError
from threefold.jsonl import Values
from threefold.mesh import environment
from threefold.mesh.mesh import Mesh
from threefold.places import mirror
from threefold.places.admission import require_admitted
from threefold.places.head import KEY, HeldHead
from threefold.places.lease import give_back, take_lease
from threefold.places.mirror import Mirror, Sent, SentFiles
from threefold.places.object_store import ObjectStore, open_store
from threefold.places.restore import (
    Restore,
    checkpoints_of,
    forget_interrupted,
    nothing,
    parted,
    restore,
)
from threefold.places.snapshot import RECORDS, STATE
from threefold.places.url import parse
from threefold.run import resume_choice
from threefold.run.folder import RunFolder, open_folder, require_shared

# Files of a run's folder that a start elsewhere continues, or is compared with.
_FILES = (
    METRICS,
    JOURNAL,
    AUDIT,
    RUN_CONFIG,
    "samples.jsonl",
    "chat_template.jinja",
    "data.files.jsonl",
)
_FOLDERS = ("rows", "lengths", "blocks", "reference")
# Files of a forked run, beside the checkpoint.
_OF_FORK = ("reference/", "chat_template.jinja")
_RANK = re.compile(r"state/rank-(\d+)")


class StoredRun:
    """The copy of a run in a store. Every rank has one and calls it in the same way.

    Attributes:
        mirror: sends its checkpoints.
    """

    def __init__(self, mesh: Mesh, folder: Path, config: Config, held: HeldHead | None) -> None:
        """Args: `held`: the head, on rank 0."""
        asked = config.checkpoint
        self._mesh = mesh
        self._folder = folder
        self._held = held
        store = mesh.store.clone() if mesh.store is not None else dist.HashStore()
        values = dist.PrefixStore(
            f"threefold/stored/{mesh.share('stored', lambda: uuid.uuid4().hex)}", store
        )
        self.mirror = Mirror(
            mesh,
            values,
            _place(str(asked.store)),
            keep=asked.keep,
            continue_on_error=asked.on_error == "continue",
            held=held,
            run=self,
        )

    def begun(self, folder: RunFolder) -> None:
        """Makes the head that of a start which has been accepted; rank 0 calls it."""
        identity = Identity.read(folder.path)
        assert identity is not None
        mirror.begin(self.mirror.held, asdict(identity), folder.done)

    def send_if_missing(self, folder: RunFolder) -> None:
        """Sends the run's checkpoint that it resumes from, if a killed upload left it out; every rank calls it."""
        resume = folder.resume
        if resume is None or resume.path.parent != folder.checkpoints.path:
            return

        def stored() -> bool:
            return _name(resume) in {each.name for each in self.mirror.held.head.checkpoints}

        if not self._mesh.share("stored", stored):
            self.mirror.send(Sent(resume.path, resume.step))

    def close(self) -> None:
        """Gives the lease back, on rank 0."""
        if self._held is not None:
            give_back(self._held, self._folder)

    def best(self) -> int | None:
        """The step of its best checkpoint so far, if there is one."""
        return (CheckpointFolder(self._folder).best() or (None,))[0]

    def contents(self, sent: Sent) -> SentFiles:
        """Each rank sends what it wrote, as far as there are as many ranks as when it was written."""
        checkpoint = Checkpoint(sent.folder, sent.step)
        folder = self._folder
        files = {}
        for name, seal in checkpoint.seals().items():
            match = _RANK.match(name)
            rank = int(match[1]) % self._mesh.world_size if match else 0
            files[STATE + name] = (rank, seal.size_bytes, seal.checksum)
        records = [folder / name for name in _FILES]
        records += [path for name in _FOLDERS for path in sorted((folder / name).rglob("*"))]
        others = {STATE + name: sent.folder / name for name in ("manifest.json", "COMPLETE")}
        for path in records:
            if path.is_file() and not path.is_symlink() and path.suffix != ".tmp":
                others[RECORDS + path.relative_to(folder).as_posix()] = path
        return SentFiles(_name(checkpoint), files, others)


def _name(checkpoint: Checkpoint) -> str:
    """Equal for equal checkpoints alone: the manifest holds the start and all checksums."""
    return f"{checkpoint.path.name}-{(checkpoint.checksum or '')[:12]}"


def _place(address: str) -> ObjectStore:
    return open_store(address, environment.variables())


@dataclass(frozen=True)
class _Plan:
    """The run's folder, `checkpoint.resume` for it, and what is fetched before, from which address."""

    folder: str
    resume: str
    address: str = ""
    restore: Restore | None = None


def open_stored(
    config: Config, mesh: Mesh, lock: RunLock, *, program: bool, say: Callable[[str], None]
) -> tuple[Config, StoredRun | None]:
    """Takes the lease of `checkpoint.store`, and fetches what the run resumes from, if a store is ahead of the folder.

    Every rank calls it, before the run's folder is opened.

    Returns:
        The config with the folder and what to resume there; the run's copy in the store, if any.

    Raises:
        ConfigError: another run has the lease, or the store and the folder hold different runs. CheckpointError:
            there is no checkpoint, or none is whole.
    """
    held: list[tuple[HeldHead, Path]] = []
    try:
        plan = mesh.share(
            "store", lambda: asdict(_planned(config, lock, held, Words(program), say))
        )
        require_shared(Path(plan["folder"]), mesh, Words(program))
        if plan["restore"] is not None:
            restore(Restore(**_tuples(plan["restore"])), _place(plan["address"]), mesh, say)
    except BaseException:
        for each, folder in held:
            give_back(each, folder)
        raise
    config = config.changed(log={"dir": plan["folder"]}, checkpoint={"resume": plan["resume"]})
    if config.checkpoint.store is None:
        return config, None
    return config, StoredRun(mesh, Path(plan["folder"]), config, held[0][0] if held else None)


def _tuples(values: Values) -> Values:
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
    }


def _planned(
    config: Config,
    lock: RunLock,
    held: list[tuple[HeldHead, Path]],
    words: Words,
    say: Callable[[str], None],
) -> _Plan:
    folder = open_folder(config, lock, words)
    asked = config.checkpoint.resume
    store = None
    forget_interrupted(folder, begun=(folder / RUN_FILE).exists())
    prefix, name = parted(asked) if "://" in asked else ("", None)
    if config.checkpoint.store is not None:
        store = str(parse(config.checkpoint.store))
        require_admitted(
            store, environment.variables(), environment.cache_folder() / "admission", say
        )
        held.append((take_lease(_place(store), folder, say), folder))
        plan = _of_own(held[0][0], folder, asked, prefix == store, name, words)
        mirror.sweep(held[0][0])
        if plan.restore is not None or prefix in ("", store):
            return plan
    into = resume_choice.place_of(asked, folder)
    if into.exists() or resume_choice.asked_before(folder, into, Identity.read(folder)):
        return _Plan(str(folder), asked)
    candidates = checkpoints_of(_place(prefix), name)
    return _Plan(
        str(folder), asked, prefix, Restore(candidates, str(into), whole=True, records=_OF_FORK)
    )


def _of_own(
    held: HeldHead, folder: Path, asked: str, named_here: bool, name: str | None, words: Words
) -> _Plan:
    """What the run in a folder needs from its own store.

    Raises:
        ConfigError: the store holds another run, or this one after it has continued elsewhere.
    """
    place = held.place
    identity = Identity.read(folder)
    stored = _identity_in(held)
    if stored is None:
        if named_here:
            raise nothing(place)
        return _Plan(str(folder), asked)
    fresh = identity is None and not is_run(folder)
    if fresh and asked != "auto" and not named_here:
        raise ConfigError(
            f"checkpoint.store = {place.url} holds a run, and checkpoint.resume is {asked}",
            expected="an empty prefix for a new run",
            fix=f"--checkpoint.store ANOTHER_PREFIX   (or {words.resume('auto')} to resume the existing run)",
        )
    if identity is not None:
        _refuse_parted(identity, stored, folder, place, words)
    entries = [each for each in reversed(held.head.checkpoints) if name in (None, each.name)]
    if name is not None and not entries:
        raise nothing(place, name)
    resume = "auto" if named_here else asked
    if name is not None:
        resume = str(CheckpointFolder(folder).at(entries[0].step).path)
        if _name(CheckpointFolder(folder).at(entries[0].step)) == name:  # it is here, too
            return _Plan(str(folder), resume)
    newest = _newest_whole(folder) if name is None else 0
    candidates = [(each.name, each.seal) for each in entries if each.step > newest]
    if not candidates or not (named_here or asked == "auto"):
        return _Plan(str(folder), resume)
    files = ((RUN_FILE, json.dumps(asdict(stored)) + "\n"),) if fresh else ()
    records = ("",) if fresh else ()
    fetched = Restore(
        candidates, str(folder), records=records, files=files, required=not newest
    )
    return _Plan(str(folder), resume, str(place.url), fetched)


def _identity_in(held: HeldHead) -> Identity | None:
    if held.head.identity is None:
        return None
    try:
        return Identity.of(held.head.identity)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{held.place.url}/{KEY} names no run: {error!r}",
            expected="the run's id and its starts as they were written",
            fix="--checkpoint.store ANOTHER_PREFIX",
        ) from error


def _refuse_parted(
    own: Identity, stored: Identity, folder: Path, place: ObjectStore, words: Words
) -> None:
    """Raises ConfigError unless a folder holds the run that the store does, and all of its starts."""
    if own.id == stored.id and own.starts[: len(stored.starts)] == stored.starts:
        return
    what = f"{folder} holds run {own.id[:8]}, and checkpoint.store = {place.url} run {stored.id[:8]}"
    if own.id == stored.id:
        what = f"the run in {folder} has continued elsewhere, according to checkpoint.store = {place.url}"
    raise ConfigError(
        what,
        expected="the same run in both: the store would not continue the folder's run",
        fix=f"{words.another()} to continue from the store; or --checkpoint.store ANOTHER_PREFIX for the folder's run",
    )


def _newest_whole(folder: Path) -> int:
    """The step of the folder's newest checkpoint that has all of its bytes; 0: none."""
    for each in reversed(CheckpointFolder(folder).complete()):
        try:
            whole = wrong_sizes(each.path, each.seals()) is None
        except CheckpointError:
            whole = False
        if whole:
            return each.step
    return 0
