"""From what `data.source` names to its token store.

A prepared folder, or the prefix of a .bin/.idx pair, is opened directly. Anything else is text: one process encodes it
once into a cached store while the machine's other processes wait.
"""

from __future__ import annotations

from pathlib import Path

from threefold.data.store.blocks import with_suffix
from threefold.data.store.prepare import PreparedStore, prepare, request_of
from threefold.data.store.store import TokenStore
from threefold.data.text.files import open_files, open_stdlib
from threefold.data.text.hub import open_hub
from threefold.data.text.source import Source, TextSource
from threefold.data.tokens import Tokenizer
from threefold.errors import DataError


def open_store(source: Source, *, tokenizer: Tokenizer | None, cache: Path) -> TokenStore:
    """The token store of a source; a DataError if it cannot be read or belongs to another tokenizer.

    Args:
        tokenizer: for text; a store that records its tokenizer is compared with it. None: only a store is accepted.
        cache: folder for the stores made from text.
    """
    prefix = store_prefix(source.name)
    if prefix is not None:
        store = TokenStore(prefix)
        _check_tokenizer(source.name, store, tokenizer)
        return store
    text = open_text(source)
    if tokenizer is None:
        raise DataError(
            f"data.source = {source.name!r} is text, but no tokenizer is set",
            expected="a tokenizer, or a folder made by `threefold data prepare`",
            fix="--data.tokenizer bytes   (or a Hub id or folder)",
        )
    return cached_store(text, tokenizer, cache=cache, skip_bad=source.skip_bad_lines).open()


def open_text(source: Source) -> TextSource:
    """The documents that a source names; a DataError if they cannot be read."""
    if source.name.startswith("hf:"):
        return open_hub(source)
    return open_stdlib() if source.name == "stdlib" else open_files(source.name, text_field=source.text_field)


def cached_store(text: TextSource, tokenizer: Tokenizer, *, cache: Path, skip_bad: bool = False) -> PreparedStore:
    """The store of a text under the folder `cache`, made on first use and named by content and tokenizer."""
    to = cache / "tokens" / request_of(text, tokenizer, skip_bad=skip_bad)
    return prepare(text, tokenizer, to=to, skip_bad=skip_bad)


def store_prefix(source: str) -> Path | None:
    """Prefix of the store that `source` names; None for text; a DataError for several or an unfinished one."""
    if source == "stdlib" or source.startswith("hf:"):
        return None
    path = Path(source).expanduser()
    if path.is_dir():
        prefixes = sorted(idx.with_suffix("") for idx in path.glob("*.idx"))
        if len(prefixes) > 1:
            raise DataError(
                f"data.source = {source!r} holds {len(prefixes)} token stores",
                expected="one, or the prefix of one of them",
                fix="   or   ".join(f"--data.source {prefix}" for prefix in prefixes[:5]),
            )
        if not prefixes and any(path.glob(".parts-*")):
            raise DataError(
                f"data.source = {source!r} is an unfinished token store",
                expected="a complete store: .bin, .idx and .json",
                fix=f"run the same   threefold data prepare ... --to {path}   again: it resumes where it stopped",
            )
        return prefixes[0] if prefixes else None
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if not path.exists() and any(with_suffix(path, suffix).exists() for suffix in (".bin", ".idx")):
        return path
    return None


def _check_tokenizer(source: str, store: TokenStore, tokenizer: Tokenizer | None) -> None:
    info = store.info
    if tokenizer is None or info is None or info.tokenizer_fingerprint == tokenizer.fingerprint:
        return
    raise DataError(
        f"data.tokenizer = {tokenizer.name!r}: {source} was made with another tokenizer, {info.tokenizer!r} "
        f"({info.vocab_size:,} ids, end token {info.end_id})",
        expected=f"the store's tokenizer; {tokenizer.name!r} has {tokenizer.vocab_size:,} ids, end token "
        f"{tokenizer.end_id}, and uses the same ids for other tokens",
        fix=f"prepare the text again with {tokenizer.name}   (for random weights also: --data.tokenizer "
        f"{info.tokenizer})",
    )
