"""From a store to a run's folder: all ranks fetch a checkpoint, each a share of the bytes.

It is then in the folder like one that was saved there. Every byte is read once over all ranks, and compared before the
checkpoint gets its name. A folder that a killed start was filling is filled again by the next.
"""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from threefold.errors import CheckpointError, size_text
from threefold.places import snapshot
from threefold.places.faults import MissingObject
from threefold.places.head import CHECKPOINTS, KEY, read_head
from threefold.places.mirror import RanksOfRun
from threefold.places.object_store import ObjectStore
from threefold.places.snapshot import RECORDS, STATE, Snapshot, StoredDamage
from threefold.places.url import parse

STAGING = ".from-store"
_MOVING = "moving"
_IN_CHECKPOINTS = re.compile(rf"(.+)/{CHECKPOINTS}/([\w.-]+)")


@dataclass(frozen=True)
class Restore:
    """The data to fetch, as plain values for all ranks.

    Attributes:
        candidates: names and checksums of seals (None: unknown), the nearest first.
        into: the run's folder, or a new one that gets its name when it is whole.
        whole: `into` is a new folder.
        state: the checkpoint is fetched, beside the records.
        records: the run's records to fetch, by prefixes of their names.
        files: small files that are written last, by name: what makes the folder a run's.
        required: nothing else can be resumed.
    """

    candidates: Sequence[tuple[str, str | None]]
    into: str
    whole: bool = False
    state: bool = True
    records: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    required: bool = True

    @property
    def staging(self) -> Path:
        into = Path(self.into)
        return into.with_name(f"{into.name}.partial") if self.whole else into / STAGING

    def wants(self, file: str) -> bool:
        return file.startswith(
            (STATE,) * self.state + tuple(RECORDS + each for each in self.records)
        )


def parted(address: str) -> tuple[str, str | None]:
    """A run's prefix, and the name of one checkpoint, if the address has one."""
    address = str(parse(address))
    match = _IN_CHECKPOINTS.fullmatch(address)
    return (match[1], match[2]) if match else (address, None)


def checkpoints_of(place: ObjectStore, name: str | None) -> list[tuple[str, str | None]]:
    """Names and seals of a run's checkpoints, the newest first; a named one needs no head.

    Raises:
        CheckpointError: there is no run.
    """
    if name is not None:
        return [(name, None)]
    current = read_head(place)
    if current is None or not current[0].checkpoints:
        raise nothing(place)
    return [(each.name, each.seal) for each in reversed(current[0].checkpoints)]


def restore(
    wanted: Restore, place: ObjectStore, ranks: RanksOfRun, say: Callable[[str], None]
) -> None:
    """Fetches the first candidate that is whole; every rank calls it.

    Args:
        say: receives lines about what was skipped and read.

    Raises:
        StoredDamage: none is whole, and nothing else can be resumed.
    """
    problems = []
    for name, checksum in wanted.candidates:
        if (problem := _fetched(wanted, place, name, checksum, ranks, say)) is None:
            return
        say(f"skipped {place.url}/{CHECKPOINTS}/{name}: {problem}")
        problems.append(problem)
    if wanted.required and problems:
        raise StoredDamage(
            problems[0],
            expected="a checkpoint as it was written, which its checksums show",
            fix=f"{place.url}/{CHECKPOINTS}/NAME instead, another one of those listed in {place.url}/{KEY}",
        )


@contextmanager
def beating(tick: Callable[[], object]) -> Iterator[None]:
    """Calls `tick` about once a second while the block runs: requests end by themselves, and may take long together."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(1.0):
            tick()

    threading.Thread(target=beat, name="threefold-restore", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _fetched(
    wanted: Restore,
    place: ObjectStore,
    name: str,
    checksum: str | None,
    ranks: RanksOfRun,
    say: Callable[[str], None],
) -> str | None:
    """Fetches one checkpoint, compares it and moves it into place; returns its damage, if any."""
    staging, share = wanted.staging, (ranks.rank, ranks.world_size)

    def begin() -> dict[str, Any]:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        return snapshot.read_seal(place, name, checksum).only(wanted.wants).to_values()

    begun = ranks.share("seal", lambda: _tried(begin))
    if "problem" in begun:
        return str(begun["problem"])
    files = Snapshot.of(begun["value"])
    say(f"fetching step {files.step} from {place.url}")
    read = ranks.decide_on(
        "fetched",
        lambda: _tried(lambda: snapshot.fetch(place, files, staging, share=share)),
        list,
    )
    if problem := next((each["problem"] for each in read if "problem" in each), None):
        return str(problem)
    compared = ranks.decide_on(
        "compared", lambda: snapshot.damage(place, files, staging, share=share), list
    )
    if problem := next(filter(None, compared), None):
        return str(problem)
    most = max(each["value"] for each in read)
    ranks.share("restored", lambda: _move(wanted, files.step))
    say(f"fetched {size_text(files.num_bytes)} in all; the most by one rank: {size_text(most)}")
    return None


def _tried(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except (StoredDamage, MissingObject) as error:
        return {"problem": error.problems[0].what}


def _move(wanted: Restore, step: int) -> None:
    """Gives what was fetched its places; one rank calls it."""
    staging = wanted.staging
    into = staging if wanted.whole else Path(wanted.into)
    final = into / CHECKPOINTS / f"step-{step:08d}"
    final.parent.mkdir(exist_ok=True)
    names = sorted(os.listdir(staging / RECORDS)) if (staging / RECORDS).is_dir() else []
    if wanted.files:
        (staging / _MOVING).write_text(json.dumps({"names": names, "checkpoint": final.name}))
    for name in names:
        os.replace(staging / RECORDS / name, into / name)
    if final.exists():  # damaged, or left behind
        targets = (final.with_name(f"aside-{number}-{final.name}") for number in count(1))
        final.rename(next(target for target in targets if not target.exists()))
    if wanted.state:
        os.replace(staging / STATE, final)
    for name, text in wanted.files:
        (staging / name).write_text(text)
        os.replace(staging / name, into / name)
    if wanted.whole:
        os.replace(staging, wanted.into)
    else:
        shutil.rmtree(staging)


def is_restored(files: Snapshot, into: Path) -> bool:
    """Whether the files of a snapshot have the places that `restore` gives them, and are those that were sent."""
    checkpoint = into / CHECKPOINTS / f"step-{files.step:08d}"
    try:
        return all(
            snapshot.digest(
                (checkpoint if name.startswith(STATE) else into) / name.partition("/")[2]
            )
            == sent.checksum
            for name, sent in files.files.items()
        )
    except OSError:
        return False


def forget_interrupted(folder: Path, *, begun: bool) -> None:
    """Removes what a start has fetched into a folder, if it was killed before all had its place.

    Args:
        begun: the folder is a run's: all that has its place is whole.
    """
    staging = folder / STAGING
    if (moving := staging / _MOVING).is_file() and not begun:
        with suppress(ValueError):
            moved = json.loads(moving.read_text())
            shutil.rmtree(folder / CHECKPOINTS / moved["checkpoint"], ignore_errors=True)
            for name in moved["names"]:
                path = folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(staging, ignore_errors=True)


def nothing(place: ObjectStore, name: str | None = None) -> CheckpointError:
    """The error for a prefix without a checkpoint, or without that of a name."""
    return CheckpointError(
        f"{place.url} holds {f'no checkpoint {name}' if name else 'no checkpoint of a run'}",
        expected=f"the prefix of a run with checkpoint.store, or PREFIX/{CHECKPOINTS}/NAME below one",
        fix=f"check the address; {place.url}/{KEY} lists what a run has kept",
    )
