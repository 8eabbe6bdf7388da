"""What this process's main thread is doing, as seen by another of its threads: its calls, its waits, its state.

A rank that waits for others has its main thread inside a collective, or idle in a backward whose collectives are in
C++. Anything else that does not move is late itself.

Also the time that the kernel withholds from a rank, by counters in /proc and its cgroup: why the rank is slow. They are
read once a second by a separate thread of the rank, which waits for no one. What cannot be read (no /proc, no
cgroup, a container that hides them) is left out.

And the last collectives of this rank, as torch knows them.
"""

import faulthandler
import linecache
import logging
import os
import platform
import re
import resource
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from threefold.training.progress import core_wait_s, proc_text

log = logging.getLogger("threefold")

COLLECTIVE, STORE = "collective", "store"
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_STORES = (os.path.join("mesh", "exchange.py"), os.path.join("mesh", "rendezvous.py"))
# Calls into C++ that return when other ranks, or a device that may wait for them, have done their part.
_WAITING_CALLS = (".wait(", "wait_tensor", ".item()", ".tolist()", ".synchronize(")
_INNERMOST = 3
_BACKWARD = "_engine_run_backward"
# A rank's own code; calls outside it started the rank.
_LOOP = os.path.join("training", "loop.py")
_RANK = os.path.join("run", "rank.py")
_SAVER = os.path.join("checkpoint", "background_saver.py")
# Compiled code passes through these; code that only runs beside it passes through others of their packages.
_COMPILERS = (
    os.path.join("_dynamo", "convert_frame.py"),
    os.path.join("_inductor", "compile_fx.py"),
)
# Each module of a model adds three such frames, which show nothing.
_PASSING_ON = os.path.join("torch", "nn", "modules", "module.py")
_MOST_SHOWN = 24
# torch's Flight Recorder as JSON: of NCCL, else of gloo.
_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
# Share of the elapsed time; with less on a core, the thread is waiting.
_IDLE_BELOW = 0.05
# The kernel's calls that wait for another thread or for a socket: futex, poll, select, epoll and recv, by machine.
_WAITS_FOR_OTHERS = {
    "x86_64": frozenset(("202", "449", "7", "271", "23", "270", "232", "281", "45", "47")),
    "aarch64": frozenset(("98", "449", "73", "72", "22", "207", "212")),
    # Unknown: nothing is reported as blocked.
}.get(platform.machine(), frozenset(map(str, range(1024))))
# Lines as faulthandler writes them.
_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+) ")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Call(NamedTuple):
    """A call of a thread that is under way."""

    filename: str
    line: int
    name: str


class MainThread:
    """The main thread of this process; to be made in it."""

    def __init__(self) -> None:
        self._ident, self._number = threading.get_ident(), threading.get_native_id()
        self._clock = (
            time.pthread_getcpuclockid(self._ident)
            if hasattr(time, "pthread_getcpuclockid")
            else None
        )

        self._asked = time.monotonic(), self.cpu_s()

    def cpu_s(self) -> float:
        """The time that it has spent on a core."""
        return time.clock_gettime(self._clock) if self._clock is not None else 0.0

    def ready_s(self) -> float:
        """The time that it has spent on a core, or waiting for one."""
        return self.cpu_s() + core_wait_s(f"self/task/{self._number}")

    def stack(self) -> str:
        """Its calls from the training loop, or from the start of the rank, on; the innermost is the last."""
        calls = [traceback.FrameSummary(*call) for call in reversed(self._calls())]
        begin = next(
            (
                n
                for name in (_LOOP, _RANK)
                for n, c in enumerate(calls)
                if c.filename.endswith(name)
            ),
            0,
        )
        shown = [call for call in calls[begin:] if not call.filename.endswith(_PASSING_ON)]
        shown = shown[:1] + shown[1:][-_MOST_SHOWN:]
        return "".join(traceback.format_list(shown)).rstrip()

    def compiles(self) -> bool:
        """Whether it is in torch's compiler."""
        return any(call.filename.endswith(_COMPILERS) for call in self._calls())

    def waits(self, *, idle: bool) -> str:
        """What it waits for: another rank in a `collective` or over the `store`; empty: for none, as far as it shows.

        Args:
            idle: it has not been on a core for a while.
        """
        calls = self._calls()
        for call in calls[:_INNERMOST]:
            if call.filename.endswith(_COLLECTIVES):
                return COLLECTIVE
            if call.filename.endswith(_STORES):
                return STORE
        if not calls or not idle:
            return ""
        line = linecache.getline(calls[0].filename, calls[0].line)
        in_backward = calls[0].name == _BACKWARD
        return COLLECTIVE if in_backward or any(text in line for text in _WAITING_CALLS) else ""

    def is_blocked(self, for_s: float) -> bool:
        """Whether it is off its core for that long now, and not for another rank; returns after that time.

        Asked often while a run goes well, so it looks at no Python code of a thread that runs: only at the kernel's
        call that it is in. Waits for other ranks, and for threads that compute, are waits for a lock or a socket.
        """
        before, cpu_s = self._kernel_call(), self.cpu_s()
        if before in _WAITS_FOR_OTHERS or not before:
            return False
        time.sleep(for_s)
        return self._kernel_call() == before and self.cpu_s() - cpu_s <= _IDLE_BELOW * for_s

    def was_idle(self) -> bool:
        """Whether it has hardly been on a core since this was last asked."""
        before = self._asked
        self._asked = (time.monotonic(), self.cpu_s())
        return self._asked[1] - before[1] < _IDLE_BELOW * (self._asked[0] - before[0])

    def stuck(self) -> str:
        """Where in the kernel it waits uninterruptibly, if it does: in a file system, or a driver."""
        return uninterruptible(f"/proc/self/task/{self._number}")

    def _kernel_call(self) -> str:
        """The number of the kernel's call that it is in; -1: off its core, but in none (a page of its memory is read).

        Empty where that is not reported, or while it runs.
        """
        number = proc_text(f"self/task/{self._number}/syscall").partition(" ")[0].strip()
        return number if number.removeprefix("-").isdigit() else ""

    def _calls(self) -> list[Call]:
        """Those of the main thread, or of the save in the background that it waits for; the innermost is the first.

        Read as faulthandler writes them, which makes no objects of another thread's calls while that thread may run.
        """
        threads = _calls_of_threads()
        own = threads.get(self._ident, [])
        if any(call.filename.endswith(_SAVER) for call in own[: _INNERMOST + 1]):
            saves = (
                thread.ident
                for thread in threading.enumerate()
                if thread.name.startswith("threefold-save-")
            )
            return next((threads[ident] for ident in saves if ident in threads), own)
        return own


def _calls_of_threads() -> dict[int, list[Call]]:
    """The Python calls of each thread of this process, by its number, the innermost first."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    by_thread: dict[int, list[Call]] = {}
    calls: list[Call] = []
    for line in text.splitlines():
        if (thread := _THREAD.match(line)) is not None:
            calls = by_thread.setdefault(int(thread[1], 16), [])
        elif (call := _CALL.fullmatch(line)) is not None:
            calls.append(Call(call[1], int(call[2]), call[3]))
    return by_thread


def state_of(folder: str) -> tuple[str, str]:
    """(state, time of its start) of a process or thread here, by its folder in /proc; empty if it is gone."""
    fields = proc_text(f"{folder.removeprefix('/proc/')}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def uninterruptible(folder: str) -> str:
    """The kernel's function in which a process or thread waits uninterruptibly, or empty."""
    if state_of(folder)[0] != "D":
        return ""
    try:
        return Path(folder, "wchan").read_text().strip("0\n") or "the kernel"
    except OSError:
        return "the kernel"


def counters() -> dict[str, float]:
    """The counters of this process until now, by name."""
    counts = {"major_faults": float(resource.getrusage(resource.RUSAGE_SELF).ru_majflt)}
    # The eighth number, in ticks of all cores together; the first five are always there.
    if (stolen := re.match(r"cpu +(?:\d+ ){7}(\d+)", proc_text("stat"))) is not None:
        counts["stolen_s"] = int(stolen[1]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    for folder in cgroup_folders("cpu"):
        # Microseconds in version 2, nanoseconds in version 1; a quota may be that of a parent cgroup.
        if (
            throttled := line_of(folder / "cpu.stat", r"^throttled_(usec|time) (\d+)")
        ) is not None:
            throttled_s = int(throttled[2]) / (1e6 if throttled[1] == "usec" else 1e9)
            counts["throttled_s"] = max(throttled_s, counts.get("throttled_s", 0.0))
    return counts


def cgroup_folders(controller: str) -> Iterator[Path]:
    """Where a controller keeps files on this process, in cgroups of version 1 and 2: its own, then those around it."""
    for line in proc_text("self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            # A container may see its own as the root.
            folder = Path("/sys/fs/cgroup", controllers, path.lstrip("/"))
            yield from (folder, *folder.parents)


def line_of(path: Path, pattern: str) -> re.Match[str] | None:
    """The first line that matches; None if there is none, or no such file."""
    try:
        return re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None


def keep_collectives(folder: Path, rank: int) -> None:
    """Writes the last collectives of this rank to logs/flight_recorder_rank_0001.json of a run's folder, for `explain`.

    In its own thread: it waits for a lock that a stuck driver may hold.
    """
    threading.Thread(
        target=_keep_collectives, args=(folder, rank), name="flight recorder", daemon=True
    ).start()


def _keep_collectives(folder: Path, rank: int) -> None:
    from torch._C import _distributed_c10d  # the process that starts ranks loads no torch

    dump = next(
        (dumper for name in _RECORDERS if (dumper := getattr(_distributed_c10d, name, None))),
        None,
    )
    if dump is None:
        return
    try:
        (folder / "logs" / f"flight_recorder_rank_{rank:04}.json").write_bytes(dump())
    except (OSError, RuntimeError) as error:
        log.warning("watchdog: %s", error)
