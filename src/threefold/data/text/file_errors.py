"""Why a source is refused by the names of its files: none is there or can be read, or they are several splits."""

import difflib
import re
from pathlib import Path

from threefold.config.paths import expanded
from threefold.data.text import listing
from threefold.errors import DataError, shell_word

_UNPACK = {".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zip": "unzip"}
_UNPACK |= {".tar": "tar xf", ".tgz": "tar xzf"}
_TABLES = {
    ".arrow": "import datasets; datasets.Dataset.from_file({!r})",
    ".feather": "import pandas; pandas.read_feather({!r})",
    ".tsv": "import pandas; pandas.read_csv({!r}, sep='\\t')",
    ".xlsx": "import pandas; pandas.read_excel({!r})",
}
# By the name of a folder, or the first or last word of a file's.
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def refuse_several(source: str, files: listing.FileList) -> None:
    """DataError for a folder with a split to train on and one to test with: read as one, a test would prove nothing."""
    if not any("train" in each for each in files.read):
        return
    by_word: dict[str, Path] = {}
    texts = [each for each in files.read if not each.endswith((".py", ".md"))]
    for folder, _, name in (each.rpartition("/") for each in texts):
        words = re.findall("[a-z]+", name.rpartition(".")[0]) or [""]
        for word in {words[0], words[-1]}.intersection(_SPLITS):
            by_word[word] = Path(folder, f"*{word}*")
    for folder in {each.rpartition("/")[0] for each in texts}:
        by_word |= {path.name: path for path in (Path(folder), *Path(folder).parents)}
    splits = {word: by_word[word] for word in _SPLITS if word in by_word}
    if "train" in splits and len(splits) > 1:
        each = [f"--data.source {shell_word(files.root / at)}" for at in splits.values()]
        every = shell_word(files.root / "**" / f"*{Path(texts[0]).suffix}")
        raise DataError(
            f"data.source = {source!r} holds several splits: {', '.join(splits)}",
            expected="one split, so that what is trained on is not evaluated on",
            fix=f"{'   or   '.join(each)}   (all of it: {every})",
        )


def unknown_kind(source: str, path: Path) -> DataError:
    suffix, quoted = path.suffix.lower(), shell_word(path)
    fix = f"convert it to one of these kinds, or rename it if it is plain text: cp {quoted} {quoted}.txt"
    if suffix in listing.COMPRESSIONS:
        inside = [
            f"cp {quoted} {shell_word(path.with_suffix(f'.{kind}{suffix}'))}"
            for kind in ("txt", "jsonl")
        ]
        fix = f"name it after what is inside, as text or rows: {'   or   '.join(inside)}"
    elif suffix in _UNPACK:
        fix = f"{_UNPACK[suffix]} {quoted}"
    elif suffix in _TABLES:
        to = str(path.with_suffix(".parquet"))
        fix = (
            f"python -c {shell_word(f'{_TABLES[suffix].format(str(path))}.to_parquet({to!r})')}"
        )
    return DataError(
        f"data.source = {source!r}: files of type {path.suffix or '(no extension)'} are not supported",
        expected=f"one of {listing.KINDS}",
        fix=fix,
    )


def nothing_readable(source: str, files: listing.FileList) -> DataError:
    has = listing.counted(files.left_out) or "no file"
    what, where = (
        f" matches no file{' that can be read' if files.left_out else ''}",
        f"relative to {Path.cwd()}",
    )
    there = next(each for each in (files.root, *files.root.parents) if each.exists())
    fix = f"find -L {shell_word(there)} -type f | head   shows what is there"
    if (path := expanded(source)).exists():
        what = (
            ": no file in this folder can be read" if path.is_dir() else ": the file is empty"
        )
        where = f"at any depth, not hidden; {files.root} has {has}"
        fix = "--data.source FOLDER   (a folder that holds such files)"
    return DataError(
        f"data.source = {source!r}{what}",
        expected=f"at least one {listing.KINDS} file, {where}",
        fix=fix,
    )


def not_there(source: str, path: Path) -> DataError:
    parent = path.parent
    names = [entry.name for entry in parent.glob("*") if entry.is_file() or entry.is_dir()]
    nearest = difflib.get_close_matches(path.name, [*names, "stdlib"], 1)
    fix = "--data.source PATH   (or stdlib, or hf:ID for a dataset on the Hub)"
    if nearest:
        fix = f"--data.source {nearest[0] if nearest[0] == 'stdlib' else shell_word(parent / nearest[0])}"
    return DataError(
        f"data.source = {source!r} {'is neither a file nor a folder' if path.exists() else 'does not exist'}",
        expected=f"stdlib, hf:ID, a prepared folder, or a file, folder or glob, relative to {Path.cwd()}",
        fix=fix,
    )
