"""The token store: every token of a corpus in one flat memory-mapped file, and an index of its documents.

The layout is Megatron-LM's, so stores made by other programs can be read here, and ours there:

    PREFIX.bin   only the tokens (uint16 if the vocabulary allows, else int32), little-endian
    PREFIX.idx   where documents begin and end (`index`)
    PREFIX.loss_mask  of conversations and the like: a bit for each token, whether it is trained on
    PREFIX.json  written last: the origin of the store (`StoreInfo`); stores made by other programs have none
    PREFIX.blocks  a hash of each block of the others, the smallest and the largest id (`blocks`)
    PREFIX.stored  of a store at an address: where it is; then there is no .bin here (`at_address`)

A store with a .json is complete: the writer renames .bin and .idx into place before it. Reading gives one flat stream
of tokens and the documents' ends in it; a truncated or foreign file is refused with the reason.
"""

import hashlib
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from threefold.arrays import Array, Bool, Int32, Int64
from threefold.data.store.blocks import LOSS_MASK, STORED, Blocks, with_suffix
from threefold.data.store.index import check_arrays, read_index
from threefold.data.text.known_bytes import content_digest
from threefold.data.text.source import LossMask
from threefold.errors import DataError
from threefold.jsonl import from_json

if TYPE_CHECKING:
    from threefold.places.known_file import KnownFile

INFO_FORMAT = "threefold-store-1"

_BLOCK = 1 << 20


@dataclass(frozen=True)
class StoreInfo:
    """The origin of a store.

    `fingerprint` identifies the tokens, the documents' lengths and the tokenizer; `request` the source, the tokenizer
    and the way the source is read, and is known before anything is read.
    """

    fingerprint: str
    request: str
    num_tokens: int
    num_documents: int
    num_skipped: int
    source: str
    source_fingerprint: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    end_id: int
    loss_mask: LossMask | None = None
    """what is trained on of the documents; None: all of their tokens, and there is no PREFIX.loss_mask."""
    num_loss_tokens: int | None = None
    bos_id: int | None = None
    """the token that begins each document; None: there is none, or it is not known."""
    pairs: bool | None = None
    """documents 2k and 2k + 1 are a pair: two answers to one prompt, chosen and rejected; None: each is by itself."""

    lost_texts: dict[str, int] | None = None
    """texts of rows that the chat template does not write, by kind, and not in the tokens; None: none, or not known."""

    @property
    def counted(self) -> str:
        """`12 documents`, or `6 pairs`."""
        return (
            f"{self.num_documents // 2:,} pairs"
            if self.pairs
            else f"{self.num_documents:,} documents"
        )

    @property
    def mask_summary(self) -> str:
        """`chat (messages), trained on: assistant: 12 of 34 tokens (35.3 %)`, of a store with a loss mask."""
        count = self.num_loss_tokens or 0
        share = 100 * count / max(1, self.num_tokens)
        summary = f"{self.loss_mask}: {count:,} of {self.num_tokens:,} tokens ({share:.1f} %)"
        return f"{summary}; {lost_summary(self.lost_texts)}" if self.lost_texts else summary


def lost_summary(lost: Mapping[str, int]) -> str:
    """`not written by the chat template: 3 of reasoning`."""
    return f"not written by the chat template: {', '.join(f'{count:,} {kind}' for kind, count in sorted(lost.items()))}"


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """uint16 if every id of the vocabulary fits, else int32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


class TokenStore:
    """An open store: the flat `tokens` (memory-mapped) and the documents' ends in it.

    Pickles as its prefix, so that a loader's worker opens the files itself. Errors as for `read_index`. `blocks` are
    the hashes of its bytes, if they are known (`known`), and `blocks_at` where they are kept, if they are. `named` is
    what it is called: its prefix or its address, and `stored` its tokens at that address (None: they are here).
    """

    blocks: Blocks | None = None
    blocks_at: Path | None = None
    stored: "KnownFile | None" = None

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self.named = str(self.prefix)
        if with_suffix(self.prefix, STORED).exists():
            from threefold.data.store.at_address import tokens_at

            self.blocks, self.stored = tokens_at(self.prefix)
            self.named = self.stored.named
        size = self.stored.size if self.stored is not None else None
        self._index = read_index(
            with_suffix(self.prefix, ".idx"), with_suffix(self.prefix, ".bin"), bin_bytes=size
        )
        self.dtype = self._index.dtype
        self.num_tokens = self._index.num_tokens
        self.num_documents = self._index.num_bounds - 1
        self.info = read_info(self.prefix)
        self.loss_mask = self.info.loss_mask if self.info is not None else None
        self.has_loss_mask = self.loss_mask is not None
        if self.has_loss_mask:
            _check_loss_mask(self.prefix, self.num_tokens)
        self.has_pairs = self.info is not None and self.info.pairs is True
        if self.info is None:
            _refuse_unexplained_mask(self.prefix)
            self.check()
        elif (self.info.num_tokens, self.info.num_documents) != (
            self.num_tokens,
            self.num_documents,
        ):
            raise DataError(
                f"{with_suffix(self.prefix, '.json')} belongs to another store: it describes "
                f"{self.info.num_tokens:,} tokens in {self.info.num_documents:,} documents",
                expected=f"the {self.num_tokens:,} tokens in {self.num_documents:,} documents of the .bin and .idx",
                fix=f"{_as_foreign(self.prefix)}copy all files again",
            )

        elif self.has_pairs != (self.loss_mask is not None and self.loss_mask.has_pairs) or (
            self.has_pairs and self.num_documents % 2
        ):
            kind = "documents in pairs" if self.info.pairs is True else "no pairs"
            raise DataError(
                f"{with_suffix(self.prefix, '.json')} describes {kind} (pairs: {self.info.pairs}), in "
                f"{self.info.num_documents:,} documents with the loss mask {self.info.loss_mask}",
                expected="pairs and an even number of documents, each chosen one before its rejected one, with the "
                "loss mask 'preference ...'; and no pairs without it: otherwise an answer would be compared with one "
                "to another prompt",
                fix="copy all files of the store again from their origin, or prepare the source again",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (self.prefix,)

    def check(self) -> None:
        """Reads the index once; a DataError if its sequences are not one stream of tokens."""
        check_arrays(self._index)

    def lengths(self) -> Int32:
        """Tokens of each sequence of the index."""
        return self._index.lengths()

    @cached_property
    def tokens(self) -> Array:
        """The entire stream, [num_tokens], read-only and memory-mapped."""
        if self.num_tokens == 0 or self.stored is not None:
            return self.read(0, self.num_tokens)
        return np.memmap(with_suffix(self.prefix, ".bin"), self.dtype, mode="r")

    def _opened(self, suffix: str) -> int:
        number = os.open(with_suffix(self.prefix, suffix), os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, number)
        return number

    @cached_property
    def _bin(self) -> int:
        return self._opened(".bin")

    def read(self, start: int, stop: int) -> Array:
        """The tokens [start, stop) of the stream; a DataError if they were cut off since the store was opened."""
        # A mapped file that is cut ends the process with SIGBUS, and no word.
        size = self.dtype.itemsize
        if self.stored is not None:
            return np.frombuffer(
                self.stored.read(start * size, (stop - start) * size), self.dtype
            )
        data = os.pread(self._bin, (stop - start) * size, start * size)
        if len(data) != (stop - start) * size:
            raise DataError(
                f"{with_suffix(self.prefix, '.bin')} was truncated while being read: tokens {start:,} to {stop - 1:,} "
                "are gone",
                expected=f"its {self.num_tokens:,} tokens, as when it was opened",
                fix="copy the store again from its origin, then run the same command: it resumes",
            )
        return np.frombuffer(data, self.dtype)

    def places(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where the tokens [start, stop) are in the files, as [start, stop) of each."""
        return [(start, stop)]

    def inside(self, start: int, stop: int) -> tuple[int, int]:
        """The tokens of this stream, as [start, stop), among those that lie in [start, stop) of the files."""
        return min(start, self.num_tokens), min(stop, self.num_tokens)

    @cached_property
    def document_numbers(self) -> Int64:
        """The number of each document in the source, [num_documents]."""
        return np.arange(self.num_documents)

    @cached_property
    def _mask(self) -> int:
        return self._opened(LOSS_MASK)

    def trained_on(self, start: int, stop: int) -> Bool:
        """Whether each of the tokens [start, stop) is trained on, of a store with a loss mask; errors as for `read`."""
        first, last = start // 8, -(-stop // 8)
        data = os.pread(self._mask, last - first, first)
        if len(data) != last - first:
            raise _cut_loss_mask(self.prefix, self.num_tokens)
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)

    def count_trained_on(self, starts: Int64, stops: Int64) -> Int64:
        """How many tokens of each [start, stop) are trained on, of a store with a loss mask; errors as for `read`."""
        data = np.fromfile(with_suffix(self.prefix, LOSS_MASK), np.uint8)
        if len(data) != -(-self.num_tokens // 8):
            raise _cut_loss_mask(self.prefix, self.num_tokens)
        # words: 64 tokens each, the last one padded; before: those trained on before each word.
        words = np.zeros(self.num_tokens // 64 + 1, "<u8")
        words.view(np.uint8)[: len(data)] = data
        before = np.cumsum(ones := _num_ones(words)) - ones

        def up_to(places: Int64) -> Int64:
            below = (np.uint64(1) << (places % 64).astype(np.uint64)) - np.uint64(1)
            return before[places // 64] + _num_ones(words[places // 64] & below)

        return up_to(stops) - up_to(starts)

    @cached_property
    def document_ends(self) -> Int64:
        """One past each document's last token in the stream, [num_documents], never decreasing.

        It reads most of the .idx, whose blocks are compared first, if they are known: a DataError names one.
        """
        if self.blocks is not None:
            all_blocks = range(self.blocks.files[".idx"].num_blocks)
            if (change := self.blocks.change(self.prefix, ".idx", all_blocks)) is not None:
                raise DataError(
                    f"{with_suffix(self.prefix, '.idx')} has changed: block {change.block:,} does not match its hash",
                    expected="the documents' bounds as they were hashed",
                    fix="copy all files of the store again from their origin, or prepare the text again",
                )
        sequence_ends = np.zeros(self._index.num_sequences + 1, np.int64)
        np.cumsum(self._index.lengths(), out=sequence_ends[1:])
        return sequence_ends[self._index.bounds()[1:]]

    @property
    def end_id(self) -> int | None:
        """Id of the end token; None for a store made by another program, whose documents are not changed."""
        return self.info.end_id if self.info else None

    @cached_property
    def fingerprint(self) -> str:
        """Identity of tokens, documents and tokenizer; the same after the files are moved.

        A store made by another program records none: the sizes and 16 blocks of 1 MiB, evenly spread over each file,
        identify it, so that opening stays cheap at any size.
        """
        if self.info:
            return self.info.fingerprint
        digest = hashlib.blake2b(digest_size=16)
        for suffix in (".idx", ".bin"):
            path = with_suffix(self.prefix, suffix)
            size = path.stat().st_size
            digest.update(f"{suffix} {size}\n".encode())
            with path.open("rb") as file:
                for k in range(16):
                    file.seek(max(0, size - _BLOCK) * k // 15)
                    digest.update(file.read(_BLOCK))
        return digest.hexdigest()


def _check_loss_mask(prefix: Path, num_tokens: int) -> None:
    try:
        whole = with_suffix(prefix, LOSS_MASK).stat().st_size == -(-num_tokens // 8)
    except OSError:
        whole = False
    if not whole:
        raise _cut_loss_mask(prefix, num_tokens)


_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(
    axis=1, dtype=np.uint8
)


def _num_ones(words: Array) -> Int64:
    """The number of bits that are set in each word of 64."""
    return _ONES[words.view(np.uint8)].reshape(-1, 8).sum(axis=1, dtype=np.int64)


def _cut_loss_mask(prefix: Path, num_tokens: int) -> DataError:
    return DataError(
        f"{with_suffix(prefix, LOSS_MASK)} is missing, or is not the loss mask of {num_tokens:,} tokens",
        expected=f"{-(-num_tokens // 8):,} bytes, one bit per token: without them, what is trained on is unknown",
        fix="copy all files of the store again from their origin, or prepare the source again",
    )


def _as_foreign(prefix: str | Path) -> str:
    """The way out that a store without a loss mask has: all of its tokens are trained on then."""
    masked = with_suffix(prefix, LOSS_MASK).exists()
    return (
        ""
        if masked
        else "remove the .json to read the store as one made by another program, or "
    )


def _refuse_unexplained_mask(prefix: Path) -> None:
    if with_suffix(prefix, LOSS_MASK).exists():
        raise DataError(
            f"{with_suffix(prefix, '.json')} does not exist, but {prefix.name}{LOSS_MASK} does",
            expected="the .json, which says what the loss mask is: without it every token would be trained on, "
            "even rejected answers",
            fix="copy all files of the store again from their origin, or prepare the source again",
        )


def starts_of(ends: Int64) -> Int64:
    """Where each of several that follow one another begins, by where they end."""
    return np.concatenate(([0], ends[:-1]))


def fingerprint_of_content(content_hash: str, tokenizer_fingerprint: str) -> str:
    """The fingerprint in a store's .json, from `StoreWriter.content_hash`."""
    return content_digest(f"{content_hash} {tokenizer_fingerprint}")


def read_info(prefix: str | Path) -> StoreInfo | None:
    """The .json of a store; None if there is none; a DataError if it is not readable, or not of this project."""
    path = with_suffix(prefix, ".json")
    try:
        record = from_json(path.read_bytes())
        if record.pop("format", None) != INFO_FORMAT:
            raise ValueError(f"its format is not {INFO_FORMAT}")
        if (mask := record.pop("loss_mask", None)) is not None:
            record["loss_mask"] = LossMask(**{**mask, "columns": tuple(mask["columns"])})
        return StoreInfo(**record)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise DataError(
            f"{path} does not describe a token store: {error}",
            expected=f"a record of format {INFO_FORMAT}, written next to the .bin and .idx",
            fix=f"{_as_foreign(prefix)}prepare it again",
        ) from error
