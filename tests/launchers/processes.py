"""`threefold ...` as several processes at once, each with an environment of its own, as launchers start them.

They are forked from the server of the tests' ranks, which has torch imported: a wrong set-up is seen in the time that
it takes to be found, not to import.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ranks import warm
from ranks.runs import environment


@dataclass(frozen=True)
class Ended:
    """How one of them ended, and how long that took."""

    code: int
    out: str
    err: str
    seconds: float


def together(
    folder: Path,
    environs: Sequence[Mapping[str, str]],
    *arguments: str,
    plants: Mapping[int, Callable[[], None]] | None = None,
    extra: Mapping[int, Sequence[str]] | None = None,
    timeout_s: float = 60.0,
) -> list[Ended]:
    """Runs the command in `folder` once for each environment, all at once; returns their ends in that order.

    Args:
        plants: functions that are called first in some of the processes.
        extra: further arguments of some of them.

    Raises:
        AssertionError: one has not ended in time; it is killed and named.
    """
    ended: dict[int, Ended] = {}
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                warm.Running(
                    warm.threefold,
                    folder,
                    (*arguments, *(extra or {}).get(number, ())),
                    {**environment(folder), **environ},
                    first=(plants or {}).get(number),
                )
            )
            for number, environ in enumerate(environs)
        ]
        begun = time.monotonic()  # the server has imported by now
        while len(ended) < len(started):
            for number, each in enumerate(started):
                if number not in ended and not each.running():
                    seconds = time.monotonic() - begun
                    ended[number] = Ended(each.wait(0), each.out(), each.err(), seconds)
            if time.monotonic() - begun > timeout_s:
                missing = sorted(set(range(len(started))) - set(ended))
                raise AssertionError(f"processes {missing} have not ended within {timeout_s} s")
            time.sleep(0.01)
    return [ended[number] for number in range(len(started))]


def rank(number: int, world_size: int, port: int, **others: str) -> dict[str, str]:
    """torch's variables for one of the ranks of this machine."""
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **others,
    }


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
