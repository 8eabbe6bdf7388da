"""Requests to stop a run: by signals to any rank, or by a hook; all ranks end after the same step."""

import os
import signal
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from threefold.errors import RunError
from threefold.mesh.local_ranks import STOPS
from threefold.mesh.mesh import Mesh

Each = TypeVar("Each")
HOOK = "hook"
_KEY = "threefold/stop-after"  # and who asks: the store may outlive a restart, and hold an older request
# A terminal sends Ctrl-C to every process and a launcher passes it on: within this time it is one request.
_ONE_REQUEST_S = 1.0
# This many signals of one kind within this time end the process at once, whatever it is doing.
_AT_ONCE = 3


class EvaluationLeft(RunError):
    """A signal asks for a stop during an evaluation, which every rank leaves; the next start makes it."""


class StopRequest:
    """Listens for stop signals while it is open: a signal to any rank lets all of them finish the same step.

    A second Ctrl-C leaves a step that does not end. Once the last save has begun (`saving`), further signals change
    nothing; three of one kind within a second end the process at once, and say so (SIGHUP alone is no sign of haste).

    No collective is spent on it. The rank that is signalled in step s publishes s + 2 in the rendezvous store before it
    enters step s + 1; no other rank can finish step s + 1 without it, so every rank reads the same answer at the end of
    that step at the latest.
    """

    def __init__(self, mesh: Mesh, *, last: bool = False) -> None:
        """Args:
        last: the process ends after it; until then further signals change nothing.
        """
        self._mesh, self._last = mesh, last
        self.saving = False
        self._asked: dict[int, deque[float]] = {
            number: deque(maxlen=_AT_ONCE) for number in STOPS
        }
        self._first_s: float | None = None
        self._by_hook = False
        self._stop_after: int | None = None
        self.by = HOOK  # or a signal's name
        self.left = False  # an evaluation
        self._key = f"{_KEY}/{mesh.share('stop requests', lambda: uuid.uuid4().hex)}"
        self._previous: dict[int, Any] = {}
        self._told_before = -1
        self._told: socket.socket | None = None

    def __enter__(self) -> "StopRequest":
        # Python gives signals to the main thread alone; who calls from another, as Ray Train does, stops by a hook.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in STOPS:
            # nohup's run outlives its terminal. SIGINT, which a shell's background job ignores, comes from a launcher.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._ask)
        # A main thread that waits in a collective runs no handler: a second Ctrl-C is heard beside it.
        heard, self._told = socket.socketpair()
        self._told.setblocking(False)
        self._told_before = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
        threading.Thread(
            target=self._listen, args=(heard,), name="stop signals", daemon=True
        ).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.saving = True
        if self._told is not None and not self._last:
            signal.set_wakeup_fd(self._told_before)
            self._told.close()
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _listen(self, heard: socket.socket) -> None:
        first_s, all_numbers = None, set[int]()
        with heard:
            while received := heard.recv(64):
                now = time.monotonic()
                numbers = set(received) & self._previous.keys()
                all_numbers |= numbers
                again = first_s is not None and now - first_s > _ONE_REQUEST_S
                if numbers and again and signal.SIGINT in all_numbers and not self.saving:
                    os._exit(128 + signal.SIGINT)
                first_s = now if first_s is None and numbers else first_s

    def _ask(self, number: int, frame: object) -> None:
        times, now = self._asked[number], time.monotonic()
        # A launcher that is interrupted twice passes the second on as SIGTERM.
        again = self._first_s is not None and now - self._first_s > _ONE_REQUEST_S
        if again and not self.saving and self._asked[signal.SIGINT]:
            os._exit(128 + signal.SIGINT)
        self._first_s = self._first_s or now
        times.append(now)
        # A closed terminal signals it several times: the shell, the kernel and a launcher each to every process.
        impatient = (
            len(times) == _AT_ONCE
            and now - times[0] <= _ONE_REQUEST_S
            and number != signal.SIGHUP
        )
        if impatient:
            name = signal.Signals(number).name
            os.write(
                2,
                f"ended at once by {_AT_ONCE} x {name}: what was being saved is lost\n".encode(),
            )
            os._exit(128 + number)

    def ask(self) -> None:
        """Asks for a stop as a signal does; for one rank, or several of them."""
        self._by_hook = True

    @property
    def _is_asked(self) -> bool:
        return self._by_hook or any(self._asked.values())

    def overdue(self, grace_s: float) -> bool:
        """Whether a signal has asked for it longer ago, and the last save has not begun."""
        return (
            self._first_s is not None
            and not self.saving
            and time.monotonic() - self._first_s > grace_s
        )

    @property
    def _why(self) -> str:
        return next(
            (signal.Signals(number).name for number, times in self._asked.items() if times),
            HOOK,
        )

    def until_asked(self, batches: Iterable[Each], step: int) -> Iterator[Each]:
        """Batches of the evaluation after `step`.

        Raises:
            EvaluationLeft: a signal has asked for a stop, of which `after(step)` then tells on every rank.
        """
        for batch in batches:
            if any(self._asked.values()):
                if self._mesh.store is not None:
                    self._mesh.store.compare_set(self._key, "", f"{step} {self._why}")
                raise EvaluationLeft(
                    f"the evaluation after step {step} was left: {self._why}",
                    expected="an evaluation without a stop signal",
                    fix="start again: the evaluation is made first",
                )
            yield batch

    def after(self, step: int) -> bool:
        """Whether the run stops after `step`, which this rank has just finished."""
        store = self._mesh.store
        if store is None:
            self.by = self._why
            return self._is_asked
        if self._stop_after is None:
            if self._is_asked:
                store.compare_set(self._key, "", f"{step + 2} {self._why}")
            if store.check([self._key]):
                last, self.by = store.get(self._key).decode().split()
                self._stop_after = int(last)
        return self._stop_after is not None and step >= self._stop_after
