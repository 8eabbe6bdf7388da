"""Tokenizers: text in, arrays of ids out, and the id that ends a document.

Two kinds behind one interface: `bytes`, which needs nothing, and a Hugging Face id or folder. Neither adds special
tokens of its own; whoever writes documents down appends `end_id`. A tokenizer pickles, so that the processes that
prepare a corpus can use it.

Where there is a tokenizer.json, the `tokenizers` library reads it and no torch is loaded; a folder with a vocabulary of
an older form goes through AutoTokenizer. No code from the repository runs. The id that ends a document is the model's
own end-of-sequence token. As in transformers, a special token that is spelled out in a document becomes its id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from threefold.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


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


@dataclass(frozen=True)
class FastTokenizer:
    """A tokenizer of the `tokenizers` library; encodes a batch on all cores."""

    name: str
    backend: Backend
    vocab_size: int
    end_id: int
    fingerprint: str

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        """Ids of each text, int32."""
        encoded = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


@dataclass(frozen=True)
class SlowTokenizer:
    """A tokenizer that transformers has in Python only."""

    name: str
    backend: Any
    vocab_size: int
    end_id: int
    fingerprint: str

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[Any]]:
        """Ids of each text, int32."""
        return [np.array(self.backend.encode(text, add_special_tokens=False), np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


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
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _download(name, revision=revision)
    if not any(next(folder.glob(pattern), None) for pattern in VOCABULARIES):
        raise DataError(
            f"data.tokenizer = {name!r} holds no tokenizer",
            expected=f"tokenizer.json, or an older vocabulary ({', '.join(VOCABULARIES[1:])}), in {folder}",
            fix="--data.tokenizer bytes   (or the id or folder of a model that comes with its tokenizer)",
        )
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not file.is_file():
        return _through_transformers(name, folder)
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise _unreadable(name, error) from error
    return _fast(name, backend, end_id=_end_id(folder, backend), content=file.read_bytes())


def _fast(name: str, backend: Backend, *, end_id: int | None, content: bytes) -> FastTokenizer:
    # A file may ask for truncation or padding to a model's length: a document is encoded whole.
    backend.no_truncation()
    backend.no_padding()
    end_id = _with_end(name, end_id)
    vocab_size = max([end_id, *backend.get_vocab(with_added_tokens=True).values()]) + 1
    return FastTokenizer(name, backend, vocab_size, end_id, _fingerprint(content, end_id))


def _through_transformers(name: str, folder: Path) -> FastTokenizer | SlowTokenizer:
    from tokenizers import Tokenizer as Backend
    from transformers import AutoTokenizer  # loads torch: only for vocabularies of an older form

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # a missing package, a damaged file, an unknown class: all the same to the user
        raise _unreadable(name, error) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if isinstance(backend, Backend):
        return _fast(name, backend, end_id=loaded.eos_token_id, content=backend.to_str().encode())
    end_id = _with_end(name, loaded.eos_token_id)
    vocabulary = loaded.get_vocab()
    content = f"{type(loaded).__name__} {sorted(vocabulary.items())!r}".encode()
    return SlowTokenizer(name, loaded, max([end_id, *vocabulary.values()]) + 1, end_id, _fingerprint(content, end_id))


def _download(name: str, *, revision: str | None) -> Path:
    """Folder with the tokenizer's files from the Hub, or from its cache where the Hub cannot be reached."""
    if not _HUB_ID.fullmatch(name):
        raise DataError(
            f"data.tokenizer = {name!r} does not exist",
            expected="bytes, a folder with tokenizer.json, or an id on the Hub as owner/name",
            fix="--data.tokenizer bytes   (or the path of a folder)",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*CONFIGS, *VOCABULARIES]))
    except HfHubHTTPError as error:
        raise DataError(
            f"data.tokenizer = {name!r} is not on the Hub, or not open to you: {str(error).splitlines()[0]}",
            expected="bytes, a folder with tokenizer.json, or an id on the Hub as owner/name",
            fix="check the name and the revision; for a gated model   hf auth login",
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.tokenizer = {name!r} is no folder here, and the Hub cannot be reached: {type(error).__name__}",
            expected="a folder with tokenizer.json, an id that is in the Hub's cache, or a way to the Hub",
            fix=f"hf download {name}   on a machine with internet, then --data.tokenizer FOLDER (or bytes)",
        ) from error


def _end_id(folder: Path, backend: Backend) -> int | None:
    """The end-of-sequence token that the files beside tokenizer.json name, the tokenizer's own before the model's."""
    for config in _configs(folder):
        token = config.get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and (end_id := backend.token_to_id(token)) is not None:
            return end_id
        nested = config.get("text_config")
        for holder in (config, nested if isinstance(nested, dict) else {}):
            ids = holder.get("eos_token_id")
            # A list names the tokens that end a generation; the first is the end of the text.
            first = ids[0] if isinstance(ids, list) and ids else ids
            if isinstance(first, int) and not isinstance(first, bool) and first >= 0:
                return first
    return None


def _configs(folder: Path) -> Iterator[dict[str, Any]]:
    for name in CONFIGS:
        try:
            config = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise DataError(
                f"{folder / name} is not JSON: {error}",
                expected="the file as the model's makers wrote it",
                fix="download or save the tokenizer again",
            ) from error
        if isinstance(config, dict):
            yield config


def _with_end(name: str, end_id: int | None) -> int:
    if end_id is None:
        raise DataError(
            f"data.tokenizer = {name!r} names no end token",
            expected=f'"eos_token" or "eos_token_id" in one of {", ".join(CONFIGS)}: it ends each document',
            fix='add   "eos_token": "TOKEN"   to tokenizer_config.json, a token of the vocabulary',
        )
    return end_id


def _fingerprint(content: bytes, end_id: int) -> str:
    return hashlib.blake2b(content + f"\0{end_id}".encode(), digest_size=16).hexdigest()


def _unreadable(name: str, error: Exception) -> DataError:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return DataError(
        f"data.tokenizer = {name!r} cannot be read: {first}",
        expected="a tokenizer that the installed tokenizers or transformers can read",
        fix="download or save the tokenizer again, or   pip install -U tokenizers transformers sentencepiece tiktoken",
    )
