"""Background saves, from the copy to the commit: which rank waits for which, and how a failure reaches every rank.

`save` copies this rank's part and returns; a thread writes it. When every rank has reported its files, rank 0
commits and informs every rank's thread. The threads communicate through their own store, never by a collective, so
they cannot interfere with the training's collectives. A failure must end all ranks in the same step: the first rank
that notices one after step s publishes s + 2, as a stop signal does (`training.loop`), and the others read it before
they finish s + 2.
"""

import dataclasses
import json
import logging
import socket
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.checkpoint import tensor_index
from threefold.checkpoint.seal import Seal, write_sealed
from threefold.checkpoint.tensor_index import Entry, Index
from threefold.checkpoint.tensors import TensorPart, entries_of, write_parts
from threefold.errors import RunError, ThreefoldError, described_error, error_of, size_text
from threefold.mesh.mesh import Mesh

log = logging.getLogger("threefold")

_LONGEST_SAVE = timedelta(days=2)


@dataclass(frozen=True)
class Save:
    """One save.

    Attributes:
        step: the last step done.
        state: folder for the tensors' files.
        begin: makes the folder before any rank writes; rank 0 calls it.
        commit: receives the seals of the files, by their paths in the folder around `state`, when all are written; rank
            0 calls it.
        abandon: removes what was written; rank 0 calls it when no rank is writing any more.
        refusal: why the run is to end instead of saving, whatever is to follow a failed save; rank 0 calls it first.
        done: called by every rank when the checkpoint is complete; returns at once.
    """

    step: int
    state: Path
    begin: Callable[[], object]
    commit: Callable[[Mapping[str, Seal]], object]
    abandon: Callable[[], object]
    refusal: Callable[[], ThreefoldError | None] = lambda: None
    done: Callable[[], object] = lambda: None


class Stage:
    """The copy that the training thread makes, so that a save can run while the next steps change the state.

    One buffer on the host, as large as what this rank writes, is reused by every save: copying into memory that was
    touched before is about eight times as fast. On a CUDA device its pages are locked and the copies are queued after
    the step, so that the training thread waits for none of them. A host without memory for it makes no copy.

    State that only an update writes is copied on a separate stream, during the next forward and backward, in a loop
    that calls `before_update`. State that a forward may write is copied before the device continues.

    Args:
        parts: as in a later `copy`, in file order; the buffer is as large as all of them together. It grows with a
            state that an optimizer makes in its first step.
        in_forward: as `Saver.in_forward`.
    """

    def __init__(
        self,
        parts: Sequence[TensorPart],
        device: torch.device,
        in_forward: Collection[str] | None = None,
    ) -> None:
        self._size_bytes = sum(part.values.nbytes for part in parts)
        self._device = device
        self._buffer: Tensor | None = None
        self._in_forward = in_forward
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        # Read during computation: its memory must not be reused meanwhile.
        self._reading: Sequence[TensorPart] = ()
        self._made = threading.Thread(target=self._make, name="threefold-stage", daemon=True)
        self._made.start()

    def _make(self) -> None:
        # The first touch of new memory is slow, so it is done here, while the first steps run.
        try:
            self._buffer = torch.empty(self._size_bytes, dtype=torch.uint8).zero_()
        except RuntimeError as error:
            size = size_text(self._size_bytes)
            log.warning(
                "no memory for a copy of %s: training waits until each save is written: %s",
                size,
                error,
            )
            return
        if self._device.type == "cuda" and (reason := _lock_pages(self._buffer)) is not None:
            log.warning(
                "the copy's pages cannot be locked: training waits while it is made: %s",
                reason,
            )

    def copy(self, parts: Sequence[TensorPart]) -> list[TensorPart] | None:
        """Returns the parts with their values in the buffer, to read after `wait`. The last copy is overwritten.

        None: there is no memory for the buffer.
        """
        self._made.join()
        if (needed := sum(part.values.nbytes for part in parts)) > self._size_bytes:
            self.wait()
            self._size_bytes, self._buffer = needed, None
            self._make()
        if self._buffer is None:
            return None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        staged, start = [], 0
        for part in parts:
            end = start + part.values.nbytes
            values = self._buffer[start:end].view(part.values.dtype).view(part.values.shape)
            with torch.cuda.stream(
                None if part.name in (self._in_forward or ()) else self._stream
            ):
                values.copy_(part.values, non_blocking=True)
            staged.append(dataclasses.replace(part, values=values))
            start = end
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._copied, self._reading = self._stream.record_event(), parts
            if self._in_forward is None:
                self.before_update()
        return staged

    def before_update(self) -> None:
        """Lets the device compute nothing more before it has copied; the training thread does not wait."""
        if self._reading and self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._reading = ()

    def wait(self) -> None:
        """Returns when the last copy is complete; the thread that reads it calls this."""
        if self._copied is not None:
            self._copied.synchronize()


def _lock_pages(buffer: Tensor) -> str | None:
    """Lets a CUDA device copy into the buffer while the host computes; returns why it cannot, if so.

    By registering it: what torch allocates as pinned is rounded up to a power of two, 90 GiB to 128.
    """
    cuda = torch.cuda.cudart()
    code = int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code:
        return f"cudaHostRegister of {buffer.nbytes:,} bytes returns {code}"
    weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr())
    return None


@dataclass
class Saver:
    """Saves the state of one rank, step after step. Every rank has a Saver and calls it in the same way.

    Attributes:
        parts: returns what this rank writes, as live views; called whenever a save begins.
        background: write while the next steps run, instead of at once.
        continue_on_error: a failed save is printed and the run continues, instead of ending.
        in_forward: names of what a forward may write (buffers), in a loop that calls `before_update` before it writes
            anything else; None: the loop writes what it likes, as soon as `save` returns.
    """

    mesh: Mesh
    parts: Callable[[], Sequence[TensorPart]]
    background: bool
    continue_on_error: bool
    in_forward: Collection[str] | None = None

    def __post_init__(self) -> None:
        self._stage = (
            Stage(self.parts(), self.mesh.device, self.in_forward) if self.background else None
        )
        self._store = (
            self.mesh.store.clone() if self.mesh.store is not None else dist.HashStore()
        )
        self._key = f"threefold/saves/{self.mesh.share('saver', lambda: uuid.uuid4().hex)}"
        self._number = 0
        self._running: threading.Thread | None = None
        self._failure: str | None = None
        self.saved_step = -1  # the last one of which the checkpoint is complete

    def save(self, job: Save) -> None:
        """Waits for the previous save and begins this one; waits for this one too unless it runs in the background.

        Raises:
            RunError: a save failed, on every rank.
        """
        self.wait()
        self._number += 1
        if self._stage is None:
            self._run(job, self.parts())
            self._conclude()
            return
        live = self.parts()
        staged = self._stage.copy(live)
        name = f"threefold-save-{job.step}"
        self._running = threading.Thread(
            target=self._run, args=(job, staged or live), name=name, daemon=True
        )
        self._running.start()
        # The next step changes the state; `check` reports the outcome to all ranks alike.
        if staged is None:
            self._running.join()

    def before_update(self) -> None:
        """Call this before weights, moments and averages are updated: a save in the background may still copy them."""
        if self._stage is not None:
            self._stage.before_update()

    def check(self, step: int) -> None:
        """Call this after every step: ends the run on all ranks in the same step if a background save failed.

        Raises:
            RunError: a save failed.
        """
        if self._running is None:
            return
        ended = not self._running.is_alive()
        if self.continue_on_error or self.mesh.store is None:
            if ended:
                self.wait()
            return
        store, end = self.mesh.store, f"{self._key}/{self._number}/end-after"
        if ended and self._failure is not None:
            store.compare_set(end, "", str(step + 2))
        if store.check([end]):
            if step >= int(store.get(end)):
                self.wait()
        elif ended:
            self._running = None

    def wait(self) -> None:
        """Waits until nothing is being saved.

        Raises:
            RunError: the save failed, on every rank.
        """
        if self._running is not None:
            self._running.join()
            self._running = None
            self._conclude()

    def join(self, timeout_s: float) -> None:
        """Waits for a running save, in a run that fails for another reason; does not report how the save ended."""
        if self._running is not None:
            self._running.join(timeout_s)

    def _conclude(self) -> None:
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if "class" in (values := json.loads(failure)):
            raise error_of(values, "a save")
        error = _failed(values)
        if not self.continue_on_error:
            raise error
        log.error("%s", error)
        if self.mesh.rank == 0:
            print(error, file=sys.stderr)

    def _run(self, job: Save, parts: Sequence[TensorPart]) -> None:
        """Saves. If it fails, `_failure` holds the reason, the same on every rank."""
        try:
            outcome = self._together(job, parts)
        except Exception as error:  # the store is gone, and with it the run
            log.exception("the save of step %d", job.step)
            outcome = json.dumps({"step": job.step, "reason": str(error) or repr(error)})
        self._failure = outcome or None
        if not outcome:
            self.saved_step = job.step
            job.done()

    def _together(self, job: Save, parts: Sequence[TensorPart]) -> str:
        """Returns rank 0's conclusion: empty, or the step and the reason as JSON."""
        mesh, store, key = self.mesh, self._store, f"{self._key}/{self._number}"
        refusal = job.refusal() if mesh.rank == 0 else None
        if mesh.rank == 0:
            store.set(
                f"{key}/begun", "refused" if refusal is not None else _attempt(job.begin) or ""
            )
        store.wait([f"{key}/begun"], _LONGEST_SAVE)
        reason: str | None = store.get(f"{key}/begun").decode() or None
        seals: dict[str, Seal] = {}
        if reason is None:
            own = _attempt(lambda: seals.update(self._write(job.state, parts)))
            report = {
                "reason": own,
                "seals": {name: seal.to_json() for name, seal in seals.items()},
            }
            store.set(f"{key}/written/{mesh.rank}", json.dumps(report))
        if refusal is not None:
            store.set(f"{key}/ended", json.dumps(described_error(refusal)))
        elif mesh.rank == 0:
            failed = {"step": job.step, "rank": 0}
            if reason is None:
                reason = self._collect(f"{key}/written", seals, failed) or _attempt(
                    lambda: job.commit(indexed(job.state, seals))
                )
            if reason is not None:
                _attempt(job.abandon)
            store.set(
                f"{key}/ended", json.dumps({**failed, "reason": reason}) if reason else ""
            )
        store.wait([f"{key}/ended"], _LONGEST_SAVE)
        return store.get(f"{key}/ended").decode()

    def _collect(self, key: str, seals: dict[str, Seal], failed: dict[str, int]) -> str | None:
        """Collects every rank's report; returns the first reason against a commit, and puts its rank into `failed`."""
        reason, store = None, self._store
        for rank in range(self.mesh.world_size):
            store.wait([f"{key}/{rank}"], _LONGEST_SAVE)
            report = json.loads(store.get(f"{key}/{rank}"))
            store.delete_key(f"{key}/{rank}")
            named = f"rank {rank}: " if self.mesh.world_size > 1 else ""
            if reason is None and report["reason"]:
                reason, failed["rank"] = f"{named}{report['reason']}", rank
            seals.update(
                {name: Seal.from_json(values) for name, values in report["seals"].items()}
            )
        return reason

    def _write(self, state: Path, parts: Sequence[TensorPart]) -> dict[str, Seal]:
        if self._stage is not None:
            self._stage.wait()
        return write_parts(state, f"rank-{self.mesh.rank:05d}", parts)


def _attempt(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Exception as error:
        log.exception("a save failed")
        why = repr(error)
        if isinstance(error, OSError):
            why = f"{error.strerror or error} ({error.filename or 'while writing'})"
        return f"{why} on {socket.gethostname()}"
    return None


def indexed(state: Path, seals: Mapping[str, Seal]) -> dict[str, Seal]:
    """Writes the index of the files in the folder `state`, given their seals; returns the seals of all by `state/FILE`.

    Raises:
        RuntimeError: the boxes in the files do not make up the tensors.
    """
    entries: dict[str, Entry] = {}
    for file in sorted(seals):
        for name, dtype, shape, chunk in entries_of(state / file):
            entries.setdefault(name, Entry(dtype, shape)).chunks.append(chunk)
    for name, entry in entries.items():
        if (problem := entry.problem()) is not None:
            raise RuntimeError(f"{name}: {problem}")
    index = write_sealed(state / tensor_index.FILE, Index(entries).to_json().encode())
    files = {**seals, tensor_index.FILE: index}
    return {f"{state.name}/{name}": seal for name, seal in files.items()}


class SaveError(RunError):
    """A checkpoint could not be written; all ranks raise it."""

    how = "disk"


def _failed(values: Mapping[str, Any]) -> SaveError:
    error = SaveError(
        f"the checkpoint of step {values['step']} could not be saved: {values['reason']}",
        expected="enough space, and a folder that every rank can write; earlier checkpoints are intact",
        fix="free space or make the folder writable (`df -h RUN`, `ls -ld RUN`) and start the run again: it resumes; "
        "or, to continue without a checkpoint if a save fails, --checkpoint.on_error continue",
    )
    error.phase, error.step, error.ranks = "save", values["step"], (values.get("rank", 0),)
    return error
