"""Ranks that hang where a test wants it, and go on when it lets them: whole runs of ranks with faults planted in them.

A rank that has come to its hang writes a file with its process, and stays there until the test, which has read what
the others say of it, makes another. So one run passes through many hangs, and only the last may end it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ranks import warm
from ranks.runs import environment
from threefold.errors import DataError

FOLDER = "hangs"
_RAISED = {
    "raise": RuntimeError("raised by the test"),
    "full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "memory": MemoryError(),
    "row": DataError(
        "row 7 has no text", expected="a text in each row", fix="leave the row out"
    ),
    "sys.exit": SystemExit(4),
}
_NAMED = re.compile(r"^no progress for \d+ s: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Hang:
    """One hang: of which rank, in which place (a function below), in which step, and in which way.

    Attributes:
        step: 0: when a rank first comes to that place.
        how: asleep, lock (one that is held), gil (Python's lock is held), stop (SIGSTOP), kill, exit (at once), a
            signal by its name, or what is raised (`_RAISED`).
        phase: as the ranks are to say it.
        said: what else they are to say.
    """

    place: str
    rank: int
    phase: str
    step: int = 0
    how: str = "asleep"
    said: str = ""

    @property
    def name(self) -> str:
        return f"{self.place}-{self.step}-{self.rank}-{self.how}"

    def here(self) -> None:
        """Hangs; called by the rank."""
        if self.how == "exit":
            os._exit(3)
        reached, release = Path(FOLDER, self.name), Path(FOLDER, f"{self.name}.release")
        if self.how == "gil":
            os.mkfifo(release)
        Path(f"{reached}.new").write_text(str(os.getpid()))
        Path(f"{reached}.new").rename(reached)
        if self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how in _RAISED:
            raise _RAISED[self.how]
        elif self.how.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[self.how])
            _until(release)
        elif self.how == "gil":
            held = ctypes.PyDLL(None)
            # Returns when it is opened for writing.
            file = held.open(str(release).encode(), os.O_RDONLY)
            held.close(file)
        elif self.how == "lock":
            lock = threading.Lock()
            lock.acquire()
            threading.Thread(
                target=lambda: (_until(release), lock.release()), daemon=True
            ).start()
            lock.acquire()
        else:
            _until(release)


def _until(release: Path) -> None:
    while not release.exists():
        time.sleep(0.01)


class Hanging:
    """A run with hangs in it; `err` is what it has printed to standard error."""

    def __init__(self, folder: Path, hangs: Sequence[Hang], arguments: Sequence[str]) -> None:
        self._folder = folder
        (folder / FOLDER).mkdir()
        words = (json.dumps([asdict(hang) for hang in hangs]), *arguments)
        self.running = warm.Running(_train_hanging, folder, words, environment(folder))

    @property
    def err(self) -> str:
        return self.running.err()

    def reach(self, hang: Hang) -> int:
        """Waits until a rank hangs; returns its process."""
        path = self._folder / FOLDER / hang.name
        self.running.wait_for(path.exists, f"{hang.name}: {self.err}", 20)
        assert path.exists(), self.err + self.running.out()
        return int(path.read_text())

    def named(self, hang: Hang, within_s: float = 20.0) -> list[str]:
        """Waits until the rank is named, then lets it go on; returns all that were named meanwhile."""
        process, before = self.reach(hang), len(self.err)

        def found() -> list[str]:
            """On a busy machine another step may have been slow before, and be told last."""
            lines = _NAMED.findall(self.err[before:])
            return [line for line in lines if not hang.step or f"of step {hang.step}" in line]

        self.running.wait_for(lambda: bool(found()), f"{hang.name}: {self.err}", within_s)
        self.release(hang, process)
        return found()

    def release(self, hang: Hang, process: int) -> None:
        release = self._folder / FOLDER / f"{hang.name}.release"
        if hang.how == "stop":
            os.kill(process, signal.SIGCONT)
        elif hang.how == "gil":
            release.open("wb").close()
        else:
            release.touch()


@contextlib.contextmanager
def hanging(folder: Path, hangs: Sequence[Hang], *arguments: str) -> Iterator[Hanging]:
    """A run of the ranks in `folder`, ended with the test."""
    run = Hanging(folder, hangs, arguments)
    with run.running:
        yield run


def _train_hanging() -> None:
    """`threefold train config.yaml ...` as it starts its ranks, with hangs planted in them."""
    from threefold.commands.arguments import split
    from threefold.config import loading
    from threefold.mesh import local_ranks
    from threefold.run import start

    hangs, *arguments = sys.argv[1:]
    # A rank that holds Python's lock does not end when it is asked.
    local_ranks._END_WITHIN_S = 2.0
    _, overrides = split(arguments)
    loaded = loading.load("config.yaml", [*overrides, ("mesh.device", "cpu")], environ={})
    start._rank_entry = partial(_hanging_rank, [Hang(**hang) for hang in json.loads(hangs)])
    sys.exit(start.train_command(loaded, force=True))


def _hanging_rank(hangs: Sequence[Hang], loaded: Any, topology: Any, why: str) -> int:
    plant(hangs, int(os.environ["RANK"]))
    from threefold.run.start import _rank_entry

    return _rank_entry(loaded, topology, why)


def plant(hangs: Sequence[Hang], rank: int) -> None:
    """Plants the hangs of this rank."""
    from threefold.training.progress import Progress

    plain, reached = Progress.enter, [0]

    def enter(self: Progress, phase: str, *, step: int | None = None) -> None:
        plain(self, phase, step=step)
        reached[0] = self.place.step

    Progress.enter = enter  # type: ignore[method-assign]
    for place in {hang.place for hang in hangs}:
        own = [hang for hang in hangs if hang.place == place and hang.rank == rank]
        _PLACES[place](partial(_come, own, reached))


def _come(own: list[Hang], reached: Sequence[int]) -> None:
    if (hang := next((each for each in own if each.step in (0, reached[0])), None)) is not None:
        own.remove(hang)
        hang.here()


def _before(owner: str, name: str) -> Callable[[Callable[[], None]], None]:
    """Comes to the hang whenever a function is called; `owner`: a module, or a class of one."""

    def install(come: Callable[[], None]) -> None:
        from importlib import import_module

        module, _, cls = owner.partition(":")
        holder = getattr(import_module(module), cls) if cls else import_module(module)
        plain = getattr(holder, name)

        def planted(*args: Any, **options: Any) -> Any:
            come()
            return plain(*args, **options)

        setattr(holder, name, planted)

    return install


def _in_backward(come: Callable[[], None]) -> None:
    """In a hook of the head's input: when some gradients are there and others are not."""
    from threefold.training import step

    plain, whole, in_step = step.forward_sums, step.TrainStep._backward, []

    def backward(self: Any, *args: Any) -> Any:
        in_step.append(True)
        try:
            return whole(self, *args)
        finally:
            in_step.clear()

    @contextlib.contextmanager
    def forward_sums(model: Any, *args: Any, **options: Any) -> Iterator[Any]:
        def look(module: Any, inputs: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            if in_step and states.requires_grad:
                states.register_hook(lambda gradient: come())

        handle = model.module.model.layers[0].register_forward_hook(look)
        with plain(model, *args, **options) as sums:
            handle.remove()
            yield sums

    step.forward_sums, step.TrainStep._backward = forward_sums, backward  # type: ignore[method-assign]


def _in_compiler(come: Callable[[], None]) -> None:
    """In torch's compiler, whose second half is left out."""
    import torch

    def compiled(graph: Any, inputs: Any) -> Any:
        come()
        return graph.forward

    plain = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self, *args, **options: plain(self, backend=compiled)  # type: ignore[method-assign]


_PLACES: dict[str, Callable[[Callable[[], None]], None]] = {
    "meeting": _before("threefold.mesh.rendezvous", "_verdict"),
    "connecting": _before("threefold.mesh.mesh", "init_device_mesh"),
    "admission": _before("threefold.run.rank", "admit"),
    "preparation": _before("threefold.run.assemble", "rows_of"),
    "loading": _before("threefold.run.assemble", "build"),
    "tracker": _before("threefold.integrations.trackers", "open_trackers"),
    "data": _before("threefold.training.loop:Window", "read"),
    "forward": _before("threefold.training.step:TrainStep", "_backward"),
    "backward": _in_backward,
    "optimizer": _before("threefold.training.step:TrainStep", "_update"),
    "compile": _in_compiler,
    "evaluation": _before("threefold.training.loop", "eval_metrics"),
    "save": _before("threefold.run.checkpointer:Checkpointer", "save"),
    "writing": _before("threefold.checkpoint.background_saver:Saver", "_write"),
    "closing": _before("threefold.mesh.mesh:Mesh", "close"),
}
