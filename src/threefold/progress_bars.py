"""Progress bars for operations longer than a second: with the remaining time, or as plain lines.

On a terminal, rich draws them below what is printed and takes them away when it is over. Where there is no terminal, a
line is written every ten seconds, so that logs stay short. No torch, and nothing heavy before something is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

T = TypeVar("T")

# Shorter than this nothing is shown; and between two lines where there is no terminal.
_SHOWN_AFTER_S, _LINES_EVERY_S = 1.0, 10.0
_silent = False


def print_any_text() -> None:
    """Lets this process print what the encoding of its output lacks, escaped: no name and no sample ends a run."""
    with suppress(AttributeError):  # of what a program has put in its place
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def silence() -> None:
    """No bar is shown in this process any more."""
    global _silent
    _silent = True


class Bar:
    """One thing that is under way; this one is not shown."""

    def advance(self, more: float = 1) -> None:
        """So much more is done."""

    def at(self, done: float, text: str | None = None, *, total: float | None = None) -> None:
        """So much is done; what it is called now, and of how much, if that has changed."""


class _Drawn(Bar):
    """A bar on a terminal."""

    def __init__(self, live: Progress, task: Any) -> None:
        self._live, self._task = live, task

    def advance(self, more: float = 1) -> None:
        self._live.advance(self._task, more)

    def at(self, done: float, text: str | None = None, *, total: float | None = None) -> None:
        self._live.update(self._task, completed=done, description=text, total=total)


class _Lines(Bar):
    """Lines where there is no terminal."""

    def __init__(self, console: Console, what: str, total: float | None) -> None:
        self._console, self._what, self._total = console, what, total
        self._done, self._told = 0.0, time.monotonic()

    def advance(self, more: float = 1) -> None:
        self.at(self._done + more)

    def at(self, done: float, text: str | None = None, *, total: float | None = None) -> None:
        self._done = done
        self._what = text or self._what
        self._total = total or self._total
        if (now := time.monotonic()) - self._told >= _LINES_EVERY_S:
            self._told = now
            share = f"{self._done / self._total:.0%}" if self._total else f"{self._done:,.0f}"
            self._console.print(f"{self._what}: {share}")


class Bars:
    """Bars of one console; several at a time are below one another.

    Attributes:
        quiet: nothing is shown.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        """Args: `console`: None: a new one on stderr."""
        if console is None:
            from rich.console import Console

            # Notebooks and CI set FORCE_COLOR, which rich takes for a terminal; what moves the cursor needs a real one.
            tty = sys.stderr.isatty()
            console = Console(
                stderr=True, force_terminal=tty, soft_wrap=True, markup=False, highlight=False
            )
        self.console, self.quiet = console, quiet
        self._live: Progress | None = None
        self._shown = 0

    @contextmanager
    def show(self, what: str, total: float | None = None, *, done: float = 0) -> Iterator[Bar]:
        """Shows `what` while the block runs, which reports how much of `total` is done; None: unknown."""
        if self.quiet or _silent:
            yield Bar()
        elif self.console.is_terminal:
            live = self._begun()
            task = live.add_task(what, total=total, completed=done, since=time.monotonic())  # type: ignore[arg-type]
            try:
                yield _Drawn(live, task)
            finally:
                live.remove_task(task)
                self._ended()
        else:
            yield _Lines(self.console, what, total)

    def track(self, each: Iterable[T], what: str, total: float | None = None) -> Iterator[T]:
        """The items, one of which is done when the next is asked for; `total`: their number, if they have no length."""
        total = len(each) if isinstance(each, Sequence) else total
        with self.show(what, total) as bar:
            for item in each:
                yield item
                bar.advance()

    def _begun(self) -> Progress:
        self._shown += 1
        if self._live is None:
            self._live = _live(self.console)
            self._live.start()
        return self._live

    def _ended(self) -> None:
        self._shown -= 1
        if not self._shown and self._live is not None:
            self._live.stop()
            self._live = None


def _live(console: Console) -> Progress:
    from rich import progress

    class Late(progress.Progress):
        """Progress bars."""

        def get_renderables(self) -> Iterator[Any]:
            now = time.monotonic()
            tasks = [
                task for task in self.tasks if now - task.fields["since"] >= _SHOWN_AFTER_S
            ]
            yield self.make_tasks_table(tasks) if tasks else ""

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(20),
        progress.TaskProgressColumn(),
    )
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    return Late(*columns, *times, console=console, transient=True)
