"""The parts of an unfinished store: one process encodes each part into its own file.

A part is a run of a source's pieces with about 8 MiB of text, or more if that would give over 4,096 parts. Its files
are NUMBER.bin (tokens), NUMBER.len (tokens of each document, int32) and NUMBER.json, written last and renamed into
place: a part with a .json is finished, and used again: it is of the bytes that its folder is named by. A source with a
loss mask also has NUMBER.loss_mask (a byte each token). A row's documents are in one part, so no pair is torn. Each
process gets one part at a time; its exceptions are raised here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from threefold.data.store.store import dtype_for
from threefold.data.store.writer import sync
from threefold.data.text.source import Document, Labelled, Piece, ReadLog, TextSource
from threefold.data.tokens import Tokenizer
from threefold.errors import DataError, RunError

PART_BYTES = 8 << 20
MAX_PARTS = 4096

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclass(frozen=True)
class EncodedPart:
    """A run of pieces: what one process encodes at a time."""

    number: int
    pieces: tuple[Piece, ...]
    size_bytes: int


@dataclass(frozen=True)
class PartDone:
    """A part that was encoded: its counts, and the problems found in it."""

    part: EncodedPart
    num_tokens: int
    num_documents: int
    log: ReadLog


@dataclass(frozen=True)
class PartMaker:
    """Encodes parts into `folder`. Pickles with its source and tokenizer."""

    source: TextSource
    tokenizer: Tokenizer
    folder: Path
    skip_bad: bool
    encode_at_once: int = _BATCH_DOCUMENTS
    """documents per call of the tokenizer; 1 keeps a tokenizer with its own threads to one thread."""

    def make(self, part: EncodedPart) -> PartDone:
        """Encodes one part. If documents are bad, nothing is kept and the log has the problems."""
        log = ReadLog(skip_bad=self.skip_bad)
        temporary = self.folder / f"{part.number:05}.{os.getpid()}.tmp"
        all_lengths: list[npt.NDArray[np.int32]] = []
        masks: list[bytes] = []
        num_tokens = 0
        try:
            with temporary.open("wb") as file:
                for documents in self._batches(part, log):
                    tokens, lengths, mask = self._joined(documents)
                    file.write(tokens.data)
                    all_lengths.append(lengths)
                    masks.append(mask.tobytes())
                    num_tokens += len(tokens)
                sync(file)
            lengths = np.concatenate([np.empty(0, np.int32), *all_lengths])
            self.source.refuse_changed(part.pieces)
            if not log.num_bad:
                os.replace(temporary, self._path(part, "bin"))
                record = {"num_tokens": num_tokens, "num_documents": len(lengths), "log": asdict(log)}
                kinds = {"len": lengths.tobytes(), "loss_mask": b"".join(masks), "json": json.dumps(record).encode()}
                for kind, data in kinds.items():
                    with temporary.open("wb") as file:
                        file.write(data)
                        sync(file)
                    os.replace(temporary, self._path(part, kind))
            return PartDone(part, num_tokens, len(lengths), log)
        finally:
            temporary.unlink(missing_ok=True)

    def finished(self, part: EncodedPart) -> PartDone | None:
        """The part that an earlier, interrupted run made; None if it is missing or damaged."""
        try:
            record = json.loads(self._path(part, "json").read_bytes())
            done = PartDone(part, record["num_tokens"], record["num_documents"], ReadLog(**record["log"]))
            kinds = ("bin", "len", *(("loss_mask",) if self.source.loss_mask is not None else ()))
            sizes = tuple(self._path(part, kind).stat().st_size for kind in kinds)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        expected = (done.num_tokens * self._dtype.itemsize, done.num_documents * 4, done.num_tokens)
        mask = self.source.loss_mask
        torn = mask is not None and mask.has_pairs and done.num_documents % 2
        return done if sizes == expected[: len(sizes)] and not torn else None

    def read(self, done: PartDone) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.bool_] | None]:
        """Tokens (memory-mapped), document lengths and, of a source with a loss mask, that of a finished part."""
        lengths = np.fromfile(self._path(done.part, "len"), np.int32)
        masked = self.source.loss_mask is not None
        mask = np.fromfile(self._path(done.part, "loss_mask"), np.bool_) if masked else None
        if not done.num_tokens:
            return np.empty(0, self._dtype), lengths, mask
        return np.memmap(self._path(done.part, "bin"), self._dtype, mode="r"), lengths, mask

    @property
    def _dtype(self) -> np.dtype[Any]:
        return dtype_for(self.tokenizer.vocab_size)

    def _joined(
        self, documents: list[Document]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Tokens, lengths and loss mask (empty for texts) of a batch."""
        if self.source.loss_mask is None:
            texts = cast("list[str]", documents)
            return *joined(self._encoded(texts), end_id=self.tokenizer.end_id, dtype=self._dtype), np.empty(0, np.bool_)
        labelled = cast("list[Labelled]", documents)
        lengths = np.array([len(each.ids) for each in labelled], np.int32)
        tokens = np.concatenate([each.ids for each in labelled]).astype(self._dtype)
        return tokens, lengths, np.concatenate([each.loss_mask for each in labelled])

    def _encoded(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        step = self.encode_at_once
        batches = (texts[start : start + step] for start in range(0, len(texts), step))
        return [ids for batch in batches for ids in self.tokenizer.encode_batch(batch)]

    def _batches(self, part: EncodedPart, log: ReadLog) -> Iterator[list[Document]]:
        batch: list[Document] = []
        characters = 0
        for piece in part.pieces:
            for document in self.source.read(piece, log):
                batch.append(document)
                characters += len(document if isinstance(document, str) else document.ids)
                if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
                    yield batch
                    batch, characters = [], 0
        if batch:
            yield batch

    def _path(self, part: EncodedPart, kind: str) -> Path:
        return self.folder / f"{part.number:05}.{kind}"


def plan_parts(pieces: Sequence[Piece]) -> list[EncodedPart]:
    """Runs of consecutive pieces of about equal size; a function of the pieces alone."""
    target = max(PART_BYTES, sum(piece.size_bytes for piece in pieces) // MAX_PARTS)
    parts: list[EncodedPart] = []
    run: list[Piece] = []
    size = 0
    for number, piece in enumerate(pieces, start=1):
        run.append(piece)
        size += piece.size_bytes
        if size >= target or number == len(pieces):
            parts.append(EncodedPart(len(parts), tuple(run), size))
            run, size = [], 0
    return parts


def joined(
    ids: Sequence[npt.NDArray[Any]], *, end_id: int, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """The documents of a batch, concatenated, each ended by `end_id`; and their lengths, including it."""
    lengths = np.array([len(document) + 1 for document in ids], np.int64)
    if lengths.max() > np.iinfo(np.int32).max:
        raise DataError(
            f"a document of {int(lengths.max()):,} tokens",
            expected="at most 2,147,483,647 tokens per document: a store's index counts them in 32 bits",
            fix="split that document into several, for example one per line of a .jsonl file",
        )
    ends = np.cumsum(lengths)
    tokens = np.full(int(ends[-1]), end_id, dtype)
    for document, end in zip(ids, ends.tolist(), strict=True):
        tokens[end - 1 - len(document) : end - 1] = document
    return tokens, lengths.astype(np.int32)


def make_in_processes(
    maker: PartMaker, parts: Sequence[EncodedPart], *, num_workers: int
) -> Generator[PartDone, None, None]:
    """Encodes parts in `num_workers` new processes; yields each as it is done, in any order.

    Closing the iterator ends the processes. A RunError if one ended without an error, as after a kill for memory.
    """
    context = multiprocessing.get_context("spawn")
    waiting = iter(parts)
    busy: dict[Connection, EncodedPart] = {}
    processes = []

    def send_next(worker: Connection) -> None:
        for part in islice(waiting, 1):
            busy[worker] = part
            # The recv that follows notices a process that is already dead.
            with suppress(BrokenPipeError, ConnectionResetError):
                worker.send(part)

    try:
        for _ in range(min(num_workers, len(parts))):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_work, args=(theirs, maker), daemon=True))
            processes[-1].start()
            theirs.close()
            send_next(ours)
        while busy:
            for ready in cast("list[Connection]", wait(list(busy))):
                part = busy.pop(ready)
                try:
                    answer = ready.recv()
                except (EOFError, OSError):
                    raise RunError(
                        f"a process that prepares tokens ended while it encoded part {part.number} "
                        f"({part.size_bytes:,} bytes of text)",
                        expected="every process to finish; one that ends without an error was most often killed "
                        "because memory ran out",
                        fix="run the same command again with fewer processes (--num-workers 1): finished parts are "
                        "reused",
                    ) from None
                if isinstance(answer, BaseException):
                    raise answer
                send_next(ready)
                yield answer
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(connection: Connection, maker: PartMaker) -> None:
    """In a new process: encodes the parts that it receives until the other end closes."""
    # Ctrl-C reaches the entire process group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            part = connection.recv()
            try:
                answer: object = maker.make(part)
            except Exception as error:
                answer = error
            connection.send(answer)
