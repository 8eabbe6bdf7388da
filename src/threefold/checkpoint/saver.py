"""A background save from the copy to the commit: who waits for whom, and how a failure reaches every rank.

`save` copies this rank's part and returns; a thread writes it. When every rank has reported what it wrote, rank 0
commits and informs every rank's thread. The threads communicate through their own store, never by a collective, so
they cannot interfere with the training's collectives. A failure must end all ranks in the same step: the first rank
that notices one after step s publishes s + 2, as a stop signal does (`training.loop`), and the others read it before
they finish s + 2.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.checkpoint import boxes as index_of_tensors
from threefold.checkpoint.boxes import Entry, Index
from threefold.checkpoint.seal import Seal, write_sealed
from threefold.checkpoint.tensors import Part, entries_of, write_parts
from threefold.errors import RunError
from threefold.mesh.mesh import Mesh

log = logging.getLogger("threefold")

_LONGEST_SAVE = timedelta(days=2)


@dataclass(frozen=True)
class Job:
    """One save.

    Attributes:
        step: the last step done.
        state: folder for the tensors' files.
        begin: makes the folder before any rank writes; rank 0 calls it.
        commit: receives the seals of the files in `state` when all are written; rank 0 calls it.
        abandon: removes what was written; rank 0 calls it when no rank is writing any more.
    """

    step: int
    state: Path
    begin: Callable[[], object]
    commit: Callable[[Mapping[str, Seal]], object]
    abandon: Callable[[], object]


class Stage:
    """The copy that the training thread makes, so that a save can run while the next steps change the state.

    One buffer on the host, as large as what this rank writes, is kept from save to save: memory that was touched before
    is copied into about eight times as fast. On a CUDA device it is pinned and the copies are queued behind the step,
    so that the training thread waits for none of them.

    Args:
        parts: as they will be given to every `copy`, in file order; their sizes make the buffer's.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._size_bytes = sum(part.values.nbytes for part in parts)
        self._device = device
        self._buffer: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._made = threading.Thread(target=self._make, name="threefold-stage", daemon=True)
        self._made.start()

    def _make(self) -> None:
        # The first touch of fresh memory is what costs: done here, while the first steps run.
        buffer = torch.empty(self._size_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._buffer = buffer.zero_()

    def copy(self, parts: Sequence[Part]) -> list[Part]:
        """The parts with their values in the buffer; read them after `wait`. The last copy must not be needed any more.

        Raises:
            RuntimeError: there was no memory for the buffer.
        """
        self._made.join()
        if self._buffer is None:
            raise RuntimeError(f"no memory for a copy of {self._size_bytes:,} bytes")
        staged, start = [], 0
        for part in parts:
            end = start + part.values.nbytes
            values = self._buffer[start:end].view(part.values.dtype).view(part.values.shape)
            values.copy_(part.values, non_blocking=True)
            staged.append(dataclasses.replace(part, values=values))
            start = end
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        return staged

    def wait(self) -> None:
        """Returns when the last copy is whole; called by the thread that reads it."""
        if self._copied is not None:
            self._copied.synchronize()


class Saver:
    """Saves the state of one rank, step after step. Every rank has a Saver and calls it in the same way.

    Args:
        parts: returns what this rank writes, as live views; called whenever a save begins.
        background: write while the next steps run, instead of at once.
        continue_on_error: a failed save is printed and the run continues, instead of ending.
    """

    def __init__(
        self,
        mesh: Mesh,
        parts: Callable[[], Sequence[Part]],
        *,
        background: bool,
        continue_on_error: bool,
    ) -> None:
        self._mesh = mesh
        self._parts = parts
        self._continue_on_error = continue_on_error
        self._stage = Stage(parts(), mesh.device) if background else None
        self._store = mesh.store.clone() if mesh.store is not None else dist.HashStore()
        self._key = f"threefold/saves/{mesh.share('saver', lambda: uuid.uuid4().hex)}"
        self._number = 0
        self._running: threading.Thread | None = None
        self._failure: str | None = None

    def save(self, job: Job) -> None:
        """Waits for the previous save and begins this one; waits for this one too unless it runs in the background.

        Raises:
            RunError: a save failed, on every rank.
        """
        self.wait()
        self._number += 1
        if self._stage is None:
            self._run(job, self._parts())
            self._conclude()
            return
        staged = self._stage.copy(self._parts())
        self._running = threading.Thread(
            target=self._run, args=(job, staged), name=f"threefold-save-{job.step}", daemon=True
        )
        self._running.start()

    def notice(self, step: int) -> None:
        """Call this after every step: ends the run on all ranks in the same step if a background save failed.

        Raises:
            RunError: a save failed.
        """
        if self._running is None:
            return
        ended = not self._running.is_alive()
        if self._continue_on_error or self._mesh.store is None:
            if ended:
                self.wait()
            return
        store, end = self._mesh.store, f"{self._key}/{self._number}/end-after"
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
        """Waits for a save that is under way, for a run that ends otherwise; tells nothing of how it ended."""
        if self._running is not None:
            self._running.join(timeout_s)

    def _conclude(self) -> None:
        failure, self._failure = self._failure, None
        if failure is None:
            return
        error = _failed(failure)
        if not self._continue_on_error:
            raise error
        log.error("%s", error)
        if self._mesh.rank == 0:
            sys.stderr.write(f"{error}\n")

    def _run(self, job: Job, parts: Sequence[Part]) -> None:
        """Saves. If it fails, `_failure` holds the reason, the same on every rank."""
        try:
            outcome = self._together(job, parts, self._store)
        except Exception as error:  # the store is gone, and with it the run
            log.exception("the save of step %d", job.step)
            outcome = json.dumps({"step": job.step, "reason": str(error) or repr(error)})
        self._failure = outcome or None

    def _together(self, job: Job, parts: Sequence[Part], store: dist.Store) -> str:
        """Returns rank 0's conclusion: empty, or the step and the reason as JSON."""
        mesh, key = self._mesh, f"{self._key}/{self._number}"
        if mesh.rank == 0:
            store.set(f"{key}/begun", _attempt(job.begin) or "")
        store.wait([f"{key}/begun"], _LONGEST_SAVE)
        reason: str | None = store.get(f"{key}/begun").decode() or None
        seals: dict[str, Seal] = {}
        if reason is None:
            file = _file_of(mesh.rank)
            own = _attempt(lambda: seals.update({file: self._write(job.state / file, parts)}))
            report = {"reason": own, "seals": {name: seal.to_json() for name, seal in seals.items()}}
            store.set(f"{key}/written/{mesh.rank}", json.dumps(report))
        if mesh.rank == 0:
            if reason is None:
                reason = self._collect(f"{key}/written", store, seals) or _attempt(lambda: _commit(job, seals))
            if reason is not None:
                _attempt(job.abandon)
            store.set(f"{key}/ended", json.dumps({"step": job.step, "reason": reason}) if reason else "")
        store.wait([f"{key}/ended"], _LONGEST_SAVE)
        return store.get(f"{key}/ended").decode()

    def _collect(self, key: str, store: dist.Store, seals: dict[str, Seal]) -> str | None:
        """Collects every rank's report; returns the first reason against a commit."""
        reason = None
        for rank in range(self._mesh.world_size):
            store.wait([f"{key}/{rank}"], _LONGEST_SAVE)
            report = json.loads(store.get(f"{key}/{rank}"))
            store.delete_key(f"{key}/{rank}")
            named = f"rank {rank}: " if self._mesh.world_size > 1 else ""
            reason = reason or (report["reason"] and f"{named}{report['reason']}")
            seals.update({name: Seal.from_json(values) for name, values in report["seals"].items()})
        return reason

    def _write(self, path: Path, parts: Sequence[Part]) -> Seal:
        if self._stage is not None:
            self._stage.wait()
        return write_parts(path, parts)


def _attempt(work: Callable[[], object]) -> str | None:
    """Returns why `work` failed, or None."""
    try:
        work()
    except OSError as error:
        log.exception("a save failed")
        return f"{error.strerror or error} ({error.filename or 'while writing'}) on {socket.gethostname()}"
    except Exception as error:
        log.exception("a save failed")
        return f"{error!r} on {socket.gethostname()}"
    return None


def _commit(job: Job, seals: Mapping[str, Seal]) -> None:
    entries: dict[str, Entry] = {}
    for file in sorted(seals):
        for name, dtype, shape, chunk in entries_of(job.state / file):
            entries.setdefault(name, Entry(dtype, shape)).chunks.append(chunk)
    for name, entry in entries.items():
        if (problem := entry.problem()) is not None:
            raise RuntimeError(f"{name}: {problem}")
    index = write_sealed(job.state / index_of_tensors.FILE, Index(entries).to_json().encode())
    job.commit({**seals, index_of_tensors.FILE: index})


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _failed(failure: str) -> RunError:
    values = json.loads(failure)
    return RunError(
        f"the checkpoint of step {values['step']} could not be saved: {values['reason']}",
        expected="room for it, and a folder that every rank can write; the checkpoints before it are whole",
        fix="make room (`df -h RUN`) and start the run again, it goes on from the last one; or, to train on without "
        "a checkpoint when one fails, --checkpoint.on_error continue",
    )
