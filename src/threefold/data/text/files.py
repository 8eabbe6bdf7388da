"""Documents from files: a file, a folder, a glob, or the running Python's own standard library.

.txt, .md and .py files are a document each; the others hold one per row (`rows`). Files are read in the order of their
paths relative to the folder, with `/` between the parts (`listing`). The fingerprint names them by these paths, so a
folder that was moved or copied is the same source. Text is UTF-8 and keeps its line ends; a byte order mark is dropped.
"""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from threefold.config.paths import expanded
from threefold.data.text import file_errors, listing
from threefold.data.text import rows as text_rows
from threefold.data.text.fields import AGAIN, SKIP, TextField
from threefold.data.text.known_bytes import Digests, HashedFile, SourceFile
from threefold.data.text.listing import KINDS, TEXTS, FileList, Kind, kind_of
from threefold.data.text.source import (
    MAX_PROBLEMS,
    Document,
    Documents,
    Labelled,
    Labeller,
    LabellerFor,
    LossMask,
    Opening,
    Piece,
    ReadLog,
)
from threefold.errors import DataError, Problem, shell_word

# For the standard library: no tests and no installed packages.
EXCLUDED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})

# The byte order marks of UTF-16.
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Files:
    """Files under one root, in order.

    Args:
        name: the source as the user wrote it.
        files: the folder that the paths are relative to, and the paths.
        text_field: field of the text in rows; None if all files are plain text.
        skip_undecodable: leave out files that are not UTF-8, and count them.
        skip_bad: of files that cannot be read at all, too, none is refused.
        labeller: makes labelled documents of the rows.
        memory: folder where the files' digests are remembered; None: every file is read for the fingerprint.
    """

    name: str
    files: FileList
    text_field: str | None
    skip_undecodable: bool = False
    skip_bad: bool = False
    memory: Path | None = None
    labeller: Labeller | None = None

    @property
    def loss_mask(self) -> LossMask | None:
        return self.labeller.loss_mask if self.labeller is not None else None

    @property
    def _take(self) -> Labeller:
        return self.labeller or TextField(str(self.text_field))

    @property
    def root(self) -> Path:
        return self.files.root

    @property
    def paths(self) -> tuple[str, ...]:
        return self.files.read

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for path in self.paths if (kind := kind_of(path)) is not None)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every file's relative path, size and content, and of the field that is read."""
        recipe = f"files 1 {self.text_field!r} {self.skip_undecodable}"
        if self.labeller is not None:
            recipe += f" {self.labeller.recipe}"
        digest = hashlib.blake2b(recipe.encode(), digest_size=16)
        for path, hashed in zip(self.paths, self._hashed, strict=True):
            digest.update(f"\n{path}\0{hashed.content}".encode(errors="surrogateescape"))
        return digest.hexdigest()

    @cached_property
    def _hashed(self) -> list[HashedFile]:
        digests, hashed = Digests(self.root, self.memory), []
        for path in self.paths:
            try:
                hashed.append(digests.of(path))
            except OSError as error:
                full = self.root / path
                raise DataError(
                    f"{full} cannot be read: {error.strerror}",
                    expected="files that this user may read",
                    fix=f"chmod u+r {shell_word(full)}   (or leave the file out of the source)",
                ) from error
        digests.keep()
        return hashed

    def refuse_changed(self, pieces: Sequence[Piece]) -> None:
        """As `TextSource`."""
        for number in {piece.file: None for piece in pieces}:
            self._hashed[number].refuse_other(self.root / self.paths[number])

    def _file(self, number: int) -> SourceFile:
        """A file, of which only what was hashed is read once there is a fingerprint."""
        hashed = self._hashed[number] if "_hashed" in vars(self) else None
        return SourceFile(self.root / self.paths[number], hashed)

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        problems: list[Problem] = []
        for i, kind in enumerate(self.kinds):
            file = self._file(i)
            if kind.suffix == ".parquet":
                try:
                    pieces += text_rows.parquet_pieces(
                        file, number=i, take=self._take, skip_bad=self.skip_bad
                    )
                except DataError as error:
                    problems += error.problems
            elif kind == (".jsonl", None):
                pieces += text_rows.jsonl_pieces(file.size_bytes, number=i)
            else:
                size = file.size_bytes
                pieces.append(Piece(i, 0, size, size))
        DataError.raise_for(problems[:MAX_PROBLEMS])
        return pieces

    def read(self, piece: Piece, log: ReadLog) -> Iterator[Document]:
        full, (suffix, compression) = self._file(piece.file), self.kinds[piece.file]
        if (
            compression is not None
            and (damage := text_rows.damage(full, compression)) is not None
        ):
            log.bad(damage, expected="a complete file", fix=AGAIN)
        elif suffix not in (*TEXTS, ".parquet") and _is_utf_16(full, compression):
            _bad_encoding(full, compression, "it begins as UTF-16", "UTF-16", log)
        elif suffix in TEXTS:
            yield from self._read_text(full, compression, log)
        elif suffix == ".parquet":
            yield from text_rows.read_parquet(full, piece, take=self._take, log=log)
        else:
            read = {
                ".jsonl": text_rows.read_jsonl,
                ".json": text_rows.read_json,
                ".csv": text_rows.read_csv,
            }[suffix]
            yield from read(full, piece, take=self._take, log=log, compression=compression)

    def _read_text(
        self, full: SourceFile, compression: str | None, log: ReadLog
    ) -> Iterator[str]:
        with text_rows.opened(full, compression) as file:
            content = file.read()
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            if self.skip_undecodable:
                log.num_skipped += 1
            else:
                encoding = "UTF-16" if content.startswith(_UTF_16) else "LATIN1"
                where = f"byte {error.object[error.start]:#04x} at offset {error.start:,}"
                _bad_encoding(full, compression, where, encoding, log)
            return
        yield text.removeprefix("\ufeff")


def open_stdlib(memory: Path | None) -> Files:
    """The running Python's standard library without installed packages and test folders: about 12 MB of .py files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = listing.list_folder(root, {}, excluded=EXCLUDED_FOLDERS)
    files = FileList(root, tuple(path for path in files.read if path.endswith(".py")))
    if not files.read:
        raise DataError(
            f"data.source = 'stdlib': no .py file in {root}",
            expected="the standard library as files (some Python builds keep it in a zip or as .pyc only)",
            fix=f"--data.source FOLDER   (any folder of {KINDS})",
        )
    return Files("stdlib", files, None, skip_undecodable=True, memory=memory)


def open_files(name: str, asked: Opening) -> Files:
    """The files that a path or glob names; a DataError if there are none."""
    known, path = asked.known, expanded(name)
    if path.is_file():
        if (kind := kind_of(path.name)) is None:
            raise file_errors.unknown_kind(name, path)
        listed = listing.each_once(path.parent, {path.name: kind}, [], known)
    elif path.is_dir():
        listed = listing.list_folder(path, known)
        file_errors.refuse_several(name, listed)
    elif listing.is_glob(name):
        listed = listing.list_glob(str(path), known)
    else:
        raise file_errors.not_there(name, path)
    if not listed.read and not any(
        each.group == listing.READ_ALREADY for each in listed.left_out
    ):
        raise file_errors.nothing_readable(name, listed)
    source = asked.source
    files = Files(name, listed, None, skip_bad=source.skip_bad_lines, memory=asked.memory)
    if all(kind.suffix in TEXTS for kind in files.kinds):
        return files
    files = replace(files, text_field=source.text_field)
    return _labelled(files, asked.labeller_for) if asked.labeller_for else files


def _labelled(files: Files, labeller_for: LabellerFor) -> Files:
    """The files with the labeller for their rows, whose columns the first file of rows shows."""
    place = next(number for number, kind in enumerate(files.kinds) if kind.suffix not in TEXTS)
    full = files.root / files.paths[place]
    if files.kinds[place].suffix == ".parquet":
        labeller = labeller_for(text_rows.parquet_columns(SourceFile(full)))
    else:
        first = _FirstRow()
        size = full.stat().st_size
        for _ in replace(files, labeller=first).read(
            Piece(place, 0, size, size), ReadLog(skip_bad=True)
        ):
            break
        labeller = labeller_for(first.columns) if first.columns else None
    kinds = zip(files.paths, files.kinds, strict=True)
    texts = (path for path, kind in kinds if kind.suffix in TEXTS)
    if labeller is not None and (text := next(texts, None)) is not None:
        raise DataError(
            f"data.source = {files.name!r}: {text} is text, but other files hold rows with labels",
            expected="files of one format: a text has no prompt and no answer",
            fix="--data.source 'FOLDER/**/*.jsonl'   (or --data.format text)",
        )
    return replace(files, labeller=labeller)


class _FirstRow:
    """A labeller that only looks at the columns of the first row."""

    recipe, loss_mask = "", None
    columns: Sequence[str] = ()

    def documents(self, row: Any, log: ReadLog) -> Documents:
        if isinstance(row, dict):
            self.columns = list(row)
            return [Labelled(np.empty(0, np.int32), np.empty(0, np.bool_))]
        return "not an object", "an object"


def _is_utf_16(file: SourceFile, compression: str | None) -> bool:
    with text_rows.opened(file, compression) as opened:
        return opened.read(2).startswith(_UTF_16)


def _bad_encoding(
    file: SourceFile, compression: str | None, where: str, encoding: str, log: ReadLog
) -> None:
    quoted, convert = shell_word(file), f"iconv -f {encoding} -t UTF-8"
    unpacked = (
        f"{compression} -dc {quoted} | {convert}" if compression else f"{convert} {quoted}"
    )
    what, fix = f"{file} is not UTF-8: {where}", f"{unpacked} > NEW, or {SKIP}"
    log.bad(what, expected="text files in UTF-8", fix=fix)
