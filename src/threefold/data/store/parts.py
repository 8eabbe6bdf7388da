"""The parts of a store that is being made: one process encodes a part into a file of its own.

A part is a run of a source's pieces, of about 8 MiB of text, or more where there would be over 4,096 of them. Its
three files are NUMBER.bin (tokens), NUMBER.len (tokens of each document, int32) and NUMBER.json, written last and
renamed into place: a part whose .json is there is finished. Parts are dealt to processes one at a time, and an
exception in one travels back.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from threefold.data.store.store import dtype_for
from threefold.data.text.source import Piece, ReadLog, TextSource
from threefold.data.tokens import Tokenizer
from threefold.errors import DataError, RunError

PART_BYTES = 8 << 20
MAX_PARTS = 4096

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclass(frozen=True)
class Part:
    """A run of pieces: what one process encodes at a time."""

    number: int
    pieces: tuple[Piece, ...]
    size_bytes: int


@dataclass(frozen=True)
class PartDone:
    """A part that was encoded: its counts and what was met on the way."""

    part: Part
    num_tokens: int
    num_documents: int
    log: ReadLog


@dataclass(frozen=True)
class PartMaker:
    """Encodes parts into `folder`. Pickles with its source and tokenizer.

    Args:
        encode_at_once: documents a call of the tokenizer; 1 keeps one that has threads of its own to a single thread.
    """

    source: TextSource
    tokenizer: Tokenizer
    folder: Path
    skip_bad: bool
    encode_at_once: int = _BATCH_DOCUMENTS

    def make(self, part: Part) -> PartDone:
        """Encodes one part. Where documents are bad, nothing is kept and the log says why."""
        log = ReadLog(skip_bad=self.skip_bad)
        dtype = dtype_for(self.tokenizer.vocab_size)
        temporary = self.folder / f"{part.number:05}.{os.getpid()}.tmp"
        all_lengths: list[npt.NDArray[np.int32]] = []
        num_tokens = 0
        try:
            with temporary.open("wb") as file:
                for texts in self._batches(part, log):
                    tokens, lengths = joined(self._encoded(texts), end_id=self.tokenizer.end_id, dtype=dtype)
                    file.write(tokens.data)
                    all_lengths.append(lengths)
                    num_tokens += len(tokens)
                file.flush()
                os.fsync(file.fileno())
            lengths = np.concatenate(all_lengths) if all_lengths else np.empty(0, np.int32)
            done = PartDone(part, num_tokens, len(lengths), log)
            if not log.num_bad:
                os.replace(temporary, self._path(part, "bin"))
                _write_synced(temporary, lengths.tobytes())
                os.replace(temporary, self._path(part, "len"))
                record = {"num_tokens": num_tokens, "num_documents": len(lengths), "log": asdict(log)}
                _write_synced(temporary, json.dumps(record).encode())
                os.replace(temporary, self._path(part, "json"))
            return done
        finally:
            temporary.unlink(missing_ok=True)

    def finished(self, part: Part) -> PartDone | None:
        """The part as an earlier, interrupted run left it, None where it is not whole."""
        try:
            record = json.loads(self._path(part, "json").read_bytes())
            done = PartDone(part, record["num_tokens"], record["num_documents"], ReadLog(**record["log"]))
            whole = (
                self._path(part, "bin").stat().st_size
                == done.num_tokens * dtype_for(self.tokenizer.vocab_size).itemsize
                and self._path(part, "len").stat().st_size == done.num_documents * 4
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return done if whole else None

    def read(self, done: PartDone) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Tokens (memory-mapped) and document lengths of a finished part."""
        dtype = dtype_for(self.tokenizer.vocab_size)
        lengths = np.fromfile(self._path(done.part, "len"), np.int32)
        if not done.num_tokens:
            return np.empty(0, dtype), lengths
        return np.memmap(self._path(done.part, "bin"), dtype, mode="r"), lengths

    def _encoded(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        ids: list[npt.NDArray[Any]] = []
        for start in range(0, len(texts), self.encode_at_once):
            ids.extend(self.tokenizer.encode_batch(texts[start : start + self.encode_at_once]))
        return ids

    def _batches(self, part: Part, log: ReadLog) -> Iterator[list[str]]:
        batch: list[str] = []
        characters = 0
        for piece in part.pieces:
            for text in self.source.read(piece, log):
                batch.append(text)
                characters += len(text)
                if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
                    yield batch
                    batch, characters = [], 0
        if batch:
            yield batch

    def _path(self, part: Part, kind: str) -> Path:
        return self.folder / f"{part.number:05}.{kind}"


def plan_parts(pieces: Sequence[Piece]) -> list[Part]:
    """Runs of consecutive pieces of about equal size; a function of the pieces alone."""
    target = max(PART_BYTES, sum(piece.size_bytes for piece in pieces) // MAX_PARTS)
    parts: list[Part] = []
    run: list[Piece] = []
    size = 0
    for piece in pieces:
        run.append(piece)
        size += piece.size_bytes
        if size >= target:
            parts.append(Part(len(parts), tuple(run), size))
            run, size = [], 0
    if run:
        parts.append(Part(len(parts), tuple(run), size))
    return parts


def joined(
    ids: Sequence[npt.NDArray[Any]], *, end_id: int, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """The documents of a batch one after the other, each ended by `end_id`, and their lengths with it."""
    lengths = np.array([len(document) + 1 for document in ids], np.int64)
    if lengths.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"a document of {int(lengths.max()):,} tokens",
            expected="at most 2,147,483,647 tokens a document: a store's index counts them in 32 bits",
            fix="cut that document into several, for example one a line in a .jsonl file",
        )
    ends = np.cumsum(lengths)
    tokens = np.full(int(ends[-1]), end_id, dtype)
    for document, end in zip(ids, ends.tolist(), strict=True):
        tokens[end - 1 - len(document) : end - 1] = document
    return tokens, lengths.astype(np.int32)


def make_here(maker: PartMaker, parts: Sequence[Part]) -> Generator[PartDone, None, None]:
    """Encodes parts in this process, in order."""
    for part in parts:
        yield maker.make(part)


def make_in_processes(maker: PartMaker, parts: Sequence[Part], *, num_workers: int) -> Generator[PartDone, None, None]:
    """Encodes parts in `num_workers` new processes; yields each as it is done, in any order.

    Closing the iterator ends the processes.

    Raises:
        RunError: a process ended without a word, most often killed for want of memory.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(parts))
    busy: dict[Connection, Part] = {}
    processes = []
    try:
        for _ in range(min(num_workers, len(parts))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, maker), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            busy[ours] = waiting.pop()
            _send(ours, busy[ours])
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                try:
                    answer = ready.recv()
                except (EOFError, OSError):
                    raise _died(busy[ready]) from None
                if isinstance(answer, BaseException):
                    raise answer
                if waiting:
                    busy[ready] = waiting.pop()
                    _send(ready, busy[ready])
                else:
                    del busy[ready]
                    ready.close()
                yield answer
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(connection: Connection, maker: PartMaker) -> None:
    """A process: encodes the parts it is sent until the other end closes."""
    # Ctrl-C reaches the whole group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            part = connection.recv()
            try:
                answer: object = maker.make(part)
            except Exception as error:
                answer = error
            connection.send(answer)


def _send(connection: Connection, part: Part) -> None:
    # A process that is already dead is met by the recv that follows.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(part)


def _died(part: Part) -> RunError:
    return RunError(
        f"a process that prepares tokens ended while it encoded part {part.number} ({part.size_bytes:,} bytes of text)",
        expected="every process to finish; one that ends without an error was most often killed for want of memory",
        fix="run the same command again with fewer processes (--num-workers 1): finished parts are used again",
    )


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
