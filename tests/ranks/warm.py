"""Programs forked from the server of the tests' ranks, which has imported already what a cold start would import.

Each gets what a started program has: arguments, an environment, a folder, a process group, files for its output. What
it forks from a server in its turn, as `threefold train` does its ranks, comes from the tests' server too, and inherits
all of that from it as from a server of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import popen_forkserver
from pathlib import Path
from typing import Any

from ranks.spawn import fork_from_own_server, server

_ABORTED_WITHIN_S = 3.0


@dataclass(frozen=True)
class _Place:
    """What a process inherits from the one that starts it; group 0 is a process group of its own."""

    folder: str
    environ: Mapping[str, str]
    group: int
    out: str
    err: str

    def enter(self) -> None:
        os.setpgid(0, self.group)
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.folder)
        for number, path in ((1, self.out), (2, self.err)):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(file, number)
            os.close(file)
        faulthandler.enable(2)  # a crash shows where it was
        fork_from_own_server()
        launch = popen_forkserver.Popen._launch

        def launch_here(popen: popen_forkserver.Popen, process: Any) -> None:
            here = replace(
                self, folder=os.getcwd(), environ=dict(os.environ), group=os.getpgrp()
            )
            process._target, process._args = _in_place, (here, process._target, process._args)
            launch(popen, process)

        popen_forkserver.Popen._launch = launch_here


def _in_place(place: _Place, target: Callable[..., Any], args: Sequence[Any]) -> Any:
    place.enter()
    _attach_referee()
    _let_gloo_finish()
    return target(*args)


def _let_gloo_finish() -> None:
    """Before a program leaves its process group, gloo's thread gets Python's lock, with which it drops its last work.

    DistributedDataParallel frees the group under that lock, and waits for the thread: in a short program for ever.
    """
    import torch.distributed as dist

    destroy = dist.destroy_process_group

    def after_a_moment(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.1)
        destroy(*args, **kwargs)

    dist.destroy_process_group = after_a_moment


def _attach_referee() -> None:
    """In a command that the referee watches: its `sitecustomize`, which waits for imports that are done here."""
    if "THREEFOLD_REFEREE" not in os.environ:
        return
    before = list(sys.meta_path)
    runpy.run_path(
        os.environ["PYTHONPATH"].split(os.pathsep)[0] + "/sitecustomize.py",
        run_name="sitecustomize",
    )
    for finder in [finder for finder in sys.meta_path if finder not in before]:
        finder._action(sys.modules[finder._name])
        sys.meta_path.remove(finder)
    # The server has imported it, with the function that nobody watches yet.
    from torch.distributed.fsdp import fully_shard

    from threefold.model import data_parallel

    data_parallel.fully_shard = fully_shard


def threefold() -> None:
    """The command."""
    from threefold.__main__ import main

    main()


def torchrun() -> None:
    """torchrun's agent; its ranks are warm too with `--start-method forkserver --run-path /path/of/a/script.py`."""
    from torch.distributed.run import main

    main()


def script() -> None:
    """`python SCRIPT ARGUMENTS...`"""
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_program(
    main: Callable[[], Any], arguments: Sequence[str], first: Callable[[], None] | None = None
) -> None:
    sys.argv = [main.__name__, *arguments]
    try:
        if first is not None:
            first()
        main()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class Overdue(AssertionError):
    """A program has not done in time what it should: its test is run once more, and the report shows the stacks."""


class Running:
    """A program that has been started; to be used with `with`, which ends it and all that it has started."""

    def __init__(
        self,
        main: Callable[[], Any],
        folder: Path,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        one_output: bool = False,
        first: Callable[[], None] | None = None,
    ) -> None:
        self._words = " ".join((main.__name__, *arguments))
        self._output = tempfile.TemporaryDirectory(prefix="threefold-tests-")
        self._out = Path(self._output.name, "out")
        self._err = self._out if one_output else Path(self._output.name, "err")
        self._out.touch()
        self._err.touch()
        place = _Place(str(folder), dict(environ), 0, str(self._out), str(self._err))
        self._process = server().Process(
            target=_in_place, args=(place, run_program, (main, tuple(arguments), first))
        )
        self._process.start()

    @property
    def process(self) -> int:
        return self._process.pid

    def out(self) -> str:
        """What it has printed to standard output so far, or with `one_output` to both."""
        return self._out.read_text()

    def err(self) -> str:
        return self._err.read_text()

    def running(self) -> bool:
        return self._process.exitcode is None

    def wait(self, timeout_s: float) -> int:
        """The exit code.

        Raises:
            Overdue: it has not ended in time.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise Overdue(
                f"`{self._words}` has not ended within {timeout_s} s; it has printed:{self._last_words()}"
            )
        return self._process.exitcode

    def wait_for(self, what: Callable[[], bool], why: str, timeout_s: float) -> None:
        """Returns as soon as `what` is true or the program has ended; an AssertionError with `why` after the limit."""
        until = time.monotonic() + timeout_s
        while self.running() and not what():
            if time.monotonic() > until:
                raise Overdue(
                    f"`{self._words}`: not within {timeout_s} s: {why}; it has printed:{self._last_words()}"
                )
            self._process.join(0.01)

    def _last_words(self) -> str:
        """What it has printed, and where its processes are: they end by an abort, which shows their stacks."""
        printed = f"\n{self.out()[-2000:]}\n{self.err()[-2000:]}"
        size = self._err.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGABRT)
        self._process.join(_ABORTED_WITHIN_S)
        said = self._err.read_bytes()[size:].decode().splitlines()
        stacks = "\n".join(
            line for line in said if line and not line.startswith("Extension modules:")
        )
        return f"{printed}\nstacks, when it was aborted:\n{stacks[-8000:]}"

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._process.close()
        self._output.cleanup()
