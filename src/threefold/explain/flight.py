"""Flight Recorder dumps of torch -> in each process group, the first operation in which the ranks differ. No torch.

A dump is one rank's ring of its last operations: group, number, kind and size, and how far each came. torch writes
dumps with pickle, and a pickle can run any code when it is read. Here only plain containers, numbers and strings are
built (`_Plain`), which is all that a dump holds; a file that asks for anything else is refused. JSON is read too.
Operations of two process groups are never compared: each group counts its own.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from threefold.errors import ranks_text

_NAME = re.compile(
    r"(?:nccl_trace|fr_trace|flight|comm_lib_trace|trace)\w*?[_-]?rank[_-]?(\d+)|(?:nccl_trace|fr_trace)\w*?(\d+)$"
)
_Value = TypeVar("_Value", int, str)
_MOST_BYTES = 512 * 2**20
# Kinds whose sizes may differ between ranks.
_UNEQUAL = re.compile("all_to_all|alltoall|gather|scatter|send|recv|barrier")


@dataclass(frozen=True)
class Operation:
    """One collective of one rank: `size` is that of its inputs, `place` the program's own innermost frame."""

    kind: str
    size: str
    state: str
    place: str | None


@dataclass(frozen=True)
class Dump:
    """One rank's dump: group -> (its description, its members), and group -> number -> operation."""

    rank: int
    members: Mapping[str, tuple[str, Sequence[int]]]
    operations: Mapping[str, Mapping[int, Operation]]


@dataclass(frozen=True)
class Divergence:
    """The first operation of a group that is not the same, or not done, on all its ranks.

    Attributes:
        kind: `absent` (some ranks have not started it), `different`, or `unfinished` (all did, and it does not end).
        ranks: those to look at.
    """

    kind: str
    ranks: Sequence[int]
    text: str


class _Plain(pickle.Unpickler):
    """Builds dicts, lists, tuples, numbers, strings, bytes, None and booleans; refuses every class and function."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"a dump holds plain values only, not {module}.{name}")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise pickle.UnpicklingError("a dump holds plain values only")


def is_dump(path: Path) -> bool:
    """Whether the file is named as torch names dumps: nccl_trace_rank_3, with or without an ending."""
    return (
        _NAME.search(path.stem if path.suffix in (".json", ".pickle", ".pkl") else path.name)
        is not None
    )


def read_dump(path: Path) -> Dump:
    """The dump in a file; ValueError if it is none, or holds more than plain values."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is larger than a dump is")
    content = path.read_bytes()
    try:
        found = (
            json.loads(content)
            if content.lstrip()[:1] == b"{"
            else _Plain(io.BytesIO(content)).load()
        )
    except Exception as error:  # what bytes that are no dump raise depends on the bytes
        raise ValueError(f"{path} is no Flight Recorder dump: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        raise ValueError(f"{path} is no Flight Recorder dump: it has no entries")
    named = _NAME.search(path.stem)
    rank = int(named[1] or named[2] if named else found.get("rank", 0))
    members = {
        str(group): _members(told) for group, told in _mapping(found.get("pg_config")).items()
    }
    operations: dict[str, dict[int, Operation]] = {}
    for entry in map(_mapping, found["entries"]):
        number, group = entry.get("collective_seq_id"), entry.get("process_group") or "0"
        name = str(group[0] if isinstance(group, list | tuple) else group)
        if isinstance(number, int) and not entry.get("is_p2p"):
            operations.setdefault(name, {})[number] = _operation(entry)
    return Dump(rank, members, operations)


def first_differences(dumps: Sequence[Dump]) -> list[Divergence]:
    """In each group with dumps of two ranks or more, the first operation that differs; none if all agree."""
    found = []
    for group in sorted({group for dump in dumps for group in dump.operations}):
        description, members = next(
            (dump.members[group] for dump in dumps if group in dump.members), ("", ())
        )
        ranks = {
            dump.rank: dump.operations.get(group, {})
            for dump in dumps
            if not members or dump.rank in members
        }
        if len(ranks) > 1 and (difference := _first(group, description, ranks)):
            found.append(difference)
    return sorted(found, key=lambda one: ("different", "absent", "unfinished").index(one.kind))


def _first(
    group: str, description: str, ranks: Mapping[int, Mapping[int, Operation]]
) -> Divergence | None:
    # Each ring has lost its oldest operations: what all still have is compared.
    begin = max((min(own) for own in ranks.values() if own), default=0)
    name = f"process group {group}" + (
        f" ({description})" if description and description != "undefined" else ""
    )
    for number in sorted(
        {number for own in ranks.values() for number in own if number >= begin}
    ):
        here = {rank: own[number] for rank, own in ranks.items() if number in own}
        absent = sorted(set(ranks) - set(here))
        what, kind = f"{name}, operation {number}", next(iter(here.values())).kind
        groups = ranks_by({rank: one.kind for rank, one in here.items()})
        if len(groups) == 1 and not _UNEQUAL.search(kind):
            groups = ranks_by({rank: f"{one.kind} of {one.size}" for rank, one in here.items()})
        if len(groups) > 1:
            ways = "; ".join(
                f"{ranks_text(own)} in {way}"
                for way, own in sorted(groups.items(), key=lambda it: -len(it[1]))
            )
            fewest = min(groups.values(), key=len)
            return Divergence("different", fewest, f"{what}: {ways}{_at(here, fewest)}")
        if absent:
            last = {rank: max(ranks[rank], default=None) for rank in absent[:3]}
            did = "; ".join(
                f"the last of rank {rank} was {one}{_at(ranks[rank], [one])}"
                for rank, one in last.items()
            )
            waits = f"{ranks_text(sorted(here))} in {kind}"
            text = f"{what}: not started by {ranks_text(absent)} ({did}); {waits}"
            return Divergence("absent", absent, text)
        states = ranks_by({rank: one.state for rank, one in here.items()})
        if set(states) != {"completed"}:
            behind = [] if set(states) == {"scheduled"} else states.get("scheduled", [])
            came = "" if behind else ": all ranks came"
            did = "; ".join(f"{state} on {ranks_text(own)}" for state, own in states.items())
            text = f"{what}, {kind}: {did}{came}"
            return Divergence("unfinished", behind, text)
    return None


def ranks_by(values: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Each value, and the ranks that have it."""
    found: dict[_Value, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return found


def _at(operations: Mapping[int, Operation], which: Sequence[int | None]) -> str:
    place = next(
        (operations[one].place for one in which if one is not None and one in operations), None
    )
    return f", at {place}" if place else ""


def _operation(entry: Mapping[str, Any]) -> Operation:
    kind = str(entry.get("profiling_name", "?")).rpartition(":")[2]
    state = "completed" if entry.get("retired") else str(entry.get("state", "?"))
    frames = entry.get("frames")
    places = map(_place, frames if isinstance(frames, list) else [])
    return Operation(
        kind, str(entry.get("input_sizes", "")), state, next(filter(None, places), None)
    )


def _place(frame: Any) -> str | None:
    """Where a frame is, if that is in the program itself."""
    frame = _mapping(frame)
    file = str(frame.get("filename", ""))
    if not file or "site-packages" in file or "/torch/" in file:
        return None
    return f"{file}:{frame.get('line')} in {frame.get('name')}"


def _members(told: Any) -> tuple[str, list[int]]:
    told = _mapping(told)
    return str(told.get("desc", "")), [
        int(rank) for rank in re.findall(r"\d+", str(told.get("ranks", "")))
    ]


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
