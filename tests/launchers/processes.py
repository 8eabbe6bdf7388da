"""`threefold ...` as several processes at once, each with an environment of its own, as launchers start them.

They are forked from the server of the tests' ranks, which has torch imported: a wrong set-up is seen in the time that
it takes to be found, not to import.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks.runs import _command_here
from ranks.spawn import PRELOAD


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    answers = context.Queue()
    processes = []
    for number, environ in enumerate(environs):
        given = (*arguments, *(extra or {}).get(number, ()))
        plant = (plants or {}).get(number)
        target = (answers, number, str(folder), dict(environ), given, plant)
        processes.append(context.Process(target=_one, args=target))
    for process in processes:
        process.start()
    try:
        return _collect(answers, len(processes), timeout_s)
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(answers: Any, count: int, timeout_s: float) -> list[Ended]:
    found: dict[int, Ended] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < count:
        try:
            number, ended = answers.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            missing = sorted(set(range(count)) - set(found))
            raise AssertionError(f"processes {missing} have not ended within {timeout_s} s") from None
        found[number] = ended
    return [found[number] for number in range(count)]


def _one(
    answers: Any,
    number: int,
    folder: str,
    environ: dict[str, str],
    arguments: tuple[str, ...],
    plant: Callable[[], None] | None,
) -> None:
    os.environ.update(environ)
    if plant is not None:
        plant()
    begun = time.monotonic()
    code, out, err = _command_here(folder, arguments)
    answers.put((number, Ended(code, out, err, time.monotonic() - begun)))
    answers.close()
    answers.join_thread()
    # A thread that still waits for somebody else's program must not keep the process.
    os._exit(0)


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
