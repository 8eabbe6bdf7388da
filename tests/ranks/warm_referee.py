"""`threefold referee -- COMMAND` and what it watches, all of it forked from the server of the tests' ranks.

An interpreter that is started imports torch and transformers for seconds, and a watched torchrun of two ranks is four
of them. What the start itself does, `sitecustomize`, each process that is forked runs from its file;
tests/unit/test_referee_watch.py and tests/examples/test_referee_common.py start real ones.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ranks import runs, warm
from ranks.spawn import server

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
REFEREE = (sys.executable, "-m", "threefold", "referee")


def run(
    folder: Path, environ: Mapping[str, str], *words: str
) -> subprocess.CompletedProcess[str] | None:
    """A program run to its end; None for one that cannot be forked."""
    if words[: len(REFEREE)] == REFEREE:
        arguments = ("referee", *words[len(REFEREE) :])
        return runs.run(warm.threefold, folder, arguments, environ, first=fork_what_is_watched)
    program = _program(words)
    # Some ten seconds; the agent of a forked torchrun has hung at its end, and then all is done once more.
    return program and runs.run(program[0], folder, program[1], environ, timeout_s=150)


def _program(words: Sequence[str]) -> tuple[Callable[[], None], Sequence[str]] | None:
    """What runs in a forked process, and its arguments."""
    if tuple(words[:3]) == TORCHRUN:
        script = next(place for place, word in enumerate(words) if word.endswith(".py"))
        forked = ("--start-method", "forkserver", "--run-path")
        return warm.torchrun, (*words[3:script], *forked, *words[script:])
    if words[0] == sys.executable and words[1].endswith(".py"):
        return warm.script, words[1:]
    return None


def fork_what_is_watched() -> None:
    """From now on `threefold.referee.watch` of this process, itself forked, starts nothing that it can fork."""
    from threefold.referee import watch

    watch.subprocess = SimpleNamespace(Popen=_started)  # type: ignore[attr-defined]


@contextmanager
def _started(command: Sequence[str], *, env: Mapping[str, str], stdout: Any) -> Iterator[Any]:
    """As `subprocess.Popen`, as far as the referee asks: `a && b` of a shell is run one after the other."""
    commands = (
        [shlex.split(each) for each in command[2].split(" && ")]
        if command[:2] == ["sh", "-c"]
        else [command]
    )
    programs = [_program(words) for words in commands]
    # The command that is run alone ends in the middle of its program, which torchrun's agent awaits of no forked rank.
    if None in programs or "THREEFOLD_REFEREE_ALONE" in env:
        with subprocess.Popen(command, env=env, stdout=stdout) as process:
            yield process
        return

    def wait() -> int:
        for program in programs:
            process = server().Process(target=_forked, args=(program, stdout is sys.stderr))
            kept = dict(os.environ)
            os.environ.clear()
            os.environ.update(env)  # a process inherits it when it starts
            try:
                process.start()
            finally:
                os.environ.clear()
                os.environ.update(kept)
            process.join()
            if process.exitcode:
                break
        return process.exitcode

    yield SimpleNamespace(wait=wait)


def _forked(program: tuple[Callable[[], None], Sequence[str]], to_stderr: bool) -> None:
    if to_stderr:
        os.dup2(2, 1)
    warm.run_program(program[0], program[1])
