"""What a process hears that asks it to stop, while its run goes and after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from threefold.mesh.signals import PASSED_ON, STOPS, Signals

_ENDS = """
import atexit, os, signal, sys
from threefold.mesh.signals import Signals, ignore

atexit.register(ignore)
number = int(sys.argv[1])


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


def test_program_that_goes_on_has_its_own_handlers_again() -> None:
    before = [signal.getsignal(number) for number in PASSED_ON]
    with Signals(last=False) as signals:
        for number in PASSED_ON:
            os.kill(os.getpid(), number)
        assert sorted(signals.arrived()) == sorted(PASSED_ON)
        assert signals.arrived() == b""
    assert [signal.getsignal(number) for number in PASSED_ON] == before


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_process_that_ends_keeps_its_exit_code(number: int) -> None:
    done = subprocess.run([sys.executable, "-c", _ENDS, str(int(number))], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (75, "")
