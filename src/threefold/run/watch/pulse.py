"""A rank's pulse: its place and its last beat, in memory that the other ranks of its host can always read.

A rank that is stopped, or in which one call holds Python's lock (the GIL), can report nothing itself, and its last
report to the store may be a second old. Its place in this memory is current. What keeps it silent is in /proc; and if
it only lacks the lock, a signal makes Python write its stack. Linux only: elsewhere ranks have no pulse, and only their
silence is noticed. The process that starts ranks keeps that memory for them, and notes in the journal the end of a rank
that could not do so itself.
"""

import contextlib
import faulthandler
import logging
import mmap
import os
import re
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from threefold.checkpoint.lineage import Ending, Journal
from threefold.jsonl import Values
from threefold.mesh import environment
from threefold.mesh.local_ranks import STOPS
from threefold.run.watch.main_thread import cgroup_folders, line_of, state_of, uninterruptible
from threefold.run.watch.stall import GONE, HELD, STOPPED, UNINTERRUPTIBLE
from threefold.training.progress import Phase

log = logging.getLogger("threefold")

_BEAT = struct.Struct("<dq")
_PLACE = struct.Struct("<qq48s")
_SIZE = 4096
_NAMED = "/memfd:threefold-pulse (deleted)"  # how /proc shows it
# Asks a process for its stack. It has no other use, and is sent only to processes that handle it.
_ASKS = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
_ANSWERS_WITHIN_S = 0.5
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def _phase(number: int, step: int, name: bytes) -> Phase:
    return Phase(number, step, name.rstrip(b"\0").decode(errors="replace"))


def _place(memory: bytes) -> Phase:
    return _phase(*_PLACE.unpack_from(memory, _BEAT.size))


def _memory() -> int:
    file = os.memfd_create("threefold-pulse")
    os.ftruncate(file, _SIZE)
    return file


class Pulse:
    """The pulse of this rank."""

    def __init__(self, path: str | None = None) -> None:
        """Args:
        path: of memory that another process keeps (`Witness`); None: private memory.
        """
        self._file, self._stack = (
            os.open(path, os.O_RDWR) if path else _memory(),
            os.memfd_create("threefold-stack"),
        )
        self._memory = mmap.mmap(self._file, _SIZE)
        if _ASKS is not None:
            faulthandler.register(_ASKS, file=self._stack, all_threads=False)

    @classmethod
    def begin(cls, path: str | None = None) -> "Pulse | None":
        """The pulse of this rank, where there can be one."""
        if sys.platform != "linux":
            return None
        try:
            return cls(path)
        except (OSError, RuntimeError, ValueError) as error:
            # No such memory, or no such signal, in this container.
            log.warning("watchdog: no pulse: %s", error)
            return None

    def tell(self, place: Phase) -> None:
        """The place of this rank; called by its main thread at each phase."""
        _PLACE.pack_into(
            self._memory, _BEAT.size, place.number, place.step, place.name.encode()[:48]
        )

    def beat(self, number: int) -> None:
        """A sign of life; called by another thread, about once a second."""
        _BEAT.pack_into(self._memory, 0, time.monotonic(), number)

    @property
    def address(self) -> Values:
        """Where other processes of this host find it."""
        process = os.getpid()
        return {
            "here": environment.namespace_here("pid"),
            "process": process,
            "since": state_of(f"/proc/{process}")[1],
            "file": self._file,
            "stack": self._stack,
        }

    def close(self) -> None:
        """It is no longer read."""
        if _ASKS is not None:
            faulthandler.unregister(_ASKS)
        self._memory.close()
        os.close(self._file)
        os.close(self._stack)


class Peer:
    """Another rank of this host, by its pulse."""

    def __init__(self, address: Values) -> None:
        self.process: int = address["process"]
        self._folder = f"/proc/{self.process}"
        self._since = address["since"]
        self._answer = f"{self._folder}/fd/{address['stack']}"
        with open(f"{self._folder}/fd/{address['file']}", "rb") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        self._asked_at: int | None = None
        self._stack = ""

    @classmethod
    def at(cls, address: Values | None) -> "Peer | None":
        """The rank at an address, unless that is of another host, or its memory cannot be read."""
        here = environment.namespace_here("pid")
        if address is None or here is None or address["here"] != here:
            return None
        try:
            return cls(address)
        except OSError:
            return None

    @property
    def place(self) -> Phase:
        """Where it is."""
        return _phase(*self._twice(_PLACE, _BEAT.size))

    @property
    def last_beat(self) -> tuple[float, int]:
        """(seconds since its last sign of life, its number)."""
        at, number = self._twice(_BEAT, 0)
        return time.monotonic() - at, number

    def silenced_by(self, silent_s: float) -> str:
        """What keeps it silent, one of `stall.STATES`; or empty: it lives, and its last beat is no older than that."""
        state, since = state_of(self._folder)
        if not state or since != self._since or state in "ZX":
            return GONE
        if state in "Tt":
            return STOPPED
        if self.last_beat[0] <= silent_s:
            return ""
        return UNINTERRUPTIBLE if state == "D" else HELD

    def stack(self) -> str:
        """Its main thread's calls, the innermost last, which Python writes without its lock; asked for once a beat."""
        _, beat = self.last_beat
        if self._asked_at != beat:
            self._asked_at, self._stack = beat, self._ask()
        return self._stack

    def where_in_the_kernel(self) -> str:
        """Where it waits uninterruptibly, or empty."""
        return uninterruptible(self._folder)

    def _ask(self) -> str:
        if _ASKS is None or not self._listens():
            return ""
        before = len(self._read())
        with contextlib.suppress(OSError):
            os.kill(self.process, _ASKS)
        until = time.monotonic() + _ANSWERS_WITHIN_S
        while not (answer := self._read()[before:]).endswith("\n") and time.monotonic() < until:
            time.sleep(0.02)
        calls = _FRAME.findall(answer)
        return "\n".join(
            f'  File "{path}", line {line}, in {name}' for path, line, name in reversed(calls)
        )

    def _read(self) -> str:
        try:
            return Path(self._answer).read_text(errors="replace")
        except OSError:
            return ""

    def _listens(self) -> bool:
        """Whether the process has a handler for the signal: it would end one that has none."""
        caught = line_of(Path(self._folder, "status"), r"^SigCgt:\s*([0-9a-f]+)$")
        return (
            caught is not None
            and _ASKS is not None
            and bool(int(caught[1], 16) >> (_ASKS - 1) & 1)
        )

    def _twice(self, layout: struct.Struct, at: int) -> tuple[Any, ...]:
        """The value, read again if it is being written."""
        for _ in range(100):
            fields = layout.unpack_from(self._memory, at)
            if fields == layout.unpack_from(self._memory, at):
                break
        return fields


def place_of(process: int, log_file: Path) -> Phase | None:
    """The place of a process of this host, if it is the rank that writes `log_file`; None if that cannot be seen."""
    place = None
    try:
        opened = {os.readlink(path): path for path in os.scandir(f"/proc/{process}/fd")}
        if str(log_file.resolve()) in opened and (memory := opened.get(_NAMED)) is not None:
            place = _place(Path(memory).read_bytes())
    except (OSError, struct.error):
        return None
    return place


def memory_kills() -> int:
    """How many processes the kernel has ended because memory ran out: of this cgroup, else of the machine."""
    for folder in (*cgroup_folders("memory"), Path("/proc")):
        for name in ("memory.events", "memory.oom_control", "vmstat"):
            if (kills := line_of(folder / name, r"^oom_kill (\d+)$")) is not None:
                return int(kills[1])
    return 0


class Witness:
    """The process that starts the ranks, and outlives them: notes the end of those that could not.

    Attributes:
        pulses: memory for those of the ranks, in which it sees where one was that is gone; empty: there are none here.
    """

    def __init__(self, run: Path, num_ranks: int) -> None:
        self._journal = Journal(run)
        self._kills = memory_kills()
        self._known = len(self._journal.endings())
        self._files = [_memory() for _ in range(num_ranks)] if sys.platform == "linux" else []
        self.pulses = tuple(f"/proc/{os.getpid()}/fd/{file}" for file in self._files)

    def ended(self, rank: int, code: int, error: str) -> None:
        """A start is over, because a rank (-1: all) has ended with an exit code, or a signal (below 0)."""
        how = "exit" if code > 0 else "signal"
        places = [_place(os.pread(file, _SIZE, 0)) for file in self._files]
        if code - 128 in STOPS:  # the others wait for the one that is behind
            how, code = "asked", code - 128
            rank = min(range(len(places)), key=lambda each: places[each].number, default=rank)
        elif how == "exit" and len(self._journal.endings()) > self._known:
            return  # the rank has reported why
        place = places[rank] if places else Phase(0, 0, "")
        kills = memory_kills() - self._kills
        if kills and code == -signal.SIGKILL:
            how = "memory"
        ending = Ending(
            how,
            (rank,) if rank >= 0 else (),
            environment.current().host,
            abs(code),
            place.name,
            place.step,
            error=error,
            memory_kills=kills,
        )
        self._journal.end(ending)
        self._known = len(self._journal.endings())
