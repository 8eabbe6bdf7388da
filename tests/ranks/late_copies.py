"""CUDA streams on a CPU, of which one computes at once and another copies as late as it may: when it is waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Stream:
    """What is queued here happens in `run`, and has read nothing before."""

    def __init__(self, device: Any = None) -> None:
        self.queued: list[Callable[[], object]] = []
        self.events: list[Event] = []

    def record_event(self) -> Event:
        self.events.append(Event(self))
        return self.events[-1]

    def wait_event(self, event: Event) -> None:
        event.stream.run()

    def wait_stream(self, other: Stream) -> None:
        other.run()

    def run(self) -> None:
        queued, self.queued = self.queued, []
        for each in queued:
            each()
        for event in self.events:
            event.happened.set()


class Event:
    """Of a stream; a thread that waits for it does not hasten it."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.happened = stream, threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(60), "nothing waited for the copies"


class Streams(TorchFunctionMode):
    """Stands in for torch.cuda's, inside; `late` are those that were made."""

    def __init__(self) -> None:
        super().__init__()
        self.computing = self.current = Stream()
        self.late: list[Stream] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.copy_ and self.current is not self.computing:
            self.current.queued.append(lambda: function(*args, **(kwargs or {})))
            return args[0]
        return function(*args, **(kwargs or {}))

    def make(self, device: Any = None) -> Stream:
        self.late.append(Stream())
        return self.late[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    @property
    def waiting(self) -> int:
        """Copies that have not happened."""
        return sum(len(stream.queued) for stream in self.late)

    def finish(self) -> None:
        """What is queued happens at last."""
        for stream in self.late:
            stream.run()


@contextlib.contextmanager
def late_copies() -> Iterator[Streams]:
    """torch.cuda has such streams inside, and nothing locks pages."""
    from threefold.checkpoint import background_saver

    streams = Streams()
    fakes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", streams.make),
        (torch.cuda, "stream", streams.on),
        (torch.cuda, "current_stream", lambda *device: streams.current),
        (background_saver, "_lock_pages", lambda buffer: None),
    ]
    plain = [getattr(owner, name) for owner, name, _ in fakes]
    for owner, name, fake in fakes:
        setattr(owner, name, fake)
    try:
        with streams:
            yield streams
    finally:
        for (owner, name, _), before in zip(fakes, plain, strict=True):
            setattr(owner, name, before)
