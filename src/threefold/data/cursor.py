"""Where a run stands in its order, in a few plain integers that do not depend on the world size.

In: nothing but (epoch, global position) and what the order was made from. Out: the state that samplers, loaders and
checkpoints keep. What stays true: the state is the same on every rank, on every mesh and for every number of workers,
and an order made from something else (another seed, size, data or algorithm) is refused by name instead of being read
from a place that means nothing in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from threefold.data.permutation import ORDER_VERSION, check_order_version
from threefold.errors import DataError, Problem

Plain = int | float | str | bool | None

_ABSENT = "(not set)"
_REMEDY = {
    "seed": "pass the seed that the run began with (--data.seed {saved}), or start a new run",
    "shuffle": "pass the shuffle that the run began with (--data.shuffle {yaml}), or start a new run",
    "order": "pass order={saved!r}, or start a new run",
    "num_samples": "pass num_samples={saved}, or start a new run",
}
_OTHER_REMEDY = "go on with the data and the settings that the run began with, or start a new run"


@dataclass(frozen=True)
class Cursor:
    """The next sample to read: position `position` of epoch `epoch`, in the order that `fingerprint` describes."""

    epoch: int
    position: int
    """global position in the epoch: samples of this epoch already read, over all dp ranks."""
    fingerprint: Mapping[str, Plain]
    """what the order was made from (seed, number of rows, ...), never the number of ranks or workers."""
    order_version: int = ORDER_VERSION

    def state_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON or a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "order_version": self.order_version,
            "fingerprint": dict(self.fingerprint),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Cursor:
        """The cursor that `state_dict` described.

        Raises:
            DataError: a value is missing or is not what `state_dict` writes, or the order version is unknown.
        """
        numbers = {name: _count(state, name) for name in ("epoch", "position", "order_version")}
        fingerprint = state.get("fingerprint")
        if not isinstance(fingerprint, Mapping):
            raise _malformed("fingerprint", state)
        check_order_version(numbers["order_version"])
        return cls(numbers["epoch"], numbers["position"], dict(fingerprint), numbers["order_version"])

    def check(self, fingerprint: Mapping[str, Plain]) -> None:
        """Refuse to go on in an order that was made from something else.

        Raises:
            DataError: one problem for each value that differs, naming it, what was saved and what is given now.
        """
        names = [*self.fingerprint, *(name for name in fingerprint if name not in self.fingerprint)]
        problems = [
            _difference(name, self.fingerprint.get(name, _ABSENT), fingerprint.get(name, _ABSENT))
            for name in names
            if self.fingerprint.get(name, _ABSENT) != fingerprint.get(name, _ABSENT)
        ]
        if problems:
            raise DataError.of(problems)


def _difference(name: str, saved: Plain, given: Plain) -> Problem:
    return Problem(
        f"the saved state has {name} = {saved}, but here {name} = {given}",
        f"the same {name}: in another order the saved position would repeat some samples and never read others",
        _REMEDY.get(name, _OTHER_REMEDY).format(saved=saved, yaml=str(saved).lower()),
    )


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _malformed(name, state)
    return value


def _malformed(name: str, state: Mapping[str, Any]) -> DataError:
    found = f"{name} = {state[name]!r}" if name in state else f"no {name}"
    wanted = "a mapping" if name == "fingerprint" else "an integer >= 0"
    return DataError(
        f"this is not a saved order of samples: it has {found}",
        expected=f"what state_dict() of threefold's sampler or loader returned, with {wanted} under {name!r}",
        fix="load the state that the same sampler or loader saved, or start a new run",
    )
