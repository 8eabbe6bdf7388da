"""What ranks tell one another outside of collectives: plain values, over the rendezvous store.

A value is made on one rank and read on all, so making it may take any time, or fail: then every rank raises the same
error. Values are what JSON holds; the rank that makes one sees it as the others do.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from threefold.errors import Problem, RunError, ThreefoldError

_LONGEST_PREPARATION = timedelta(days=2)


class Exchange:
    """The values that the ranks of one mesh tell one another. All ranks ask for the same ones in the same order."""

    def __init__(self, rank: int, world_size: int, store: dist.Store | None) -> None:
        """Args:
        store: of the mesh; None in a single process, which tells itself.
        """
        self._rank = rank
        self._world_size = world_size
        self._store = store
        self._numbers: dict[str, int] = {}

    def value_of(self, maker: int, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns on the rank `maker`.

        Raises:
            ThreefoldError: what `make` raised, on every rank; RunError where it was no error for users.
        """
        if self._store is None:
            return json.loads(json.dumps(make()))
        key = f"threefold/shared/{name}/{self._number(name)}"
        if self._rank == maker:
            try:
                answer = json.dumps({"value": make()})
            except BaseException as error:
                self._store.set(key, json.dumps(_described(error)))
                raise
            self._store.set(key, answer)
            return json.loads(answer)["value"]
        (told,) = wait_for_all(self._store, [key])
        if "value" not in told:
            raise _error_of(told, name)
        return told["value"]

    def conclusion_of(self, name: str, part: Any, conclude: Callable[[list[Any]], Any]) -> Any:
        """What rank 0 concludes from the `part` of every rank, in rank order; raises as `value_of`."""
        store = self._store
        if store is None:
            return self.value_of(0, name, lambda: conclude([part]))
        number = self._number(f"parts/{name}")
        keys = [f"threefold/parts/{name}/{number}/{rank}" for rank in range(self._world_size)]
        store.set(keys[self._rank], json.dumps(part))
        return self.value_of(0, f"decide/{name}", lambda: conclude(wait_for_all(store, keys)))

    def _number(self, name: str) -> int:
        self._numbers[name] = self._numbers.get(name, 0) + 1
        return self._numbers[name]


def wait_for_all(store: dist.Store, keys: Sequence[str], within: timedelta = _LONGEST_PREPARATION) -> list[Any]:
    """The values under `keys`, in their order, as soon as all are there."""
    store.wait(list(keys), within)
    return [json.loads(store.get(key)) for key in keys]


def _described(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, ThreefoldError):
        return {"class": None}
    return {"class": type(error).__name__, "problems": [dataclasses.astuple(problem) for problem in error.problems]}


def _error_of(told: dict[str, Any], name: str) -> ThreefoldError:
    if told["class"] is None:
        return RunError(f"another rank failed in {name!r}", expected="its result", fix="see that rank's traceback")
    classes = {cls.__name__: cls for cls in _family(ThreefoldError)}
    return classes.get(told["class"], RunError).of(Problem(*problem) for problem in told["problems"])


def _family(cls: type[ThreefoldError]) -> Iterator[type[ThreefoldError]]:
    yield cls
    for derived in cls.__subclasses__():
        yield from _family(derived)
