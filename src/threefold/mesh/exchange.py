"""Plain values that ranks send one another outside of collectives, over the rendezvous store.

A value is made on one rank and read on all, so making it may take any time, or fail: then every rank raises the same
error. Values are those of JSON; the rank that makes one gets it in the same form as the others.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from threefold.errors import Problem, RunError, ThreefoldError

_LONGEST_PREPARATION = timedelta(days=2)


class OtherRankError(RunError):
    """Another rank failed, and not with an error for users: what that rank prints says why."""


class Exchange:
    """The values that the ranks of one mesh send one another. All ranks ask for the same ones in the same order."""

    def __init__(self, rank: int, world_size: int, store: dist.Store | None) -> None:
        self._rank, self._world_size, self._store = rank, world_size, store  # None in a single process
        self._numbers: Counter[str] = Counter()

    def value_of(self, maker: int, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns on the rank `maker`.

        Raises:
            ThreefoldError: what `make` raised, on every rank; OtherRankError if it was not an error for users.
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
        (told,) = _wait_for_all(self._store, [key])
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
        return self.value_of(0, f"decide/{name}", lambda: conclude(_wait_for_all(store, keys)))

    def conclusion_of_work(self, name: str, make: Callable[[], Any], conclude: Callable[[list[Any]], Any]) -> Any:
        """As `conclusion_of`, of what `make` returns on every rank; if it fails on one, every rank raises."""
        error: BaseException | None = None
        try:
            part = {"value": make()}
        except BaseException as raised:
            part, error = _described(raised), raised

        def concluded(parts: list[dict[str, Any]]) -> dict[str, Any]:
            failed = next((part for part in parts if "value" not in part), None)
            return failed or {"value": conclude([part["value"] for part in parts])}

        told = self.conclusion_of(name, part, concluded)
        if error is not None:
            raise error
        if "value" not in told:
            raise _error_of(told, name)
        return told["value"]

    def _number(self, name: str) -> int:
        self._numbers[name] += 1
        return self._numbers[name]


def _wait_for_all(store: dist.Store, keys: list[str]) -> list[Any]:
    store.wait(keys, _LONGEST_PREPARATION)
    return [json.loads(store.get(key)) for key in keys]


def _described(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, ThreefoldError):
        return {"class": None}
    return {"class": type(error).__name__, "problems": [dataclasses.astuple(problem) for problem in error.problems]}


def _error_of(told: dict[str, Any], name: str) -> ThreefoldError:
    if told["class"] is None:
        return OtherRankError(
            f"another rank failed in {name!r}", expected="its result", fix="see that rank's traceback"
        )
    classes = {cls.__name__: cls for cls in _family(ThreefoldError)}
    return classes.get(told["class"], RunError).of(Problem(*problem) for problem in told["problems"])


def _family(cls: type[ThreefoldError]) -> Iterator[type[ThreefoldError]]:
    yield cls
    for derived in cls.__subclasses__():
        yield from _family(derived)
