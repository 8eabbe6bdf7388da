"""What torch's DataLoaders yield: the loader, the pass, the number of batches, and the sampler's settings.

It only counts and reads: no loader is asked for anything that the program does not ask for.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .sealed import Values

# Attributes that are read from a sampler.
_FACTS = re.compile(
    "(initial_)?seed|epoch|shuffle|replacement|num_replicas|rank|num_processes|process_index|batch_size|split_batches|"
    "drop_last|num_samples"
)

# A sampler that holds itself has no end.
_MOST_SAMPLERS = 6


# A data set that loaders read, counted from 0 in the order of first use, and the pass over it.
PassName = tuple[int, int]


class Loaders:
    """Follows every DataLoader of the process.

    Attributes:
        last: the pass that has last yielded a batch.
        passes: the record of each pass; `batches` grows, `ended` when the loader has no more.
    """

    def __init__(self) -> None:
        self.last: PassName | None = None
        self.passes: dict[PassName, Values] = {}
        self._numbers = dict[int, int]()
        self._num_passes = Counter[int]()
        self._last_batches = set[PassName]()
        self._names = WeakKeyDictionary[Any, PassName]()

    def begins(self, iterator: Any, loader: Any) -> None:
        """A pass of a loader begins."""
        # Programs make a new loader over the same data set for each epoch.
        number = self._numbers.setdefault(id(loader.dataset), len(self._numbers))
        self._names[iterator] = name = number, self._num_passes[number]
        self._num_passes[number] += 1
        self.passes[name] = {"batches": 0, "ended": False, "rows": None, "samplers": []}
        with suppress(Exception):  # of a length or a property of the user's own
            self.passes[name] |= facts_of(loader)

    def hands_out(self, batch: Any, iterator: Any) -> None:
        """A batch leaves a loader."""
        if (name := self._names.get(iterator)) is not None:
            self.last = name
            self.passes[name]["batches"] += 1
            with suppress(Exception):  # of a length of the user's own, or of none
                if self.passes[name]["batches"] == len(iterator):
                    self._last_batches.add(name)

    def trained_on(self, names: Iterable[PassName]) -> None:
        """A step has taken batches of these passes: one that had no more has ended, though none were asked for."""
        for name in self._last_batches.intersection(names):
            self.passes[name]["ended"] = True

    def ends(self, iterator: Any) -> None:
        """A loader has no more batches. One that fetches ahead, as accelerate's, now hands out its last one."""
        if (name := self._names.get(iterator)) is not None:
            self.passes[name]["ended"] = True
            self.last = name

    @property
    def share(self) -> tuple[int | None, int | None]:
        """Into how many shares the sampler of the last batch divides the rows, and which one it reads."""
        if self.last is not None:
            for facts in self.passes[self.last]["samplers"]:
                for num_shares, which in (
                    ("num_replicas", "rank"),
                    ("num_processes", "process_index"),
                ):
                    if num_shares in facts and which in facts:
                        return facts[num_shares], facts[which]
        return None, None

    def attach(self, around: Callable[..., None]) -> None:
        """Hangs these on torch's loaders, by `around` (`RankRecorder.around`)."""
        around(DataLoader, "__iter__", after=self.begins)
        around(_BaseDataLoaderIter, "__next__", after=self.hands_out, stops=self.ends)


def facts_of(loader: Any) -> Values:
    """The rows of the data set, if they can be counted, and what each sampler is, outermost first."""
    samplers: list[Values] = []
    source = None
    sampler = _first_of(loader, "batch_sampler", "sampler")
    while sampler is not None and len(samplers) < _MOST_SAMPLERS:
        kind = type(sampler)
        facts: Values = {"class": kind.__name__, "package": kind.__module__.partition(".")[0]}
        for name in filter(_FACTS.fullmatch, dir(sampler)):
            if isinstance(value := getattr(sampler, name, None), int):
                facts[name] = value
        samplers.append(facts)
        source = _first_of(sampler, "data_source", "dataset")
        sampler = _first_of(sampler, "batch_sampler", "sampler")
    rows = loader.dataset
    is_sized = hasattr(rows, "__len__") and not isinstance(rows, IterableDataset)
    # A sampler may draw from a part of the data set.
    is_known = is_sized and (source is None or len(source) == len(rows))
    return {"rows": len(rows) if is_known else None, "samplers": samplers}


def _first_of(value: Any, *names: str) -> Any:
    return next(
        (inner for name in names if (inner := getattr(value, name, None)) is not None), None
    )
