"""Tokenizers: text in, arrays of ids out, and the id that ends a document.

Two kinds with one interface: `bytes`, which needs nothing, and a Hugging Face id or folder. Neither adds special
tokens; the writer of documents appends `end_id`. A tokenizer pickles, for the processes that prepare a corpus.

The `tokenizers` library reads a tokenizer.json, and no torch is loaded; AutoTokenizer reads folders with an older form
of vocabulary. No code from the repository runs. A document ends with the model's own end-of-sequence token. `for_texts`
decides how it begins, and how control tokens spelled out in it are treated.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from threefold.arrays import Array
from threefold.config.paths import expanded
from threefold.data.text.known_bytes import content_digest
from threefold.data.text.source import Labels
from threefold.errors import DataError, first_line, passing
from threefold.jsonl import Values, from_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

CONFIGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
)
VOCABULARIES = (
    "tokenizer.json",
    "*.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "tekken.json",
)
MODEL_KEY = "model.name_or_path"
_BYTES = 256
_FOR_RANDOM = "for random weights also: --data.tokenizer bytes"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 to end a document: 257 ids, not padded to a round number."""

    name = "bytes"
    vocab_size = 257
    end_id = 256
    bos_id = None
    fingerprint = content_digest("threefold bytes 1")

    @property
    def recipe(self) -> str:
        """Equal for equal ids of equal texts."""
        return self.fingerprint

    def encode_batch(self, texts: list[str]) -> list[Array]:
        """The bytes of each text, uint8."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


def byte_backend() -> Any:
    """The tokenizer `bytes` as one of the `tokenizers` library: the same ids, with the end token as `<|end|>`."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(
        models.BPE(vocab={letter: byte for byte, letter in _byte_letters().items()}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return backend


@dataclass(frozen=True)
class VocabularyTokenizer:
    """A tokenizer of the `tokenizers` library, which encodes a batch on all cores, or of transformers, in Python.

    `vocab_size` is the largest id + 1, so an embedding of that many rows suffices. `fingerprint` identifies the content
    of the tokenizer, not its place: it is equal for equal ids. `folder` has its files; `bos_id` begins each text; with
    `control_text` control tokens that are spelled out in a text stay text.
    """

    name: str
    backend: Any
    vocab_size: int
    end_id: int
    fingerprint: str
    folder: Path | None = None
    bos_id: int | None = None
    control_text: bool = False

    @property
    def recipe(self) -> str:
        """Equal for equal ids of equal texts."""
        text = " control tokens as text" if self.control_text else ""
        return (
            self.fingerprint
            + text
            + (f" after {self.bos_id}" if self.bos_id is not None else "")
        )

    def encode_batch(self, texts: list[str]) -> list[Array]:
        """Ids of each text, int32, without special tokens but that which begins it."""
        if hasattr(self.backend, "encode_batch_fast"):
            # The backend is shared, and this is a setting of it.
            self.backend.encode_special_tokens, before = (
                self.control_text,
                self.backend.encode_special_tokens,
            )
            encoded = [
                each.ids
                for each in self.backend.encode_batch_fast(texts, add_special_tokens=False)
            ]
            self.backend.encode_special_tokens = before
        else:
            split = {"split_special_tokens": True} if self.control_text else {}
            encoded = [
                self.backend.encode(text, add_special_tokens=False, **split) for text in texts
            ]
        first = [] if self.bos_id is None else [self.bos_id]
        return [np.array([*first, *ids], np.int32) for ids in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without the end token and other special tokens."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))


Tokenizer = ByteTokenizer | VocabularyTokenizer


def load_tokenizer(
    name: str, *, revision: str | None = None, key: str = "data.tokenizer"
) -> Tokenizer:
    """`bytes`, or the tokenizer of a local folder or of an id on the Hub, at a branch, tag or commit `revision`.

    A DataError, which names the tokenizer by its `key`, if it is missing, cannot be reached, or has no end token.
    """
    if name == "bytes":
        return ByteTokenizer()
    folder = expanded(name)
    if not folder.is_dir():
        folder = _download(name, revision=revision, key=key)
    if not any(next(folder.glob(pattern), None) for pattern in VOCABULARIES):
        fix = f"the id or folder of a model that comes with its tokenizer   ({_FOR_RANDOM})"
        if key == MODEL_KEY:
            fix = "copy the files of the tokenizer that the weights were trained with there"
        raise DataError(
            f"{key} = {name!r} contains no tokenizer",
            expected=f"tokenizer.json, or an older vocabulary ({', '.join(VOCABULARIES[1:])}), in {folder}",
            fix=fix,
        )
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            loaded: Any = Backend.from_file(str(file))
        else:
            # Loads torch: only for vocabularies of an older form.
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        # A missing package, a damaged file, an unknown class: all the same to the user.
        first = first_line(error)
        raise DataError(
            f"{key} = {name!r} cannot be read: {first}",
            expected="a tokenizer that the installed tokenizers or transformers can read",
            fix="download or save the tokenizer again, or   "
            "pip install -U tokenizers transformers sentencepiece tiktoken",
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if file.is_file():
        end_id, content = _end_id(folder, loaded), file.read_bytes()
    elif isinstance(backend, Backend):
        end_id, content, loaded = loaded.eos_token_id, backend.to_str().encode(), backend
    else:
        # In Python: the files say how it cuts a text (merges, cases), which its vocabulary does not.
        names = (*VOCABULARIES, *loaded.vocab_files_names.values(), *CONFIGS[:2])
        files = (path for name in names for path in sorted(folder.glob(name)))
        content = f"{type(loaded).__name__} {sorted(loaded.get_vocab().items())!r}".encode()
        content += b"".join(map(Path.read_bytes, files))
        end_id = loaded.eos_token_id
    if end_id is None:
        raise DataError(
            f"{key} = {name!r} names no end token",
            expected=f'"eos_token" or "eos_token_id" in one of {", ".join(CONFIGS)}: it ends each document',
            fix='add   "eos_token": "TOKEN"   to tokenizer_config.json, a token of the vocabulary',
        )
    if hasattr(loaded, "encode_batch_fast"):
        # A file may ask for truncation or padding to a model's length: a document is encoded completely.
        loaded.no_truncation()
        loaded.no_padding()
    vocab_size = max(end_id, *loaded.get_vocab().values()) + 1
    fingerprint = content_digest(content + f"\0{end_id}".encode())
    return VocabularyTokenizer(name, loaded, vocab_size, end_id, fingerprint, folder)


def for_texts(tokenizer: Tokenizer, labels: Labels) -> Tokenizer:
    """The tokenizer as it encodes texts: with what begins each, and what becomes of control tokens in it.

    Args:
        labels: of it, `bos`: true, false, or `auto`: as the tokenizer itself does for a single text; and
            `control_tokens`: `text` or `ids`.

    Raises:
        DataError: a token that begins a text is requested, and the tokenizer has none.
    """
    bos_id = _own_bos(tokenizer) if labels.bos else None
    if labels.bos is True and bos_id is None:
        folder = getattr(tokenizer, "folder", None)
        named = [config.get("bos_token") for config in (_configs(folder) if folder else ())]
        texts = [token.get("content") if isinstance(token, dict) else token for token in named]
        tokens = _vocabulary(tokenizer).items()
        bos_id = next((id for id, each in tokens if each in texts), None)
    if labels.bos is True and bos_id is None:
        raise DataError(
            f"data.bos = true, but the tokenizer {tokenizer.name!r} names no token that begins a text",
            expected='"bos_token" in its tokenizer_config.json',
            fix="--data.bos false",
        )
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer
    return replace(tokenizer, bos_id=bos_id, control_text=labels.control_tokens == "text")


def spelled_out(tokenizer: Tokenizer, ids: Array) -> str | None:
    """A warning of control tokens that the text of `ids` has as other tokens; `decode` leaves out the real ones."""
    if isinstance(tokenizer, ByteTokenizer):
        return None
    text, tokens = tokenizer.decode(ids), _vocabulary(tokenizer)
    control = (tokens[id] for id in _special_ids(tokenizer) if id in tokens)
    spelled = sorted(token for token in control if len(token) > 3 and token in text)[:3]
    kept = f"{', '.join(spelled)} in a text stays text. As control tokens"
    return f"{kept}: --data.control_tokens ids" if spelled else None


def _own_bos(tokenizer: Tokenizer) -> int | None:
    """The special token that a tokenizer puts before a text; None if it does not."""
    if isinstance(tokenizer, ByteTokenizer):
        return None
    ids, bare = (
        tokenizer.backend.encode("a", add_special_tokens=special) for special in (True, False)
    )
    ids, bare = list(getattr(ids, "ids", ids)), list(getattr(bare, "ids", bare))
    begins = (
        len(ids) > len(bare)
        and ids[1 : 1 + len(bare)] == bare
        and ids[0] in _special_ids(tokenizer)
    )
    return int(ids[0]) if begins else None


def difference(tokenizer: Tokenizer, own: Tokenizer) -> str | None:
    """How the ids of a tokenizer differ from those that a model was trained with; None if they mean the same."""
    vocabulary, expected = _vocabulary(tokenizer), _vocabulary(own)
    if isinstance(tokenizer, ByteTokenizer) or isinstance(own, ByteTokenizer):
        # `bytes` has no text for its own.
        vocabulary[tokenizer.end_id] = expected[own.end_id] = "the end token"
    if (count := len(vocabulary)) != len(expected):
        return f"it has {count:,} tokens, the model's own {len(expected):,}"
    if others := sorted(id for id, token in vocabulary.items() if expected.get(id) != token):
        first, own_token = vocabulary[others[0]], expected.get(others[0])
        return f"{len(others):,} ids are other tokens: {others[0]} is {first!r}, in the model's own {own_token!r}"
    if tokenizer.end_id != own.end_id:
        return f"its end token is {tokenizer.end_id}, the model's own {own.end_id}"
    if differing := sorted(_special_ids(tokenizer) ^ _special_ids(own)):
        return f"{differing[0]} is a special token in one of them only"
    return None


def _vocabulary(tokenizer: Tokenizer) -> dict[int, str]:
    """Id -> token."""
    if isinstance(tokenizer, ByteTokenizer):
        return _byte_letters()
    return {id: token for token, id in tokenizer.backend.get_vocab().items()}


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    if isinstance(tokenizer, ByteTokenizer):
        return {tokenizer.end_id}
    if hasattr(tokenizer.backend, "get_added_tokens_decoder"):
        return {
            id
            for id, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
    return set(tokenizer.backend.all_special_ids)


def _byte_letters() -> dict[int, str]:
    """Byte -> its letter in a byte-level vocabulary: itself if it can be printed, else one of those after 255."""
    printed = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    free = iter(range(_BYTES, 2 * _BYTES))
    return {byte: chr(byte if byte in printed else next(free)) for byte in range(_BYTES)}


def _download(name: str, *, revision: str | None, key: str) -> Path:
    """Folder with the tokenizer's files from the Hub, or from its cache if the Hub cannot be reached."""
    if not _HUB_ID.fullmatch(name):
        raise DataError(
            f"{key} = {name!r} does not exist",
            expected="bytes, a folder with tokenizer.json, or an id on the Hub as owner/name",
            fix=f"check the path   ({_FOR_RANDOM})",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=[*CONFIGS, *VOCABULARIES])
        )
    except HfHubHTTPError as error:
        raise DataError(
            f"{key} = {name!r} is not on the Hub, or you have no access: {first_line(error)}",
            expected="bytes, a folder with tokenizer.json, or an id on the Hub as owner/name",
            fix="check the name and the revision; for a gated model   hf auth login",
        ) from error
    except (OSError, ValueError) as error:
        option = f"--{key} FOLDER" + ("" if key == MODEL_KEY else f"   ({_FOR_RANDOM})")
        raise DataError(
            f"{key} = {name!r} is not a local folder, and the Hub could not be reached: {type(error).__name__}"
            + passing(error),
            expected="a folder with tokenizer.json, an id in the Hub's cache, or a connection to the Hub",
            fix=f"hf download {name}   on a machine with internet, then {option}",
        ) from error


def _end_id(folder: Path, backend: "Backend") -> int | None:
    """The end-of-sequence token in the files next to tokenizer.json; the tokenizer's own precedes the model's."""
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


def _configs(folder: Path) -> Iterator[Values]:
    for name in CONFIGS:
        try:
            config = from_json((folder / name).read_bytes())
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise DataError(
                f"{folder / name} is not JSON: {error}",
                expected="the file as published with the model",
                fix="download or save the tokenizer again",
            ) from error
        if isinstance(config, dict):
            yield config
