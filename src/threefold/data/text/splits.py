"""Splits of a dataset that are files of one folder, by the name of a folder or the first or last word of a file's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from threefold.data.text.listing import FileList
from threefold.errors import DataError

_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def refuse_several(source: str, files: FileList) -> None:
    """DataError for a folder with a split to train on and one to test with: read as one, a test would prove nothing."""
    by_word: dict[str, Path] = {}
    paths = [path for path in map(Path, files.read) if path.suffix not in (".py", ".md")]
    for path in paths:
        words = re.findall("[a-z]+", path.stem) or [""]
        ends = {word: path.with_name(f"*{word}*") for word in (words[0], words[-1])}
        ends |= {folder.name: folder for folder in path.parents}
        by_word |= {word: ends[word] for word in _SPLITS if word in ends}
    splits = {word: by_word[word] for word in _SPLITS if word in by_word}
    if "train" in splits and len(splits) > 1:
        each = [f"--data.source {shlex.quote(str(files.root / at))}" for at in splits.values()]
        every = shlex.quote(str(files.root / "**" / f"*{paths[0].suffix}"))
        raise DataError(
            f"data.source = {source!r} holds several splits: {', '.join(splits)}",
            expected="one split, so that what is trained on is not evaluated on",
            fix=f"{'   or   '.join(each)}   (all of it: {every})",
        )
