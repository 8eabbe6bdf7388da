"""From what `data.source` names to rows that can be read: the path that the loader, the audit and the commands share.

A prepared folder, or the prefix of a .bin/.idx pair, is opened as it is. Anything else is text: it is encoded once into
a cached store, by one process while the others of the machine wait. Either way the store is then packed into rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from threefold.data.rows.best_fit import DEFAULT_LOOKAHEAD
from threefold.data.rows.concat import ConcatRows, Rows
from threefold.data.rows.padded import PaddedRows
from threefold.data.store.prepare import Progress, cached_store
from threefold.data.store.store import TokenStore, with_suffix
from threefold.data.text.source import open_text
from threefold.data.tokens import Tokenizer
from threefold.errors import ConfigError, DataError, Problem

PACKINGS = ("concat", "best_fit", "none")


def open_rows(  # the keys of the config's `data` section, one for one, so that a caller can pass them on
    source: str,
    *,
    tokenizer: Tokenizer | None,
    cache: Path,
    seq_len: int,
    packing: str = "concat",
    document_mask: bool = False,
    truncate: bool = False,
    lookahead: int | None = None,
    text_field: str = "text",
    split: str = "train",
    config_name: str | None = None,
    revision: str | None = None,
    skip_bad_lines: bool = False,
    num_workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Rows:
    """Rows of a source: the store it is, or the cached store of its text, packed.

    The packing's settings are checked before anything is read. For the arguments see `open_store` and `pack`.

    Raises:
        ConfigError: a setting without effect in this packing.
        DataError: the source cannot be read, its store belongs to another tokenizer, or it gives not one row.
    """
    _check_packing(packing, truncate=truncate, lookahead=lookahead)
    store = open_store(
        source,
        tokenizer=tokenizer,
        cache=cache,
        text_field=text_field,
        split=split,
        config_name=config_name,
        revision=revision,
        skip_bad_lines=skip_bad_lines,
        num_workers=num_workers,
        progress=progress,
    )
    return pack(
        store,
        seq_len=seq_len,
        packing=packing,
        document_mask=document_mask,
        truncate=truncate,
        lookahead=lookahead,
    )


def open_store(
    source: str,
    *,
    tokenizer: Tokenizer | None,
    cache: Path,
    text_field: str = "text",
    split: str = "train",
    config_name: str | None = None,
    revision: str | None = None,
    skip_bad_lines: bool = False,
    num_workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> TokenStore:
    """The token store of a source.

    Args:
        source: a prepared folder, the prefix of a .bin/.idx pair, or anything `open_text` knows.
        tokenizer: for text; a store is compared with it where both say what they are. None: a store is expected.
        cache: folder for the stores made of text.
        text_field, split, config_name, revision: see `open_text`.
        skip_bad_lines, num_workers, progress: see `prepare`.
    """
    prefix = store_prefix(source)
    if prefix is not None:
        store = TokenStore(prefix)
        _check_tokenizer(source, store, tokenizer)
        return store
    text = open_text(source, text_field=text_field, split=split, config_name=config_name, revision=revision)
    if tokenizer is None:
        raise DataError(
            f"data.source = {source!r} is text, and there is no tokenizer for it",
            expected="a tokenizer, or a folder made by `threefold data prepare`",
            fix="--data.tokenizer bytes   (or a Hub id or folder)",
        )
    prepared = cached_store(
        text, tokenizer, cache=cache, skip_bad=skip_bad_lines, num_workers=num_workers, progress=progress
    )
    return prepared.open()


def pack(
    store: TokenStore,
    *,
    seq_len: int,
    packing: str = "concat",
    document_mask: bool = False,
    truncate: bool = False,
    lookahead: int | None = None,
) -> Rows:
    """A store as rows of `seq_len` tokens.

    Args:
        packing: `concat`, `best_fit` or `none` (see `packing`).
        document_mask: number the documents inside a row and begin positions again with each.
        truncate: `best_fit` and `none`: keep the first row of a longer document, drop the rest.
        lookahead: `best_fit`: pieces to choose from at a time; None: 8192.

    Raises:
        ConfigError: a setting without effect in this packing.
        DataError: the store gives not one row.
    """
    _check_packing(packing, truncate=truncate, lookahead=lookahead)
    if packing == "concat":
        return ConcatRows(store, seq_len=seq_len, document_mask=document_mask)
    return PaddedRows(
        store,
        seq_len=seq_len,
        lookahead=(lookahead or DEFAULT_LOOKAHEAD) if packing == "best_fit" else None,
        document_mask=document_mask,
        truncate=truncate,
    )


def store_prefix(source: str) -> Path | None:
    """Prefix of the store that `source` is, None where it is text.

    A folder is a store's if it holds an .idx; the prefix or either file of a pair names it too.

    Raises:
        DataError: a folder holds several stores, or one whose making was interrupted.
    """
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
                f"data.source = {source!r} is a token store whose making was interrupted",
                expected="a whole store: .bin, .idx and .json",
                fix=f"run the same   threefold data prepare ... --to {path}   again: it goes on where it stopped",
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
        f"{tokenizer.end_id}, and gives the same ids another meaning",
        fix=f"--data.tokenizer {info.tokenizer}   (or prepare the text again with {tokenizer.name})",
    )


def _check_packing(packing: str, *, truncate: bool, lookahead: int | None) -> None:
    """Refuses settings that have no effect in this packing, all at once."""
    if packing not in PACKINGS:
        raise ConfigError(
            f"data.packing = {packing!r} is no packing", expected=", ".join(PACKINGS), fix="--data.packing concat"
        )
    problems = []
    if truncate and packing == "concat":
        problems.append(_no_effect("truncate", True, packing, "best_fit or none: concat cuts no document short"))
    if lookahead is not None and packing != "best_fit":
        problems.append(_no_effect("lookahead", lookahead, packing, "best_fit: only it chooses among documents"))
    if problems:
        raise ConfigError.of(problems)


def _no_effect(key: str, value: object, packing: str, expected: str) -> Problem:
    shown = str(value).lower() if isinstance(value, bool) else value
    return Problem(
        f"data.{key} = {shown} has no effect with data.packing = {packing}",
        f"data.packing {expected}",
        f"remove data.{key}, or --data.packing {expected.split(':')[0].split(' ')[0]}",
    )
