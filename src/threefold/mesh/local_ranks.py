"""Starting ranks on this machine, if no launcher did.

Local ranks are forked from a server process that has already imported the heavy libraries. They meet in a store that
this process keeps, and which, like all that they open among themselves, listens on the loopback interface only: nothing
outside this machine can reach a run of local ranks. They end with this process, however it ends.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Self

from threefold.errors import (
    EXIT_FAILED,
    EXIT_STOPPED_WITH_CHECKPOINT,
    EXIT_WRONG_REQUEST,
    Problem,
)
from threefold.mesh.environment import LOOPBACK, stay_on_loopback

# A restart would not change these: a wrong request, and a requested stop.
_FINAL = (EXIT_WRONG_REQUEST, EXIT_STOPPED_WITH_CHECKPOINT)
# Imported first by the server.
_SERVER = "threefold.mesh.rank_server"
# Ranks whose peer has failed find their connections closed, or the same error. They may say so, then they are asked to
# end, and killed if they do not.
_ALONE_S = 1.0
_END_WITHIN_S = 30.0
_Ended = Callable[[int, int, str], None]
# multiprocessing's exit code of processes whose server has ended: they themselves may continue.
_SERVER_GONE = 255
_LEAVES_AFTER_S = 2.0


def preload(modules: Sequence[str]) -> None:
    """Starts the server that ranks are forked from, importing `modules` in the background.

    OpenMP sizes its thread pool when its library is loaded: one thread here; the ranks ask for more.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A rank that ends makes the others' connections fail; torch's C++ log would cover the reason with theirs.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    start_server(modules)


def start_server(modules: Sequence[str]) -> None:
    """Starts the server that this process' children are forked from, if there is none, and what tracks semaphores.

    Both outlive what asks a group of processes to stop, which is for ranks; the children take it as others do.
    """
    from multiprocessing import forkserver, resource_tracker

    # Semaphores of loaders' workers, when a rank ends at once, are what the tracker is for: it need not say so.
    sys.warnoptions.append("ignore:resource_tracker")
    multiprocessing.set_forkserver_preload([_SERVER, *modules])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        for ensure_running in (resource_tracker.ensure_running, forkserver.ensure_running):
            # Inherited; the first one lifts it.
            signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
            ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve() -> None:
    """For such a server: it ends with the process that started it, and its children take signals from their first
    moment, when multiprocessing would let them lose a Ctrl-C, or print where it found them.
    """
    die_with_parent()
    gc.disable()  # imported modules stay
    heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    interrupted = signal.SIG_DFL if heard else signal.SIG_IGN
    signal.signal(signal.SIGINT, interrupted)

    def leave_server() -> None:
        signal.signal(signal.SIGINT, interrupted)
        gc.freeze()
        gc.enable()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)

    os.register_at_fork(after_in_child=leave_server)


def start_ranks(
    entry: Callable[..., int | None],
    args: Sequence[Any],
    *,
    num_ranks: int,
    grace_s: int = 110,
    max_restarts: int = 0,
    last: bool = False,
    ended: _Ended = lambda rank, code, error: None,
) -> int:
    """Runs `entry(*args)` in `num_ranks` local processes with torchrun's variables set; returns the exit code.

    When a rank fails, the others are stopped and all are started again, up to `max_restarts` times. A signal to this
    process is passed on to the ranks, which have `grace_s` seconds to finish their step and save; with `last`, this
    process ends with them, and what asks it to stop later changes nothing.

    Args:
        entry: returns the rank's exit code; None: 0.
        ended: given the rank that a start has failed by (-1: all, with their server), its exit code (below 0: a
            signal), and the same in words.
    """
    code = EXIT_FAILED
    with Signals(last=last) as signals:
        for restart in range(max_restarts + 1):
            with _Ranks(entry, args, num_ranks, restart, max_restarts) as ranks:
                code, again = ranks.run(signals, grace_s, ended)
            if not again:
                break
    return code


class _Ranks:
    """One start of all ranks, with a store of their own; none is left when it is closed."""

    def __init__(
        self,
        entry: Callable[..., int | None],
        args: Sequence[Any],
        num_ranks: int,
        restart: int,
        max_restarts: int,
    ) -> None:
        self._store, port = _loopback_store()
        shared = {
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
            "GROUP_WORLD_SIZE": 1,
            "GROUP_RANK": 0,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": f"threefold-{os.getpid()}",
            "TORCHELASTIC_RESTART_COUNT": restart,
            "TORCHELASTIC_MAX_RESTARTS": max_restarts,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        threads = max(1, (os.cpu_count() or 1) // num_ranks)
        context = multiprocessing.get_context("forkserver")
        self._own = entry.__module__.startswith("threefold.")
        self._all: list[BaseProcess] = []
        for rank in range(num_ranks):
            environ = {
                name: str(value)
                for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()
            }
            rank_args = (entry, tuple(args), threads, environ)
            self._all.append(
                context.Process(target=_rank_process, args=rank_args, name=f"rank {rank}")
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._send(signal.SIGKILL)
        for process in self._all:
            if process.pid is not None:
                process.join(_END_WITHIN_S)
                if process.exitcode == _SERVER_GONE:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)

    def _start(self) -> None:
        with _main_left_out() if self._own else contextlib.nullcontext():
            for process in self._all:
                process.start()

    def run(self, signals: "Signals", grace_s: float, ended: _Ended) -> tuple[int, bool]:
        """Starts the ranks and waits for their end; returns the exit code, and whether another start could help."""
        try:
            self._start()
        except (EOFError, ConnectionError):
            lost = _how_ended(self._all[0], _SERVER_GONE)
            print(lost, file=sys.stderr)
            ended(-1, -signal.SIGKILL, str(lost))
            return EXIT_FAILED, True
        stopped: int | None = None
        failed: BaseProcess | None = None
        ask_at = until = float("inf")
        while (alive := self._alive()) and time.monotonic() < until:
            # Until a signal has arrived or one has ended, or it is time; a kernel cannot wait for ever.
            ends = [signals.reader, *(process.sentinel for process in alive)]
            connection.wait(ends, min(max(0.0, min(ask_at, until) - time.monotonic()), 1e6))
            for number in signals.arrived():
                if stopped is None:
                    stopped = number
                    until = time.monotonic() + grace_s
                self._send(number)
            if (
                failed is None
                and stopped is None
                and (failed := self._first_failed()) is not None
            ):
                ask_at = time.monotonic() + (
                    grace_s if failed.exitcode == EXIT_STOPPED_WITH_CHECKPOINT else _ALONE_S
                )
                until = ask_at + _END_WITHIN_S
            if time.monotonic() >= ask_at or (ask_at < until and not self._alive()):
                ask_at, failed = float("inf"), self._name_failed()
                self._send(signal.SIGTERM)
                self._send(signal.SIGCONT)  # a rank that is stopped would not hear it
        codes = [process.exitcode for process in self._all]
        self._tell(failed or self._first_failed(), stopped, ended)
        if stopped is not None:
            # A second Ctrl-C: the others then lose their connections.
            if (left := 128 + signal.SIGINT) in codes:
                return left, False
            first = codes[0]
            return first if first is not None and first >= 0 else 128 + stopped, False
        if failed is None and (failed := self._first_failed()) is None:
            return 0, False
        if (final := next((each for each in codes if each in _FINAL), None)) is not None:
            return final, False
        code = failed.exitcode
        return code if code is not None and 0 < code != _SERVER_GONE else EXIT_FAILED, True

    def _tell(self, failed: BaseProcess | None, stopped: int | None, ended: _Ended) -> None:
        """Reports the rank by which a start has failed, if it has; also one that does not end when asked to."""
        late = self._alive() if stopped is not None else []
        if (failed := next(iter(late), failed)) and failed.exitcode not in _FINAL:
            code = 128 + (stopped or 0) if late else failed.exitcode or 0
            rank, number = self._all.index(failed), code
            if code == _SERVER_GONE:
                rank, number = -1, -signal.SIGKILL
            ended(rank, number, str(_how_ended(failed, code)))

    def _alive(self) -> list[BaseProcess]:
        return [
            process
            for process in self._all
            if process.pid is not None and process.exitcode is None
        ]

    def _first_failed(self) -> BaseProcess | None:
        # Others may have ended by now as well: with a code of ours, for they have lost that one.
        return min(
            (each for each in self._all if each.exitcode),
            key=lambda each: (each.exitcode in (EXIT_FAILED, *_FINAL), each.exitcode or 0),
            default=None,
        )

    def _name_failed(self) -> BaseProcess | None:
        """Whom the others have failed by, which may be known to have ended after them; printed if it could not."""
        failed = self._first_failed()
        if failed and ((failed.exitcode or 0) < 0 or failed.exitcode == _SERVER_GONE):
            sys.stderr.write(f"{_how_ended(failed, failed.exitcode or 0)}\n")
        return failed

    def _send(self, number: int) -> None:
        for process in self._alive():
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


@contextlib.contextmanager
def _main_left_out() -> Iterator[None]:
    """Lets processes that are started meanwhile run without the user's script, which they would import again.

    A script that calls `threefold.train` outside of `if __name__ == "__main__"` would start ranks of ranks.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _loopback_store() -> tuple[Any, int]:
    """A store for the ranks, kept in this process, and its port on the loopback interface."""
    import torch.distributed as dist

    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind((LOOPBACK, 0))
    listening.listen(socket.SOMAXCONN)
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK,
        port,
        None,
        True,
        timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, port


def _how_ended(failed: BaseProcess, code: int) -> Problem:
    """The failure of a rank that could not report it itself."""
    what = f"{failed.name} (process {failed.pid}) left with exit code {code}, without an error"
    fix = (
        "look for sys.exit or os._exit in the code that it calls: a loss, a callback, a library"
    )
    if code - 128 in STOPS:
        what = f"the ranks were asked to end by {signal_name(code - 128)}, and did not in time, or were asked twice"
        fix = "see what that rank waits for; or --checkpoint.grace_s with the time that a step and a save take"
    elif code < 0 or code == _SERVER_GONE:
        what = f"{failed.name} (process {failed.pid}) was ended by {signal_name(-code)}"
        fix = "after SIGKILL look for `Out of memory` in the kernel's log (dmesg)"
    if code == _SERVER_GONE:
        what = "the process that the ranks are forked from was ended"
    return Problem(what, "all ranks to run until the end", fix)


def signal_name(number: int) -> str:
    """`SIGKILL`; `signal 42` for one without a name."""
    return {int(each): each.name for each in signal.Signals}.get(number, f"signal {number}")


def _rank_process(
    entry: Callable[..., int | None], args: Sequence[Any], threads: int, environ: dict[str, str]
) -> None:
    die_with_creator()
    os.environ.update(environ)
    stay_on_loopback()
    import torch

    torch.set_num_threads(threads)
    code = EXIT_FAILED
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = entry(*args) or 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        # An entry reports its expected errors itself; this one is unexpected.
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    # Whatever is still running could keep a finished rank alive forever.
    leave = threading.Timer(_LEAVES_AFTER_S, os._exit, (0,))
    leave.daemon = True
    leave.start()


def serve_one_rank(worker: int) -> None:
    """For a loader's worker: it ends with its rank, and what asks a group of processes to stop is for ranks."""
    ignore(PASSED_ON)
    die_with_creator()


def die_with_creator() -> None:
    """Kills this process as soon as the one that created it has ended, for ranks and for a loader's workers.

    Its parent is the server that it was forked from, which ends with the creator on Linux, where the kernel does it: of
    a process that is stopped (SIGSTOP), no thread could. Elsewhere the server lives as long as what it has forked.
    """
    die_with_parent()
    creator = multiprocessing.parent_process()
    assert creator is not None

    def wait() -> None:
        creator.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="creator", daemon=True).start()


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies: a launcher, or the server that it was forked from."""
    if sys.platform != "linux":
        return
    import ctypes

    parent, set_parent_death_signal = os.getppid(), 1
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(EXIT_FAILED)


# A run that is asked by one of these finishes its step and saves.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# To the ranks, unless they are ignored here, as SIGHUP is under nohup.
PASSED_ON = (*STOPS, signal.SIGQUIT)


class Signals:
    """The signals that arrive while it is open; `reader` becomes readable when one does."""

    def __init__(self, *, last: bool) -> None:
        """Args:
        last: the process ends after it; until then it continues hearing what would ask it to stop.
        """
        self.reader, self._writer = os.pipe()
        self._last, self._previous = last, dict[int, Any]()
        self._woken_before: int | None = None

    def __enter__(self) -> Self:
        os.set_blocking(self._writer, False)
        os.set_blocking(self.reader, False)
        if threading.current_thread() is threading.main_thread():
            # The kernel may give one to another thread, as it does after a stop (SIGSTOP): that wakes no Python.
            self._woken_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._previous = {
                number: signal.signal(number, lambda *_: None)  # received signals are written
                for number in PASSED_ON
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            if not self._last or number not in STOPS:
                signal.signal(number, handler)
        if not self._last:
            if self._woken_before is not None:
                signal.set_wakeup_fd(self._woken_before)
            os.close(self.reader)
            os.close(self._writer)

    def arrived(self) -> bytes:
        """The numbers of the signals since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            return bytes(each for each in os.read(self.reader, 1024) if each in self._previous)
        return b""


def ignore(numbers: tuple[int, ...] = STOPS) -> None:
    """From now on these change nothing.

    Python gives a signal that it handles back to the system, which ends the process, long before the process has ended.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
