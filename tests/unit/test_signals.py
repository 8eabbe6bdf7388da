"""What a process hears that asks it to stop, while its run goes and after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing import connection
from types import SimpleNamespace

import pytest

from threefold.mesh.local_ranks import PASSED_ON, STOPS, Signals
from threefold.training.stop_request import StopRequest

_ENDS = """
import atexit, os, signal, sys
from threefold.mesh.local_ranks import Signals, ignore

atexit.register(ignore)
number = int(sys.argv[1])
signal.signal(number, signal.SIG_DFL)  # a shell's background job ignores SIGINT, as do its children


class Late:
    def __del__(self, kill=os.kill, number=number, process=os.getpid()):
        kill(process, number)  # when Python has given its signals back


late = Late()
with Signals(last=True) as signals:
    os.kill(os.getpid(), number)
    assert signals.arrived() == bytes([number])
os.kill(os.getpid(), number)
sys.exit(75)
"""


@pytest.fixture
def own_handlers() -> Iterator[list[object]]:
    """The system's, whatever the process ignores that started the tests."""
    before = [signal.getsignal(number) for number in PASSED_ON]
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    yield [signal.SIG_DFL] * len(PASSED_ON)
    for number, handler in zip(PASSED_ON, before, strict=True):
        signal.signal(number, handler)


def test_program_that_goes_on_has_its_own_handlers_again(own_handlers: list[object]) -> None:
    with Signals(last=False) as signals:
        for number in PASSED_ON:
            os.kill(os.getpid(), number)
        assert sorted(signals.arrived()) == sorted(PASSED_ON)
        assert signals.arrived() == b""
    assert [signal.getsignal(number) for number in PASSED_ON] == own_handlers


def test_signal_that_another_thread_gets_is_heard(own_handlers: list[object]) -> None:
    """A process that was stopped gives it to any of its threads, which wakes no handler of Python."""
    leave = threading.Event()
    other = threading.Thread(target=leave.wait)
    other.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with Signals(last=False) as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            assert connection.wait([signals.reader], 2)
            assert signals.arrived() == bytes([signal.SIGTERM])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        leave.set()
        other.join()


def test_what_is_ignored_stays_ignored(own_handlers: list[object]) -> None:
    """nohup's SIGHUP, and the SIGINT of a shell's background job."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with Signals(last=False) as signals:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signals.arrived() == bytes([signal.SIGTERM])
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_process_that_ends_keeps_its_exit_code(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS, str(int(number))],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stderr) == (75, "")


def test_closed_terminal_that_tells_it_often_is_one_request(own_handlers: list[object]) -> None:
    """The shell, the kernel and the launcher each send SIGHUP to every process; three SIGTERM would end it at once."""
    mesh = SimpleNamespace(share=lambda name, make: make(), store=None)
    with StopRequest(mesh) as stop:  # type: ignore[arg-type]
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.after(1) and stop.by == "SIGHUP"
