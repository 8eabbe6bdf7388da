"""Folders of a run sent to a store in the background: every rank its files, rank 0 the seal, last.

A thread of each rank sends, and no step waits for it. At most one folder is sent and one waits, so a store that is
slower than the saves gets the newest and the best. The threads communicate through their own key-value store, never by
a collective.
"""

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from threefold.errors import (
    CheckpointError,
    RunError,
    ThreefoldError,
    described_error,
    error_of,
)
from threefold.places import snapshot
from threefold.places.head import (
    CHECKPOINTS,
    KEY,
    HeldHead,
    LeaseLost,
    RunHead,
    StoredCheckpoint,
)
from threefold.places.object_store import ObjectStore
from threefold.places.snapshot import PIECE_BYTES, Snapshot, StoredFile

log = logging.getLogger("threefold")

_LONGEST = timedelta(days=2)


class UploadError(RunError):
    """A checkpoint is not in the store; all ranks raise it."""


class RanksOfRun(Protocol):
    """The ranks of a mesh, and values that one of them makes for all."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def share(self, name: str, make: Callable[[], Any]) -> Any: ...
    def decide_on(
        self, name: str, make: Callable[[], Any], conclude: Callable[[list[Any]], Any]
    ) -> Any: ...


@dataclass(frozen=True)
class Sent:
    """A folder to be sent.

    Attributes:
        folder: complete, and unchanged while it is `pinned`.
        step: that it is the state of.
    """

    folder: Path
    step: int


@dataclass(frozen=True)
class SentFiles:
    """Rank 0's description of a folder before all ranks send it.

    Attributes:
        name: equal for equal folders alone.
        files: for all ranks: the sending rank, size and xxh3 of each, by name.
        others: files that rank 0 also sends: the path of each by its name in the store.
    """

    name: str
    files: Mapping[str, tuple[int, int, str]]
    others: Mapping[str, Path]


class SentRun(Protocol):
    """What is known of a run on disk."""

    def contents(self, sent: Sent) -> SentFiles: ...
    def best(self) -> int | None:
        """The step of its best checkpoint so far, if there is one."""


class Mirror:
    """The copy of a run's checkpoints in a store. Every rank has one and calls it in the same way."""

    def __init__(
        self,
        ranks: RanksOfRun,
        values: Any,
        place: ObjectStore,
        *,
        keep: int,
        continue_on_error: bool,
        held: HeldHead | None,
        run: SentRun,
    ) -> None:
        """Args:
        values: a key-value store that all ranks reach, for this alone: set, get, wait and delete_key.
        keep: newest checkpoints that are kept there, besides the best.
        continue_on_error: an upload that fails is printed, and the run continues.
        held: the head, on rank 0.
        run: asked by rank 0 before a folder is sent.
        """
        self.place, self._ranks, self._values = place, ranks, values
        self._keep, self._continue, self._held = keep, continue_on_error, held
        self._run = run
        self._lock, self._waiting, self._sending = threading.Lock(), list[Sent](), list[Sent]()
        self._thread: threading.Thread | None = None
        self._failure: ThreefoldError | None = None
        self._number = 0

    @property
    def held(self) -> HeldHead:
        """The head; rank 0 has it."""
        assert self._held is not None
        return self._held

    def send(self, sent: Sent) -> None:
        """Sends a complete folder behind the steps; every rank calls it, and none waits."""
        with self._lock:
            self._waiting.append(sent)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="threefold-upload", daemon=True
                )
                self._thread.start()

    def pinned(self) -> list[int]:
        """The steps whose folders are not to be removed yet."""
        with self._lock:
            return [each.step for each in (*self._waiting, *self._sending)]

    def refusal(self) -> ThreefoldError | None:
        """Why the run is to end before its next save: its lease was taken, or an upload failed; on rank 0."""
        return self.held.lost or self._failure

    def join(self, timeout_s: float) -> None:
        """Waits for an upload, in a run that fails for another reason."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)

    def wait(self, tick: Callable[[], object]) -> None:
        """Waits until nothing is being sent; calls `tick` about once a second meanwhile.

        Raises:
            ThreefoldError: an upload failed, on every rank.
        """
        while (thread := self._thread) is not None:
            thread.join(1.0)
            tick()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            with self._lock:
                self._sending.clear()
                if not self._waiting:
                    self._thread = None
                    return
                sent = self._waiting.pop(0)
                later = bool(self._waiting)
                self._sending.append(sent)
                self._number += 1
            try:
                error = self._together(str(self._number), sent, later)
            except BaseException as raised:  # the ranks' store is gone, and with it the run
                log.exception("the upload of step %d", sent.step)
                error = described_error(raised)
            if error is not None:
                self._failed(error_of(error, "an upload"), sent.step)

    def _failed(self, error: ThreefoldError, step: int) -> None:
        if not isinstance(error, LeaseLost):
            problem = error.problems[0]
            what = f"the checkpoint of step {step} is saved but not stored: {problem.what}"
            error = UploadError(what, expected=problem.expected, fix=problem.fix)
            error.phase, error.step, error.ranks = "save", step, (0,)
        log.error("%s", error)
        if isinstance(error, LeaseLost) or not self._continue:
            self._failure = self._failure or error
        elif self._ranks.rank == 0:
            print(error, file=sys.stderr)

    def _together(self, key: str, sent: Sent, later: bool) -> dict[str, Any] | None:
        """Sends one folder; returns rank 0's conclusion: the description of an error, or None."""
        values, rank, contents = self._values, self._ranks.rank, list[SentFiles]()
        if rank == 0:
            opening = _attempt(lambda: self._announced(sent, contents, later))
            values.set(f"{key}/begun", json.dumps(opening))
        values.wait([f"{key}/begun"], _LONGEST)
        if (begun := json.loads(values.get(f"{key}/begun"))) is None:
            log.info("step %d is not stored: a later checkpoint waits", sent.step)
            return None
        if "class" not in begun:
            values.set(
                f"{key}/sent/{rank}",
                json.dumps(_attempt(lambda: self._send(begun, sent.folder))),
            )
        if rank == 0:
            error = (
                begun
                if "class" in begun
                else _attempt(lambda: self._conclude(key, contents[0], sent))
            )
            values.set(f"{key}/ended", json.dumps(error))
        values.wait([f"{key}/ended"], _LONGEST)
        ended = json.loads(values.get(f"{key}/ended"))
        return ended if "class" in ended else None

    def _announced(
        self, sent: Sent, contents: list[SentFiles], later: bool
    ) -> dict[str, Any] | None:
        # A later one is nearer to where the run is; the best is left out for a better one only.
        if later and sent.step != self._run.best():
            return None
        contents.append(self._run.contents(sent))
        return {"name": contents[0].name, "files": contents[0].files}

    def _send(self, begun: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Sends this rank's files; returns what was sent, by name."""
        sent = dict[str, StoredFile]()
        for file, (rank, size, checksum) in begun["files"].items():
            if rank != self._ranks.rank:
                continue
            path = folder / file.removeprefix(snapshot.STATE)
            sent[file] = snapshot.send(self.place, begun["name"], file, path)
            if (sent[file].size, sent[file].checksum) != (size, checksum):
                raise RunError(
                    f"{path} has changed since it was saved",
                    expected="the bytes that the checkpoint was sealed with",
                    fix="check the disk and what else writes there; earlier checkpoints are in the store",
                )
        return {file: asdict(each) for file, each in sent.items()}

    def _conclude(self, key: str, contents: SentFiles, sent: Sent) -> dict[str, Any]:
        """Collects what every rank has sent, adds the other files, seals, and adds the checkpoint to the head."""
        files: dict[str, Any] = {}
        for rank in range(self._ranks.world_size):
            self._values.wait([f"{key}/sent/{rank}"], _LONGEST)
            report = json.loads(self._values.get(f"{key}/sent/{rank}"))
            self._values.delete_key(f"{key}/sent/{rank}")
            if "class" in report:
                raise error_of(report, "an upload")
            files |= report
        for file, path in contents.others.items():
            files[file] = asdict(snapshot.send(self.place, contents.name, file, path))
        values = {
            "name": contents.name,
            "step": sent.step,
            "piece_bytes": PIECE_BYTES,
            "files": files,
        }
        added = StoredCheckpoint(
            contents.name, sent.step, snapshot.seal(self.place, Snapshot.of(values))
        )
        before = {each.name for each in self.held.head.checkpoints}
        now = snapshot.persist(self.held.update, partial(self._with, added))
        log.info(
            "step %d is stored: %s/%s/%s", sent.step, self.place.url, CHECKPOINTS, contents.name
        )
        try:
            snapshot.remove(
                self.place, sorted(before - {each.name for each in now.checkpoints})
            )
        except ThreefoldError as error:  # the next start removes them
            log.warning(
                "old checkpoints could not be removed from %s: %s", self.place.url, error
            )
        return {}

    def _with(self, added: StoredCheckpoint, before: RunHead) -> RunHead:
        others = [each for each in before.checkpoints if each.name != added.name]
        entries = sorted([*others, added], key=lambda each: each.step)
        if (step := self._run.best()) is not None:
            entries = [replace(each, best=each.step == step) for each in entries]
        best = [each for each in entries[: -self._keep] if each.best]
        return replace(before, checkpoints=(*best, *entries[-self._keep :]))


def begin(held: HeldHead, identity: Mapping[str, Any], step: int) -> None:
    """Makes the head that of a run that begins after a step: later checkpoints are set aside."""

    def change(before: RunHead) -> RunHead:
        later = [each.name for each in before.checkpoints if each.step > step]
        kept = tuple(each for each in before.checkpoints if each.step <= step)
        values = json.loads(json.dumps(identity))
        return replace(before, identity=values, checkpoints=kept, aside=(*before.aside, *later))

    held.update(change)


def sweep(held: HeldHead) -> None:
    """Removes what killed writers have left; called before anything is sent, which the head does not name either.

    Raises:
        CheckpointError: there are whole checkpoints, and the head that named them is gone.
    """
    place, now = held.place, held.head
    if left := snapshot.unsealed(place, [*(each.name for each in now.checkpoints), *now.aside]):
        whole = [key for key in left if key.endswith(snapshot.SEAL)]
        if whole and now.identity is None:
            address = f"{place.url}/{max(whole).removesuffix(f'/{snapshot.SEAL}')}"
            raise CheckpointError(
                f"{place.url}/{KEY} was removed, but {address} is complete",
                expected="the record of the run that wrote it: what it does not name is removed",
                fix=f"--checkpoint.resume {address} --checkpoint.store ANOTHER_PREFIX   (or empty this one)",
            )
        log.info("%s: removing %d objects left behind by a killed upload", place.url, len(left))
        place.delete(left)


def _attempt(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    try:
        return work()
    except BaseException as error:  # a library in Rust that panics raises no Exception
        log.exception("an upload failed")
        if isinstance(error, OSError):
            error = RunError(
                f"a checkpoint cannot be read for upload: {error.strerror} ({error.filename})",
                expected="the files as they were saved",
                fix="check the disk; earlier checkpoints are in the store",
            )
        return described_error(error)
