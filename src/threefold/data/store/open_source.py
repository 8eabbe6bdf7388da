"""From `data.source` to its token store.

A prepared folder, or the prefix of a .bin/.idx pair, is opened directly. Anything else is text: one process encodes it
once into a cached store while the machine's other processes wait.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from threefold.config.paths import expanded
from threefold.config.yaml_text import as_yaml, pasted
from threefold.data.chat.formats import FORMATS
from threefold.data.chat.labeller import format_of, labeller_for, template_file
from threefold.data.store.blocks import with_suffix
from threefold.data.store.prepare import PreparedStore, prepare, request_of
from threefold.data.store.store import TokenStore, read_info
from threefold.data.text.files import Files, open_files, open_stdlib
from threefold.data.text.hub import is_saved, open_hub, open_saved
from threefold.data.text.listing import FileList
from threefold.data.text.source import (
    TRAIN_ON,
    ConcatSource,
    LabellerFor,
    Labels,
    Opening,
    Source,
    TextSource,
)
from threefold.data.tokens import Tokenizer, for_texts
from threefold.errors import DataError, ThreefoldError, shell_word
from threefold.progress_bars import Bars

_STORES = ("s3:", "gs:")
# Without a user and without options, which may be a key.
_REMOTE = re.compile(r"([a-z][a-z0-9+.-]*)://(?:[^/]*@)?([^?#]*)")
# Keys for rows that are not text: what is trained on, and how they become text.
_OF_LABELS = ("lost_texts", "chat_template", "template_variables")
_LABELLED = (*FORMATS[1:], *TRAIN_ON[:-1])


def open_store(source: Source, *, tokenizer: Tokenizer | None, cache: Path) -> TokenStore:
    """The token store of a source; a DataError if it cannot be read or belongs to another tokenizer.

    Args:
        tokenizer: for text; a store that records its tokenizer is compared with it. None: only a store is accepted.
        cache: folder for the stores made from text.
    """
    if isinstance(source.name, str) and (prefix := store_prefix(source.name)) is not None:
        store = TokenStore(prefix)
        _check_tokenizer(source.name, store, tokenizer)
        _check_labels(source.name, store, source.labels)
        return store
    labels = labeller_for(source, tokenizer) if tokenizer is not None else None
    text = open_text(source, labels, memory=cache / "files")
    if tokenizer is None:
        raise DataError(
            f"data.source = {source.name!r} is text, but no tokenizer is set",
            expected="a tokenizer, or a folder made by `threefold data prepare`",
            fix="--data.tokenizer bytes   (or a Hub id or folder)",
        )
    tokenizer = for_texts(tokenizer, source.labels)
    return cached_store(text, tokenizer, cache=cache, skip_bad=source.skip_bad_lines).open()


def open_text(
    source: Source, labeller_for: LabellerFor | None = None, *, memory: Path | None = None
) -> TextSource:
    """The documents that a source names, their files' digests remembered in `memory`; a DataError if it has none."""
    opened = _opened(Opening(source, labeller_for, memory))
    if (
        labeller_for is not None
        and opened[0].loss_mask is None
        and source.labels.train_on not in (None, "all")
        and rows_format(source, memory=memory) == "text"
    ):
        raise DataError(
            f"data.train_on = {source.labels.train_on}: {opened[0].name} is text, of which every token is trained on",
            expected="rows with messages, or with prompt and completion",
            fix="leave data.train_on out   (or, if columns have other names: --data.fields '{messages: NAME}'; in a "
            "mixture with text: threefold data prepare --data.source ROWS --data.train_on ...)",
        )
    return opened[0] if len(opened) == 1 else ConcatSource(tuple(opened))


def rows_format(source: Source, *, memory: Path | None = None) -> str:
    """The format of a source's rows, or of those a store was made from; `unknown` for rows without a text.

    Arguments and errors as for `open_text`.
    """
    if isinstance(source.name, str) and (prefix := store_prefix(source.name)) is not None:
        info = read_info(prefix)
        return (
            info.loss_mask.format if info is not None and info.loss_mask is not None else "text"
        )
    formats = []

    def look(names: Sequence[str]) -> None:
        made = format_of(names, source)
        # The error for rows without a text, which comes on reading, names the columns to take.
        is_there = made != "text" or source.text_field.partition(".")[0] in names
        formats.append(made if is_there else "unknown")

    _opened(Opening(source, look, memory))
    return formats[0] if formats else "text"


def refuse_without_effect(sources: Sequence[Source], *, memory: Path | None = None) -> None:
    """Raises DataError for keys about labels that no source has rows for. Other errors come on reading."""
    labels, usual = sources[0].labels, Labels()
    keys = ["fields"] if labels.fields.keys() - {"text"} else []
    keys += [name for name in _OF_LABELS if getattr(labels, name) != getattr(usual, name)]
    keys += [
        name
        for name, value in (("format", labels.format), ("train_on", labels.train_on))
        if value in _LABELLED
    ]
    begins = [] if labels.bos == "auto" else ["bos"]
    if not keys and not begins:
        return
    try:
        formats = {rows_format(source, memory=memory) for source in sources}
    except ThreefoldError:
        return
    without_effect = keys if formats == {"text"} else begins if formats == {"chat"} else []
    if not without_effect:
        if labels.chat_template:
            template_file(labels.chat_template)  # else a rank would be the first to look
        return
    named = ", ".join(
        f"data.{name} = {as_yaml(getattr(labels, name))}" for name in without_effect
    )
    leave = f"leave {' and '.join(f'data.{name}' for name in without_effect)} out"
    if formats == {"chat"}:
        what, expected = (
            f"{named}: the rows are conversations",
            "a chat template that writes what begins one",
        )
        raise DataError(
            what, expected=expected, fix=f"{leave}   (or --data.chat_template FILE)"
        )
    raise DataError(
        f"{named}: {sources[0].name} is text, of which every token is trained on",
        expected="rows with messages, or with prompt and completion: only they have labels",
        fix=f"{leave}   (or, if columns have other names: --data.fields '{{messages: NAME}}')",
    )


def files_of(source: Source) -> list[FileList]:
    """The files that are read, and those left out, of the sources that are files and no token store."""
    if isinstance(source.name, str) and (
        source.name.startswith("hf:") or store_prefix(source.name) is not None
    ):
        return []
    return [text.files for text in _opened(Opening(source)) if isinstance(text, Files)]


def _opened(asked: Opening) -> list[TextSource]:
    source = asked.source
    if isinstance(source.name, str):
        return [_open_one(asked, source.name)]
    for name in source.name:
        if store_prefix(name) is not None:
            mixture = {
                f"source-{i}": {"source": each, "weight": 1}
                for i, each in enumerate(source.name, start=1)
            }
            raise DataError(
                f"data.source is a list, but {name!r} in it is a token store",
                expected="sources of text, which are encoded together",
                fix=f"--data.mixture {pasted(mixture)}   (any weights)",
            )
    try:
        opened = [
            _open_one(replace(asked, source=replace(source, name=name)), name)
            for name in source.name
        ]
    except DataError as error:
        fixes = (
            (each, each.fix.replace("--data.source ", "in the list: "))
            for each in error.problems
        )
        raise DataError.of(replace(each, fix=fix) for each, fix in fixes) from error
    if len({each.loss_mask for each in opened}) > 1:
        raise DataError(
            f"data.source is a list of different kinds: {'; '.join(str(each.loss_mask or 'text') for each in opened)}",
            expected="sources of one format, which are encoded together",
            fix="--data.mixture '{a: {source: ..., weight: 1}, b: ...}'   (or --data.format text)",
        )
    return opened


def _open_one(asked: Opening, name: str) -> TextSource:
    folder = expanded(name)
    if name.startswith(_STORES):
        from threefold.data.store.at_address import text_at

        # Under the name that the user wrote.
        text = _open_one(asked, str(text_at(name)))
        return replace(text, name=name) if isinstance(text, Files) else text
    if match := _REMOTE.match(name):
        name = match.expand(r"\1://\2")
        download = f"wget {name} -P" if name.startswith("http") else f"download {name} to"
        fix = f"{download} DIR   then --data.source DIR"
        if name.startswith("hf://datasets/"):
            fix = f"--data.source hf:{'/'.join(name.split('/')[3:5])}   (all files of the dataset)"
        raise DataError(
            f"data.source = {name!r} is an address: text at {match[1]}:// is not read",
            expected="files on this machine or at s3://BUCKET/PREFIX, or hf:OWNER/NAME for a dataset on the Hub",
            fix=fix,
        )
    if name.startswith("hf:"):
        return open_hub(asked)
    if name == "stdlib":
        return open_stdlib(asked.memory)
    return open_saved(asked, folder) if is_saved(folder) else open_files(name, asked)


def cached_store(
    text: TextSource, tokenizer: Tokenizer, *, cache: Path, skip_bad: bool = False
) -> PreparedStore:
    """The store of a text under the folder `cache`, made on first use and named by content and tokenizer."""
    to = cache / "tokens" / request_of(text, tokenizer, skip_bad=skip_bad)
    with Bars().show(f"preparing {text.name}") as bar:
        return prepare(
            text,
            tokenizer,
            to=to,
            skip_bad=skip_bad,
            progress=lambda done, total: bar.at(done, total=total),
        )


def store_prefix(source: str) -> Path | None:
    """Prefix of the store that `source` names; None for text; a DataError for several or an unfinished one."""
    if source == "stdlib" or source.startswith("hf:"):
        return None
    if source.startswith(_STORES):
        from threefold.data.store.at_address import prefix_of

        return prefix_of(source)
    path = expanded(source)
    if path.is_dir():
        prefixes = sorted(idx.with_suffix("") for idx in path.glob("*.idx"))
        if len(prefixes) > 1:
            raise DataError(
                f"data.source = {source!r} holds {len(prefixes)} token stores",
                expected="one, or the prefix of one of them",
                fix="   or   ".join(
                    f"--data.source {shell_word(prefix)}" for prefix in prefixes[:5]
                ),
            )
        if not prefixes and any(path.glob(".parts-*")):
            raise DataError(
                f"data.source = {source!r} is an unfinished token store",
                expected="a complete store: .bin, .idx and .json",
                fix=f"threefold data prepare ... --to {shell_word(path)}   as before: it continues",
            )
        return prefixes[0] if prefixes else None
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if not path.exists() and any(
        with_suffix(path, suffix).exists() for suffix in (".bin", ".idx")
    ):
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


def _check_labels(source: str, store: TokenStore, labels: Labels) -> None:
    """Refuses keys that ask for a loss mask other than the one that a store has recorded."""
    recorded = store.loss_mask
    format, train_on = (
        ("text", "all") if recorded is None else (recorded.format, recorded.train_on)
    )
    wrong = [
        f"data.{key} = {setting}"
        for key, setting, other in (
            ("format", labels.format, labels.format not in ("auto", format)),
            ("train_on", labels.train_on, labels.train_on not in (None, train_on)),
        )
        if other
    ]
    if wrong:
        raise DataError(
            f"{', '.join(wrong)}: the token store {source} was made as {recorded or 'text, trained on: all'}",
            expected="what the store has recorded: which tokens are trained on is decided when it is prepared",
            fix="leave the keys out   (or make another store: threefold data prepare --data.source SOURCE "
            "--data.tokenizer TOKENIZER --to DIR, with --data.format, --data.train_on)",
        )
