"""The files of a folder or a glob: each real file once, and the omitted ones with the reason.

A file that two paths lead to (links, a glob with two `**`, overlapping entries of a list) is read once, under the path
that leads through no link. Linked folders are entered, each real folder once. In a folder, hidden files, the README of
a folder of rows, files that describe a dataset, and .json and .csv files beside documents are left out; a glob
names its files itself. Empty files of the kinds that came later than the others are left out.
"""

import glob
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from threefold.config.paths import RUN_FILE
from threefold.errors import size_text
from threefold.jsonl import Values, write_whole

TEXTS = (".txt", ".md", ".py")
ROWS = (".jsonl", ".json", ".csv", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
KINDS = ".txt, .md, .py, .jsonl (.ndjson, .jl), .json, .csv (each also with .gz or .zst) or .parquet"
FILE = "data.files.jsonl"
READ_ALREADY = "read already"

# Files that the datasets library and `data prepare` write beside the data.
_DESCRIBES = ("dataset_info", "dataset_infos", "dataset_dict", "state", "tokens", "tokens.ids")
_DESCRIPTIONS = {FILE, *(f"{name}.json" for name in _DESCRIBES)}
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")

Known = dict[tuple[int, int], str]
"""(device, inode) of the files that are read already -> path."""


class Kind(NamedTuple):
    """The kind of a file by its name: the suffix of its contents, and their compression (None: not compressed)."""

    suffix: str
    compression: str | None

    @property
    def has_frame(self) -> bool:
        """Whether no file of this kind can be empty: an empty one is no archive, no JSON and no table."""
        return self.compression is not None or self.suffix in (".json", ".csv")


class LeftOut(NamedTuple):
    """A file or folder that is not read: its path, the word that counts it, and the reason."""

    path: str
    group: str
    why: str


@dataclass(frozen=True)
class FileList:
    """The files of a folder or glob, as paths relative to `root` with `/`, sorted; and those left out.

    `key` names the source in the config, for the list of a run's files.
    """

    root: Path
    read: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    key: str = ""


def kind_of(name: str) -> Kind | None:
    """The kind of a file by its name; None if it is not one that is read."""
    stem, suffix = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(suffix)
    inner = suffix if compression is None else os.path.splitext(stem)[1]
    inner = ".jsonl" if inner in (".ndjson", ".jl") else inner
    readable = inner in TEXTS + ROWS and not (compression and inner == ".parquet")
    return Kind(inner, compression) if readable else None


def list_folder(root: Path, known: Known, *, excluded: Collection[str] = ()) -> FileList:
    """The files below a folder at any depth, without those `known`, to which it adds them.

    Args:
        excluded: names of folders that are not part of the source.
    """
    left: list[LeftOut] = []
    files = list(_below(root, excluded, left))
    shown = (
        path
        for path in files
        if not _name(path).startswith(".") and _name(path) not in _DESCRIPTIONS
    )
    kinds = {path: kind for path in shown if (kind := kind_of(path)) is not None}
    documents = {path for path, kind in kinds.items() if kind.suffix in TEXTS}
    if len(documents) < len(kinds) and all(
        _name(path).lower().startswith("readme.") for path in documents
    ):
        documents = set()

    def reason(path: str) -> tuple[str, str] | None:
        kind, name = kinds.get(path), _name(path)
        if kind is None:
            hidden = (
                ("hidden", "its name begins with a dot")
                if name.startswith(".")
                else _unknown(path)
            )
            return (name, "it describes data") if name in _DESCRIPTIONS else hidden
        if kind.suffix in TEXTS and path not in documents:
            return name, "a README beside files of rows"
        if kind.compression and os.path.splitext(path)[0] in kinds:
            return "compressed copies", "its name says that it is a copy of a file beside it"
        if documents and kind.suffix in (".json", ".csv"):
            return kind.suffix, "rows beside documents: a glob or a list reads them too"
        return None

    reasons = {path: reason(path) for path in files}
    left += [LeftOut(path, *why) for path, why in reasons.items() if why is not None]
    return each_once(
        root, {path: kinds[path] for path, why in reasons.items() if why is None}, left, known
    )


def list_glob(pattern: str, known: Known) -> FileList:
    """The files that a glob matches; `{a,b}` in it matches either."""
    patterns, fixed = list(_either(pattern)), Path(pattern)
    while glob.has_magic(str(fixed)) or (len(patterns) > 1 and "{" in str(fixed)):
        fixed = fixed.parent
    matches = {Path(name) for each in patterns for name in glob.glob(each, recursive=True)}
    # A pattern that begins inside a run's folder means the files there.
    inside = {path: path.relative_to(fixed).parents for path in matches if path.is_file()}
    runs = {
        folder
        for folder in set().union(*inside.values())
        if folder.name and (fixed / folder / RUN_FILE).exists()
    }
    files = sorted(
        path.relative_to(fixed).as_posix()
        for path, above in inside.items()
        if not runs & set(above)
    )
    kinds = {path: kind for path in files if (kind := kind_of(path)) is not None}
    left = [LeftOut(path, *_unknown(path)) for path in files if path not in kinds]
    left += [_run(folder.as_posix()) for folder in sorted(runs)]
    return each_once(fixed, kinds, left, known)


def _run(path: str) -> LeftOut:
    return LeftOut(path, f"run ({path})", "the folder of a run: its records are not data")


def is_glob(source: str) -> bool:
    return glob.has_magic(source) or _BRACES.search(source) is not None


def counted(left_out: Iterable[LeftOut]) -> str:
    """`2 .bin, 1 hidden`; at most six groups by name."""
    groups = Counter(each.group for each in left_out).most_common()
    more = [f"{sum(count for _, count in groups[6:])} others"] if len(groups) > 6 else []
    return ", ".join([f"{count:,} {group}" for group, count in groups[:6]] + more)


def summary(lists: Collection[FileList]) -> str:
    """`12 files read (3.1 GiB), 4 left out (2 .bin, 2 hidden)`."""
    num_read, size = (
        sum(len(each.read) for each in lists),
        sum(_size(e.root / p) for e in lists for p in e.read),
    )
    left = [each for files in lists for each in files.left_out]
    text = f"{num_read:,} file{'' if num_read == 1 else 's'} read ({size_text(size)})"
    return f"{text}, {len(left):,} left out ({counted(left)})" if left else text


def write_list(lists: Iterable[FileList], folder: Path) -> str:
    """Writes a line of JSON for each file: its path, and its size in bytes or the reason why it is left out.

    Returns where, or why it could not: nothing else needs the list.
    """
    to = folder / FILE
    try:
        write_whole(to, (json.dumps(line).encode() + b"\n" for line in _lines(lists)))
    except OSError as error:
        return f"not listed in {to}: {error.strerror}"
    return f"listed in {to}"


def _lines(lists: Iterable[FileList]) -> Iterator[Values]:
    for each in lists:
        # The run may be resumed from another folder.
        root, key = each.root.absolute(), {"key": each.key} if each.key else {}
        for path in each.read:
            yield {"path": str(root / path), "bytes": _size(root / path), **key}
        for left in each.left_out:
            yield {"path": str(root / left.path), "left_out": left.why}


def _below(root: Path, excluded: Collection[str], left: list[LeftOut]) -> Iterator[str]:
    """Files below a folder. Links to folders come last, so that a folder which is inside keeps its own path."""
    entered: dict[str, str] = {}
    links = [str(root)]

    def relative(path: str) -> str:
        return Path(path).relative_to(root).as_posix()

    def closed(error: OSError) -> None:
        left.append(
            LeftOut(relative(str(error.filename)), "folders", f"the folder: {error.strerror}")
        )

    while links:
        for here, subfolders, names in os.walk(links.pop(0), onerror=closed):
            first = entered.setdefault(os.path.realpath(here), here)
            if first != here:
                left.append(
                    LeftOut(relative(here), "linked again", f"the same folder as {first}")
                )
                subfolders.clear()
                continue
            if RUN_FILE in names:
                left.append(_run(relative(here)))
                subfolders.clear()
                continue
            subfolders[:] = sorted(name for name in subfolders if name not in excluded)
            for name in [name for name in subfolders if name.startswith(".")]:
                left.append(
                    LeftOut(
                        relative(os.path.join(here, name)),
                        "hidden",
                        "its name begins with a dot",
                    )
                )
                subfolders.remove(name)
            links += [
                path for name in subfolders if os.path.islink(path := os.path.join(here, name))
            ]
            yield from (relative(os.path.join(here, name)) for name in sorted(names))


def each_once(
    root: Path, kinds: dict[str, Kind], left: list[LeftOut], known: Known
) -> FileList:
    """The files of `kinds` without those that another path leads to, or are `known`; the others are added to it."""
    same: dict[tuple[int, int], list[tuple[str, os.stat_result]]] = {}
    read = []
    for path, kind in kinds.items():
        try:
            status = os.stat(root / path)
        except OSError:  # reading it raises the error that names it
            read.append(path)
            continue
        if not stat.S_ISREG(status.st_mode):
            left.append(LeftOut(path, "special", "not an ordinary file"))
        elif kind.has_frame and not status.st_size:
            left.append(LeftOut(path, "empty", "empty"))
        else:
            same.setdefault((status.st_dev, status.st_ino), []).append((path, status))
    real_root = os.path.realpath(root)
    for key, entries in same.items():
        if len(entries) > 1:
            entries.sort(
                key=lambda each: (
                    os.path.realpath(root / each[0]) != os.path.join(real_root, each[0]),
                    each[0],
                )
            )
        for path, status in entries:
            first = known.get(key)
            # Some file systems give several files one inode number: only links count.
            if first and (
                status.st_nlink > 1 or os.path.realpath(first) == os.path.realpath(root / path)
            ):
                left.append(LeftOut(path, READ_ALREADY, f"the same file as {first}"))
            else:
                known[key] = str(root / path)
                read.append(path)
    return FileList(root, tuple(sorted(read)), tuple(sorted(left)))


def _either(pattern: str) -> Iterator[str]:
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    for each in match[1].split(","):
        yield from _either(pattern[: match.start()] + each + pattern[match.end() :])


def _unknown(path: str) -> tuple[str, str]:
    return os.path.splitext(path)[1].lower() or "without a suffix", f"not one of {KINDS}"


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
