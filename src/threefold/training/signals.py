"""Stopping on request: a signal to any rank lets all of them finish the same step.

No collective is spent on it. The rank that is signalled in step s publishes s + 2 in the rendezvous store before it
enters step s + 1; no other rank can finish step s + 1 without it, so every rank reads the same answer at the end of
that step at the latest.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from types import FrameType
from typing import Any

from threefold.mesh.mesh import Mesh

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_KEY = "threefold/stop-after"  # and who asks: the store may outlive a restart, and hold an older request
# A terminal sends Ctrl-C to every process and a launcher passes it on: within this time it is one request.
_ONE_REQUEST_S = 1.0


class StopRequest:
    """Listens for stop signals while it is open; `after(step)` says whether to stop now, alike on every rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._asked_at: float | None = None
        self._by_hand = False
        self._stop_after: int | None = None
        self._key = f"{_KEY}/{mesh.share('stop requests', lambda: uuid.uuid4().hex)}"
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A launcher that is interrupted twice passes the second on as SIGTERM.
        if self._asked_at is not None and self._by_hand and now - self._asked_at > _ONE_REQUEST_S:
            os._exit(128 + signal.SIGINT)
        self._by_hand = self._by_hand or number == signal.SIGINT
        self._asked_at = self._asked_at or now

    def after(self, step: int) -> bool:
        """Whether the run stops after `step`, which this rank has just finished."""
        store = self._mesh.store
        if store is None:
            return self._asked_at is not None
        if self._stop_after is None:
            if self._asked_at is not None:
                store.compare_set(self._key, "", str(step + 2))
            if store.check([self._key]):
                self._stop_after = int(store.get(self._key))
        return self._stop_after is not None and step >= self._stop_after
