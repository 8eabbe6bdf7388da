"""What torch's DataLoaders hand out: which loader, its how manieth pass, how many batches, and what its sampler says.

Only counted and read: no loader is asked for anything that the program does not ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

_FACTS = (
    "seed",
    "initial_seed",
    "epoch",
    "shuffle",
    "replacement",
    "num_replicas",
    "rank",
    "num_processes",
    "process_index",
    "batch_size",
    "split_batches",
    "drop_last",
    "num_samples",
)

# A sampler that holds itself has no end.
_MOST_SAMPLERS = 6


class PassName(NamedTuple):
    """A data set that loaders read, counted from 0 in the order of first use, and the pass over it."""

    loader: int
    number: int


class Loaders:
    """Follows every DataLoader of the process.

    Attributes:
        last: the pass that has last handed out a batch.
        passes: what is to be recorded of each pass; `batches` grows, `ended` when the loader has no more.
    """

    def __init__(self) -> None:
        self.last: PassName | None = None
        self.passes: dict[PassName, dict[str, Any]] = {}
        self._numbers: dict[int, int] = {}
        self._num_passes: dict[int, int] = {}
        self._names: WeakKeyDictionary[Any, PassName] = WeakKeyDictionary()

    def begins(self, loader: Any, iterator: Any) -> None:
        """A pass of a loader begins."""
        # Programs make a new loader over the same data set for each epoch.
        number = self._numbers.setdefault(id(loader.dataset), len(self._numbers))
        num_passes = self._num_passes.get(number, 0)
        self._num_passes[number] = num_passes + 1
        self._names[iterator] = name = PassName(number, num_passes)
        try:
            facts = facts_of(loader)
        except Exception:  # a length or a property of the user's own
            facts = {"rows": None, "samplers": []}
        self.passes[name] = {"batches": 0, "ended": False, **facts}

    def hands_out(self, iterator: Any) -> None:
        """A batch leaves a loader."""
        if (name := self._names.get(iterator)) is not None:
            self.last = name
            self.passes[name]["batches"] += 1

    def ends(self, iterator: Any) -> None:
        """A loader has no more batches."""
        if (name := self._names.get(iterator)) is not None:
            self.passes[name]["ended"] = True

    def attach(self, guard: Callable[..., Any]) -> None:
        """Wraps torch's loaders; `guard(call, ...)` calls a function and keeps its errors from the program."""
        begin, advance = DataLoader.__iter__, _BaseDataLoaderIter.__next__

        @wraps(begin)
        def iterate(loader: Any) -> Any:
            iterator = begin(loader)
            guard(self.begins, loader, iterator)
            return iterator

        @wraps(advance)
        def hand_out(iterator: Any) -> Any:
            try:
                batch = advance(iterator)
            except StopIteration:
                guard(self.ends, iterator)
                raise
            guard(self.hands_out, iterator)
            return batch

        DataLoader.__iter__ = iterate
        _BaseDataLoaderIter.__next__ = hand_out


def facts_of(loader: Any) -> dict[str, Any]:
    """The rows of the data set, if they can be counted, and what each sampler is, outermost first."""
    samplers: list[dict[str, Any]] = []
    source = None
    sampler = _first_of(loader, "batch_sampler", "sampler")
    while sampler is not None and len(samplers) < _MOST_SAMPLERS:
        kind = type(sampler)
        settings = {name: getattr(sampler, name, None) for name in _FACTS}
        plain = {name: value for name, value in settings.items() if isinstance(value, int)}
        samplers.append({"class": kind.__name__, "package": kind.__module__.partition(".")[0], **plain})
        source = _first_of(sampler, "data_source", "dataset")
        sampler = _first_of(sampler, "batch_sampler", "sampler")
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return {"rows": None, "samplers": samplers}
    # A sampler may draw from a part of the data set.
    num_rows = len(loader.dataset)
    known = source is None or len(source) == num_rows
    return {"rows": num_rows if known else None, "samplers": samplers}


def _first_of(value: Any, *names: str) -> Any:
    return next((inner for name in names if (inner := getattr(value, name, None)) is not None), None)
