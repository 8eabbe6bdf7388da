"""Parts encoded by several new processes of this host, one part at a time each; their exceptions are raised here."""

import multiprocessing
import signal
from collections.abc import Generator, Sequence
from contextlib import suppress
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Protocol, cast

from threefold.data.store.parts import EncodedPart, PartDone
from threefold.errors import RunError


class Maker(Protocol):
    """The maker of a part; pickles."""

    def make(self, part: EncodedPart) -> PartDone: ...


def make_in_processes(
    maker: Maker, parts: Sequence[EncodedPart], *, num_workers: int
) -> Generator[PartDone, None, None]:
    """Encodes parts in `num_workers` new processes; yields each as it is done, in any order.

    Closing the iterator ends the processes. A RunError if one ended without an error, as after a kill for memory.
    """
    context = multiprocessing.get_context("spawn")
    waiting = iter(parts)
    busy: dict[Connection, EncodedPart] = {}
    processes = []

    def send_next(worker: Connection) -> None:
        for part in islice(waiting, 1):
            busy[worker] = part
            # The recv that follows notices a process that is already dead.
            with suppress(BrokenPipeError, ConnectionResetError):
                worker.send(part)

    try:
        # Ctrl-C reaches the entire process group; this process ends its workers, which inherit the blocked signal.
        resource_tracker.ensure_running()  # which else, with the first of them, would unblock it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            for _ in range(min(num_workers, len(parts))):
                ours, theirs = context.Pipe()
                processes.append(
                    context.Process(target=_work, args=(theirs, maker), daemon=True)
                )
                processes[-1].start()
                theirs.close()
                send_next(ours)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while busy:
            for ready in cast("list[Connection]", wait(list(busy))):
                part = busy.pop(ready)
                try:
                    answer = ready.recv()
                except (EOFError, OSError):
                    raise RunError(
                        f"a process that prepares tokens ended while it encoded part {part.number} "
                        f"({part.size_bytes:,} bytes of text)",
                        expected="every process to finish; one that ends without an error was most often killed "
                        "because memory ran out",
                        fix="run the same command again with fewer processes (--num-workers 1): finished parts are "
                        "reused",
                    ) from None
                if isinstance(answer, BaseException):
                    raise answer
                send_next(ready)
                yield answer
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(connection: Connection, maker: Maker) -> None:
    """In a new process: encodes the parts that it receives until the other end closes."""
    with suppress(EOFError, OSError):
        while True:
            part = connection.recv()
            try:
                answer: object = maker.make(part)
            except Exception as error:
                answer = error
            connection.send(answer)
