"""Tokenizers: text in, arrays of ids out, and the id that ends a document.

Two kinds behind one interface: `bytes`, which needs nothing, and a Hugging Face id or folder (`tokens_hf`). Neither
adds special tokens of its own; whoever writes documents down appends `end_id`. A tokenizer pickles, so that the
processes that prepare a corpus can use it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Tokenizer(Protocol):
    """What a corpus is encoded with.

    `vocab_size` is the largest id + 1, so that an embedding of that many rows suffices. `fingerprint` is equal for
    equal ids: it names the content of the tokenizer, not its place.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_id(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        """Ids of each text, without special tokens; arrays of an integer type that holds the vocabulary."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; the end token and other special tokens are left out."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 to end a document: 257 ids, not padded to a round number."""

    name = "bytes"
    vocab_size = 257
    end_id = 256
    fingerprint = hashlib.blake2b(b"threefold bytes 1", digest_size=16).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        """The bytes of each text, uint8."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 (a cut character) become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


def load_tokenizer(name: str, *, revision: str | None = None) -> Tokenizer:
    """`bytes`, or the tokenizer of a Hugging Face id or local folder.

    Args:
        name: `bytes`, an id on the Hub, or a folder with tokenizer.json.
        revision: branch, tag or commit on the Hub.

    Raises:
        DataError: there is no such tokenizer, it cannot be reached, or it has no end token.
    """
    if name == "bytes":
        return ByteTokenizer()
    from threefold.data.tokens_hf import load_hugging_face

    return load_hugging_face(name, revision=revision)
