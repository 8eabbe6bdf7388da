"""Documents from files: a file, a folder, a glob, or the running Python's own standard library.

.txt, .md and .py files are a document each; .jsonl and .parquet files hold one per row (`rows`). Files are read in the
order of their paths relative to the folder, with `/` between the parts. The fingerprint names them by these paths, so
a folder that was moved or copied is the same source. Text is UTF-8 and is not changed: line ends are kept.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from threefold.data.text import rows as text_rows
from threefold.data.text.source import EXTENSIONS, MAX_PROBLEMS, Piece, ReadLog
from threefold.errors import DataError, Problem

ROW_EXTENSIONS = (".jsonl", ".parquet")
# Of the standard library: no tests and no installed packages.
EXCLUDED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class Files:
    """Files under one root, in order.

    Args:
        name: the source as the user wrote it.
        root: folder that the paths are relative to.
        paths: relative, with `/`, sorted.
        text_field: field of the text in rows; None if all files are plain text.
        skip_undecodable: leave out files that are not UTF-8, and count them.
    """

    name: str
    root: Path
    paths: tuple[str, ...]
    text_field: str | None
    skip_undecodable: bool = False

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every file's relative path, size and content, and of the field that is read."""
        digest = hashlib.blake2b(f"files 1 {self.text_field!r} {self.skip_undecodable}".encode(), digest_size=16)
        for path in self.paths:
            full = self.root / path
            try:
                with full.open("rb") as file:
                    content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
                    size = file.tell()
            except OSError as error:
                raise DataError(
                    f"{full} cannot be read: {error.strerror}",
                    expected="files that this user may read",
                    fix=f"chmod u+r {full}   (or leave the file out of the source)",
                ) from error
            digest.update(f"\n{path}\0{size}\0{content}".encode(errors="surrogateescape"))
        return digest.hexdigest()

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        problems: list[Problem] = []
        for i, path in enumerate(self.paths):
            full = self.root / path
            kind = path.lower().rpartition(".")[2]
            if kind == "parquet":
                try:
                    pieces += text_rows.parquet_pieces(full, file=i, text_field=str(self.text_field))
                except DataError as error:
                    problems += error.problems
            elif kind == "jsonl":
                pieces += text_rows.jsonl_pieces(full, file=i)
            else:
                size = full.stat().st_size
                pieces.append(Piece(i, 0, size, size))
        if problems:
            raise DataError.of(problems[:MAX_PROBLEMS])
        return pieces

    def read(self, piece: Piece, log: ReadLog) -> Iterator[str]:
        full = self.root / self.paths[piece.file]
        if full.name.lower().endswith(ROW_EXTENSIONS):
            read = text_rows.read_jsonl if full.name.lower().endswith(".jsonl") else text_rows.read_parquet
            yield from read(full, piece, text_field=str(self.text_field), log=log)
            return
        try:
            text = full.read_bytes().decode()
        except UnicodeDecodeError as error:
            if self.skip_undecodable:
                log.num_skipped += 1
            else:
                log.bad(
                    f"{full} is not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start:,}",
                    expected="text files in UTF-8",
                    fix=f"iconv -f LATIN1 -t UTF-8 {full} > NEW, or {text_rows.SKIP}",
                )
            return
        yield text


def open_stdlib() -> Files:
    """The running Python's standard library without installed packages and test folders: about 12 MB of .py files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = _walk(root, excluded=EXCLUDED_FOLDERS, extensions=(".py",))
    if not found:
        raise DataError(
            f"data.source = 'stdlib': no .py file in {root}",
            expected="the standard library as files (some Python builds keep it in a zip or as .pyc only)",
            fix="--data.source FOLDER   (any folder of .txt, .md, .py, .jsonl or .parquet)",
        )
    return Files("stdlib", root, found, None, skip_undecodable=True)


def open_files(source: str, *, text_field: str) -> Files:
    """The files that a path or glob names, of a folder all at any depth but hidden ones; a DataError without any."""
    path = Path(source).expanduser()
    if path.is_file():
        if not path.name.lower().endswith(EXTENSIONS):
            raise _unknown_extension(source, path)
        root: Path = path.parent
        found: tuple[str, ...] = (path.name,)
    elif path.is_dir():
        root, found = path, _walk(path, excluded=frozenset(), extensions=EXTENSIONS)
        if not found:
            raise _nothing_readable(source, path)
    elif glob.has_magic(source):
        root, found = _match(str(path))
        if not found:
            raise DataError(
                f"data.source = {source!r} matches no file",
                expected=f"at least one {', '.join(EXTENSIONS)} file, relative to {Path.cwd()}",
                fix="check the pattern with   ls " + source,
            )
    else:
        raise _not_there(source, path)
    rows = any(name.lower().endswith(ROW_EXTENSIONS) for name in found)
    return Files(source, root, found, text_field if rows else None)


def _walk(root: Path, *, excluded: frozenset[str], extensions: tuple[str, ...]) -> tuple[str, ...]:
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in excluded and not name.startswith(".")]
        found += [Path(folder, n) for n in names if n.lower().endswith(extensions) and not n.startswith(".")]
    return tuple(sorted(path.relative_to(root).as_posix() for path in found))


def _match(pattern: str) -> tuple[Path, tuple[str, ...]]:
    """Common folder and relative paths of the files that a glob matches."""
    fixed = Path(pattern)
    while glob.has_magic(str(fixed)):
        fixed = fixed.parent
    files = [Path(name) for name in glob.glob(pattern, recursive=True) if name.lower().endswith(EXTENSIONS)]
    return fixed, tuple(sorted(path.relative_to(fixed).as_posix() for path in files if path.is_file()))


def _unknown_extension(source: str, path: Path) -> DataError:
    nearest = difflib.get_close_matches(path.suffix.lower(), EXTENSIONS, 1)
    hint = f", for example as {path.with_suffix(nearest[0]).name}" if nearest else ""
    return DataError(
        f"data.source = {source!r}: files of type {path.suffix or '(no extension)'} are not supported",
        expected=f"one of {', '.join(EXTENSIONS)}",
        fix=f"rename or convert the file{hint}; to read one type from a folder: --data.source '{path.parent}/*.txt'",
    )


def _nothing_readable(source: str, folder: Path) -> DataError:
    if (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists():
        return DataError(
            f"data.source = {source!r} is a folder written by datasets' save_to_disk",
            expected="text files, or a folder that datasets.load_dataset reads",
            fix="dataset.to_parquet('data.parquet')   in Python, then --data.source data.parquet",
        )
    there = sorted({path.suffix or "(no extension)" for path in folder.rglob("*") if path.is_file()})[:10]
    return DataError(
        f"data.source = {source!r}: no file in this folder can be read",
        expected=f"{', '.join(EXTENSIONS)} files at any depth, not hidden; "
        f"the folder has {'only files of type ' + ', '.join(there) if there else 'no files'}",
        fix="--data.source FOLDER   (a folder that holds such files)",
    )


def _not_there(source: str, path: Path) -> DataError:
    parent = path.parent
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, [*names, "stdlib"], 1)
    fix = "--data.source PATH   (or stdlib, or hf:ID for a dataset on the Hub)"
    if nearest:
        fix = f"--data.source {nearest[0] if nearest[0] == 'stdlib' else parent / nearest[0]}"
    return DataError(
        f"data.source = {source!r} does not exist",
        expected=f"stdlib, hf:ID, a prepared folder, or a file, folder or glob, relative to {Path.cwd()}",
        fix=fix,
    )
