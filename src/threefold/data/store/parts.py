"""The parts of an unfinished store: one process encodes each part into its own file.

A part is a run of a source's pieces with about 8 MiB of text, or more if that would give over 4,096 parts. Its files
are NUMBER.bin (tokens), NUMBER.len (tokens of each document, int32) and its seal NUMBER.json, written last and renamed
into place: a part with a seal is finished, and reused: it is of the bytes that its folder is named after. A source
with a loss mask also has NUMBER.loss_mask (a byte each token). A row's documents are in one part, so no pair is torn.
The seal holds pieces, counts and digests, but not the part's maker: any process, on any host, twice or concurrently,
writes the same bytes, each file whole. The digests are compared when the parts are joined.
"""

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from threefold.arrays import Array, Bool, Int32
from threefold.data.store.store import dtype_for
from threefold.data.store.writer import sync
from threefold.data.text.source import Document, Labelled, Piece, ReadLog, TextSource
from threefold.data.tokens import Tokenizer
from threefold.errors import DataError
from threefold.jsonl import from_json

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
    """A part that was encoded: its counts, the problems found in it, and the XXH3 (128 bits) of each of its files."""

    part: EncodedPart
    num_tokens: int
    num_documents: int
    log: ReadLog
    xxh3: Mapping[str, str]


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
        # Two hosts may have equal process numbers.
        temporary = self.folder / f"{part.number:05}.{uuid.uuid4().hex}.tmp"
        digest = xxhash.xxh3_128()
        all_lengths: list[Int32] = []
        masks: list[bytes] = []
        num_tokens = 0
        try:
            with temporary.open("wb") as file:
                for documents in self._batches(part, log):
                    tokens, lengths, mask = self._joined(documents)
                    file.write(tokens.data)
                    digest.update(tokens.data)
                    all_lengths.append(lengths)
                    masks.append(mask.tobytes())
                    num_tokens += len(tokens)
                sync(file)
            lengths = np.concatenate([np.empty(0, np.int32), *all_lengths])
            self.source.refuse_changed(part.pieces)
            kinds = {"len": lengths.tobytes(), "loss_mask": b"".join(masks)}
            digests = {kind: xxhash.xxh3_128_hexdigest(data) for kind, data in kinds.items()}
            done = PartDone(
                part, num_tokens, len(lengths), log, {"bin": digest.hexdigest(), **digests}
            )
            if not log.num_bad:
                os.replace(temporary, self.path(part, "bin"))
                kinds["json"] = self._seal(done)
                for kind, data in kinds.items():
                    with temporary.open("wb") as file:
                        file.write(data)
                        sync(file)
                    os.replace(temporary, self.path(part, kind))
            return done
        finally:
            temporary.unlink(missing_ok=True)

    def _seal(self, done: PartDone) -> bytes:
        """A line of JSON; the folder has the name of the request."""
        pieces = [(piece.file, piece.start, piece.stop) for piece in done.part.pieces]
        seal = {"of": self.folder.name, "part": done.part.number, "pieces": pieces}
        seal |= {"num_tokens": done.num_tokens, "num_documents": done.num_documents}
        return json.dumps({**seal, "log": asdict(done.log), "xxh3": done.xxh3}).encode() + b"\n"

    def finished(self, part: EncodedPart) -> PartDone | None:
        """The part that somebody made earlier; None if it is missing or cut, or its seal is not that of this part."""
        try:
            seal = self.path(part, "json").read_bytes()
            record = from_json(seal)
            log = ReadLog(**record["log"])
            done = PartDone(
                part, record["num_tokens"], record["num_documents"], log, record["xxh3"]
            )
            kinds = (
                "bin",
                "len",
                *(("loss_mask",) if self.source.loss_mask is not None else ()),
            )
            sizes = tuple(self.path(part, kind).stat().st_size for kind in kinds)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if seal != self._seal(done):
            return None
        expected = (
            done.num_tokens * self._dtype.itemsize,
            done.num_documents * 4,
            done.num_tokens,
        )
        mask = self.source.loss_mask
        torn = mask is not None and mask.has_pairs and done.num_documents % 2
        return done if sizes == expected[: len(sizes)] and not torn else None

    def read(self, done: PartDone) -> tuple[Array, Int32, Bool | None]:
        """Tokens (memory-mapped), document lengths and, of a source with a loss mask, that of a finished part.

        A DataError if a file is not what was sealed; its seal is removed then, so that the part is made again.
        """
        lengths = np.fromfile(self.path(done.part, "len"), np.int32)
        masked = self.source.loss_mask is not None
        mask = np.fromfile(self.path(done.part, "loss_mask"), np.bool_) if masked else None
        tokens = np.empty(0, self._dtype)
        if done.num_tokens:
            tokens = np.memmap(self.path(done.part, "bin"), self._dtype, mode="r")
        for kind, data in (("bin", tokens), ("len", lengths), ("loss_mask", mask)):
            if data is not None and xxhash.xxh3_128_hexdigest(data.data) != done.xxh3.get(kind):
                self.path(done.part, "json").unlink(missing_ok=True)
                raise DataError(
                    f"{self.path(done.part, kind)} is not what was sealed: it was damaged, or is another part's",
                    expected=f"part {done.part.number} as it was encoded",
                    fix="run the same   threefold data prepare   again: only this part is made again",
                )
        return tokens, lengths, mask

    @property
    def _dtype(self) -> np.dtype[Any]:
        return dtype_for(self.tokenizer.vocab_size)

    def _joined(self, documents: list[Document]) -> tuple[Array, Int32, Bool]:
        """Tokens, lengths and loss mask (empty for texts) of a batch."""
        if self.source.loss_mask is None:
            texts = cast("list[str]", documents)
            return *joined(
                self._encoded(texts), end_id=self.tokenizer.end_id, dtype=self._dtype
            ), np.empty(0, np.bool_)
        labelled = cast("list[Labelled]", documents)
        lengths = np.array([len(each.ids) for each in labelled], np.int32)
        tokens = np.concatenate([each.ids for each in labelled]).astype(self._dtype)
        return tokens, lengths, np.concatenate([each.loss_mask for each in labelled])

    def _encoded(self, texts: list[str]) -> list[Array]:
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

    def path(self, part: EncodedPart, kind: str) -> Path:
        """A file of a part: `bin`, `len`, `loss_mask`, or its seal, `json`."""
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


def joined(ids: Sequence[Array], *, end_id: int, dtype: np.dtype[Any]) -> tuple[Array, Int32]:
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
