"""The signals that ask a group of processes to stop, as the process hears them that started its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any, Self

# A run that is asked by one of these finishes its step and saves.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# To the ranks, unless they are ignored here, as SIGHUP is under nohup.
PASSED_ON = (*STOPS, signal.SIGHUP, signal.SIGQUIT)


class Signals:
    """The signals that arrive while it is open; `reader` becomes readable when one does."""

    def __init__(self, *, last: bool) -> None:
        """Args:
        last: the process ends after it; until then it goes on hearing what would ask it to stop.
        """
        self.reader, self._writer = os.pipe()
        self._last, self._previous = last, dict[int, Any]()

    def __enter__(self) -> Self:
        os.set_blocking(self._writer, False)
        os.set_blocking(self.reader, False)
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._note)
                for number in PASSED_ON
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            if not self._last or number not in STOPS:
                signal.signal(number, handler)
        if not self._last:
            os.close(self.reader)
            os.close(self._writer)

    def _note(self, number: int, frame: object) -> None:
        os.write(self._writer, bytes([number]))

    def arrived(self) -> bytes:
        """The numbers of the signals since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.reader, 1024)
        return b""


def ignore(numbers: tuple[int, ...] = STOPS) -> None:
    """From now on these change nothing.

    Python gives a signal that it handles back to the system, which ends the process, long before the process has ended.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
