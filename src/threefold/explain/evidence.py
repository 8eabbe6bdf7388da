"""A job's evidence in files and folders: logs, Flight Recorder dumps, the record of a run of ours. No torch."""

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from typing import IO, Any

import numpy as np

from threefold.checkpoint.lineage import Ending
from threefold.config.paths import AUDIT, LOG_START
from threefold.errors import ConfigError
from threefold.explain.groups import Divergence, first_differences
from threefold.explain.log import LogSource
from threefold.explain.prefixes import rank_of_file
from threefold.explain.sources.dumps import Dump, is_dump, read_dump
from threefold.jsonl import Lines
from threefold.records.run import RunRecord
from threefold.records.state import last_end, state_of

_BEGIN = f" INFO {LOG_START}: {{"
_LOGS = (".log", ".err", ".out", ".txt", ".gz")
# Only the beginning and the end of a log are read: failures are there, and a small file can unpack to terabytes.
_FIRST, _LAST, _SAMPLE = 2**25, 3 * 2**25, 2**20
_MOST_UNPACKED = 2**33
_MOST_UNREADABLE = 0.1  # characters of the beginning: more is no text
_MOST_LAGS = 3


@dataclass(frozen=True)
class JobEvidence:
    """Logs, contents of dumps, sentences from a run's own record, and files that could not be used.

    Attributes:
        ending: how the last start of a run failed, as its journal has it.
        ended: by the journal of a run, its last start has done all of its steps, or stopped as asked.
    """

    sources: Sequence[LogSource]
    differences: Sequence[Divergence] = ()
    notes: Sequence[str] = ()
    unread: Sequence[str] = ()
    ending: Ending | None = None
    ended: bool = False


def gather(paths: Sequence[Path]) -> JobEvidence:
    """The evidence in files and folders; ConfigError if one does not exist, or there is none in them."""
    sources: list[LogSource] = []
    dumps: list[Dump] = []
    notes: list[str] = []
    unread: list[str] = []
    ending: Ending | None = None
    ended = False
    for path in paths:
        if not path.exists():
            raise _nothing(f"{path} does not exist")
        if path.is_dir():
            record = RunRecord(path)
            ending, last = record.ending or ending, last_end(record.events)
            ended |= last.get("event") in ("done", "stop")
            if last.get("event") == "stop":
                notes.append(_of_stop(last))
            word, why = state_of(path, record.events, still_s=0)
            if word == "running":
                notes.append(f"it is still running: {why}")
            notes += _notes(record)
        for file in sorted(_files(path)):
            try:
                if is_dump(file):
                    dumps.append(read_dump(file))
                else:
                    sources.append(_source(file, path, several=path.is_dir() or len(paths) > 1))
            except ValueError as error:
                unread.append(str(error))
            except OSError as error:
                raise ConfigError(
                    f"{file} cannot be read: {error.strerror}",
                    expected="a readable log",
                    fix=f"look at: ls -l {file}",
                ) from error
    unread += [source.left_out for source in sources if source.left_out]
    if not (sources or dumps or notes or unread or ending):
        raise _nothing(f"{paths[0]} contains no log")
    return JobEvidence(sources, first_differences(dumps), notes, unread, ending, ended)


def piped(stream: IO[bytes]) -> JobEvidence:
    """The evidence in a pipe; ConfigError if it is no text."""
    try:
        text, left_out = read_log(stream, "what was piped in")
    except ValueError as error:
        raise _nothing(str(error)) from error
    return JobEvidence([LogSource("", text)], unread=[left_out] if left_out else ())


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
    for file in path.rglob("*"):
        if file.is_file() and (file.suffix in _LOGS or is_dump(file)):
            yield file


def read_log(stream: IO[bytes] | BufferedIOBase, name: str) -> tuple[str, str]:
    """(the text of a log, what of it was left out); ValueError if it is no text. Of a large one, both ends are read."""
    first, last, size = stream.read(_FIRST), b"", 0
    if isinstance(stream, BufferedReader) and stream.seekable():
        size = max(0, os.fstat(stream.fileno()).st_size - stream.tell() - _LAST)
        stream.seek(size, os.SEEK_CUR)
    while piece := stream.read(_LAST):
        size += len(piece)
        last = (last + piece)[-_LAST:]
        if size > _MOST_UNPACKED and isinstance(stream, gzip.GzipFile):
            raise ValueError(f"{name} unpacks to more than {_MOST_UNPACKED >> 30} GiB")
    begin = first[:_SAMPLE].decode(errors="replace")
    if begin.count("\ufffd") > _MOST_UNREADABLE * len(begin):
        raise ValueError(f"{name} is not text")
    if not (left_out := size - len(last)):
        return (first + last).decode(errors="replace"), ""
    note = f"{left_out >> 20} MiB in the middle of {name} were not read, nor are their lines counted"
    return (first + b"\n" + last).decode(errors="replace"), note


def _source(file: Path, root: Path, *, several: bool) -> LogSource:
    """A log as a source; ValueError if it is no text, or compressed and damaged."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            text, left_out = read_log(stream, str(file))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be unpacked: {error}") from error
    if not several:
        return LogSource("", text, left_out=left_out)
    name = str(file.relative_to(root) if root.is_dir() else file)
    rank = rank_of_file(str(file))
    if rank is not None:  # a resumed run appends; only its last start counts
        text = text[text.rfind("\n", 0, max(0, text.rfind(_BEGIN))) + 1 :]
    return LogSource(name, text, rank, left_out)


def _of_stop(stop: dict[str, Any]) -> str:
    step, saved, by = (stop.get(name) for name in ("step", "saved", "by"))
    return f"it stopped as asked by {by or 'a signal'} after step {step}; its newest checkpoint is of step {saved}"


def _notes(record: RunRecord) -> Iterator[str]:
    """Sentences from a run's own record."""
    points = [record.metrics.points(name) for name in ("loss", "grad_norm")]
    bad = [step for steps, values in points for step in steps[~np.isfinite(values)].tolist()]
    for step in record.metrics.steps[-1:]:
        yield f"the last step in the metrics is {step}"
    if bad:
        yield f"loss or gradient norm is not a number from step {min(bad)} on"
    if (starts := len(record.starts)) > 1:
        yield f"the run was started {starts} times"
    lags = [event.get("text") for event in record.events if event["event"] == "lag"]
    yield from [text for text in lags if isinstance(text, str)][-_MOST_LAGS:]
    audits = [line.values.get("step") for line in Lines(record.path / AUDIT).read()]
    for step in [step for step in audits if isinstance(step, int)][-1:]:
        yield f"the last audit is of step {step}"


def _nothing(what: str) -> ConfigError:
    return ConfigError(
        what,
        expected="a log, or a folder with .log, .err, .out, .txt or .gz files",
        fix="threefold explain train.log, or a pipe: ... 2>&1 | threefold explain",
    )
