"""What a job left behind, in files and folders: logs, Flight Recorder dumps, the record of a run of ours. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefold.errors import ConfigError
from threefold.explain.flight import Difference, Dump, first_differences, is_dump, read_dump
from threefold.explain.log import Source

# Ours, and torchrun's --log-dir: attempt_0/3/stderr.log.
_BEGIN = " INFO threefold: process "
_RANK_OF_FILE = re.compile(r"rank[-_]?(\d+)\.\w+$|/(\d+)/(?:std(?:out|err)|error)\.\w+$")
_LOGS = (".log", ".err", ".out")
_METRICS, _JOURNAL, _AUDIT = "metrics.jsonl", "journal.jsonl", "audit.jsonl"
_LATE_STEPS = 20


@dataclass(frozen=True)
class Evidence:
    """What was found: logs, what dumps show, sentences from a run's own record, and files that could not be used."""

    sources: Sequence[Source]
    differences: Sequence[Difference] = ()
    notes: Sequence[str] = ()
    unread: Sequence[str] = ()


def gather(paths: Sequence[Path]) -> Evidence:
    """The evidence in files and folders; ConfigError if one does not exist, or there is none in them."""
    sources: list[Source] = []
    dumps: list[Dump] = []
    notes: list[str] = []
    unread: list[str] = []
    for path in paths:
        if not path.exists():
            raise _nothing(f"{path} does not exist")
        for file in sorted(_files(path)):
            try:
                if file.name in (_METRICS, _JOURNAL, _AUDIT):
                    notes += _notes(file)
                elif is_dump(file):
                    dumps.append(read_dump(file))
                else:
                    sources.append(_source(file, path, several=path.is_dir() or len(paths) > 1))
            except ValueError as error:
                unread.append(str(error))
            except OSError as error:
                what = f"{file} cannot be read: {error.strerror}"
                raise ConfigError(what, expected="a readable log", fix=f"look at: ls -l {file}") from error
    if not sources and not dumps and not notes and not unread:
        raise _nothing(f"{paths[0]} contains no log")
    return Evidence(sources, first_differences(dumps), notes, unread)


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for file in path.rglob("*"):
        if file.is_file() and (file.suffix in _LOGS or is_dump(file) or file.name in (_METRICS, _JOURNAL, _AUDIT)):
            yield file


def _source(file: Path, root: Path, *, several: bool) -> Source:
    text = file.read_text(encoding="utf-8", errors="replace")
    rank = _RANK_OF_FILE.search(file.as_posix()) if several else None
    if rank is None:
        return Source(_name(file, root) if several else "", text)
    # A resumed run appends; only its last start counts.
    lines = text.splitlines()
    begin = max((place for place, line in enumerate(lines) if _BEGIN in line), default=0)
    return Source(_name(file, root), "\n".join(lines[begin:]), rank=int(rank[1] or rank[2]))


def _name(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix() if root.is_dir() else file.as_posix()


def _notes(file: Path) -> list[str]:
    """Sentences from a run's metrics, journal or audit."""
    lines = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # torn by the end of the run
        if isinstance(line, dict):
            lines.append(line)
    if not lines:
        return []
    if file.name == _METRICS:
        return _of_metrics(lines)
    if file.name == _JOURNAL:
        starts = max((line["start"] for line in lines if isinstance(line.get("start"), int)), default=0)
        return [f"the run was started {starts} times"] if starts > 1 else []
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    return [f"the last audit is of step {steps[-1]}"] if steps else []


def _of_metrics(lines: Sequence[dict[str, Any]]) -> list[str]:
    steps = [line for line in lines if isinstance(line.get("step"), int) and "loss" in line]
    if not steps:
        return []
    found = [f"the last step in the metrics is {steps[-1]['step']}"]
    bad = next((line for line in steps if any(_not_finite(line.get(key)) for key in ("loss", "grad_norm"))), None)
    if bad is not None:
        found.append(f"loss or gradient norm is not a number from step {bad['step']} on")
    slowest = [line["slowest_rank"] for line in steps[-_LATE_STEPS:] if isinstance(line.get("slowest_rank"), int)]
    if len(slowest) > _LATE_STEPS // 2 and len(set(slowest)) == 1:
        found.append(f"rank {slowest[0]} was the slowest in the last {len(slowest)} steps")
    return found


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _nothing(what: str) -> ConfigError:
    fix = "threefold explain train.log, or a pipe: ... 2>&1 | threefold explain"
    return ConfigError(what, expected="a log, or a folder with .log, .err or .out files", fix=fix)
