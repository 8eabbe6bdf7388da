"""Flight Recorder dumps of torch: the operations of a rank, by process group. No torch.

A dump is one rank's ring of its last operations: group, number, kind and size, and how far each came. torch writes
dumps with pickle, and a pickle can run any code when it is read. Here only plain containers, numbers and strings are
built (`_Plain`), which is all that a dump holds; a file that asks for anything else is refused. JSON is read too.
"""

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_NAME = re.compile(
    r"(?:(?:nccl_trace|fr_trace|flight|comm_lib_trace|trace)\w*?[_-]?rank[_-]?|(?:nccl_trace|fr_trace)\w*?(?=\d+(?:\.json|\.pickle|\.pkl)?$))(\d+)"
)
_UNEQUAL = re.compile("all_to_all|alltoall|gather|scatter|send|recv|barrier")
_MOST_BYTES = 2**29


@dataclass(frozen=True)
class Operation:
    """One collective of one rank: `call` is its kind, and the sizes of its inputs unless they may differ between ranks;
    `place` the program's own innermost frame."""

    kind: str
    call: str
    state: str
    place: str | None


@dataclass(frozen=True)
class Dump:
    """One rank's dump: group -> (its description, its members), and group -> number -> operation."""

    rank: int
    members: Mapping[str, tuple[str, Sequence[int]]]
    operations: Mapping[str, Mapping[int, Operation]]


class _Plain(pickle._Unpickler):
    """Builds dicts, lists, tuples, numbers, strings, bytes, None and booleans; refuses every class and function.

    In Python, as a spoilt byte makes the one in C take up to 64 GB for its memo.
    """

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"a dump holds plain values only, not {module}.{name}")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise pickle.UnpicklingError("a dump holds plain values only")


def is_dump(path: Path) -> bool:
    """Whether the file is named as torch names dumps: nccl_trace_rank_3, with or without an ending."""
    return bool(_NAME.search(path.name))


def read_dump(path: Path) -> Dump:
    """The dump in a file; ValueError if it is none, or holds more than plain values."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is too large for a dump")
    content = path.read_bytes()
    try:
        dump = (
            json.loads(content)
            if content.lstrip().startswith(b"{")
            else _Plain(io.BytesIO(content)).load()
        )
    except Exception as error:  # what bytes that are no dump raise depends on the bytes
        raise ValueError(f"{path} is not a Flight Recorder dump: {error}") from error
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise ValueError(f"{path} is not a Flight Recorder dump: it has no entries")
    named = _NAME.search(path.name)
    rank = int(named[1] if named else dump.get("rank", 0))
    members = {
        str(group): _members(spec) for group, spec in _mapping(dump.get("pg_config")).items()
    }
    operations: dict[str, dict[int, Operation]] = {}
    for entry in map(_mapping, dump["entries"]):
        number, group = entry.get("collective_seq_id"), entry.get("process_group") or "0"
        name = str(group[0] if isinstance(group, list | tuple) else group)
        if isinstance(number, int) and not entry.get("is_p2p"):
            operations.setdefault(name, {})[number] = _operation(entry)
    return Dump(rank, members, operations)


def _operation(entry: Mapping[str, Any]) -> Operation:
    kind = str(entry.get("profiling_name", "?")).rpartition(":")[2]
    state = "completed" if entry.get("retired") else str(entry.get("state", "?"))
    frames = entry.get("frames")
    places = map(_place, frames if isinstance(frames, list) else [])
    call = kind if _UNEQUAL.search(kind) else f"{kind} of {entry.get('input_sizes', '')}"
    return Operation(kind, call, state, next(filter(None, places), None))


def _place(frame: Any) -> str | None:
    """Where a frame is, if that is in the program itself."""
    frame = _mapping(frame)
    file = str(frame.get("filename", ""))
    if not file or "site-packages" in file or "/torch/" in file:
        return None
    return f"{file}:{frame.get('line')} in {frame.get('name')}"


def _members(spec: Any) -> tuple[str, list[int]]:
    spec = _mapping(spec)
    ranks = re.findall(r"\d+", str(spec.get("ranks", "")))
    return str(spec.get("desc", "")), [*map(int, ranks)]


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
